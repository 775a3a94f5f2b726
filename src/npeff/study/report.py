"""A study's result for people and machines: Markdown, LaTeX, CSV, JSON."""

from __future__ import annotations

from pathlib import Path

from npeff.study.count import Scores, Share
from npeff.utils.configs import write_record
from npeff.utils.report import Cell, Column, Table, as_markdown, write_report

_ENTRIES = ("count", "of", "share", "low", "high")


def write_scores(directory: Path, scores: Scores) -> str:
    """Write all files of a result, the JSON last.

    Args:
        directory: Where to.
        scores: Result of the study.

    Returns:
        The tables in Markdown, without the one of themes.
    """
    annotators, pairs, themes = tables(scores)
    pairs.write_csv(directory / "agreement.csv")
    themes.write_csv(directory / "themes.csv")
    blocks: list[str | Table] = ["# Do annotators see a theme?", annotators, *([pairs] if pairs.rows else [])]
    write_report(directory / "scores", [*blocks, "## Themes", themes], csv=annotators)
    write_record(directory / "scores.json", scores)
    return as_markdown(blocks)


def tables(scores: Scores) -> tuple[Table, Table, Table]:
    """What annotators saw, how far they agree, and what they said.

    Args:
        scores: Result of the study.

    Returns:
        A table of each.
    """
    annotators = Table(
        "Themed: component groups with yes or maybe. False positives: random groups with yes or maybe. The intervals "
        "are 95% over groups.",
        [
            *(Column("annotator"), Column("source", only="csv"), Column("decomposition")),
            *(*_share_columns("themed"), *_share_columns("false_positives")),
            Column("not_answered", title="not answered"),
        ],
        [
            (each.title, each.source, name, *_cells(themed), *_cells(each.false_positives), each.unanswered)
            for each in scores.annotators
            for name, themed in each.themed.items()
        ],
    )
    pairs = Table(
        "Agreement: the same answer to a group, counting maybe as yes. Cohen's kappa is empty where it is not defined.",
        [Column("first"), Column("second"), *_share_columns("agreement"), Column("kappa", ".2f", "Cohen's kappa")],
        [(pair.first, pair.second, *_cells(pair.agreement), pair.kappa) for pair in scores.pairs],
    )
    themes = Table(
        "What was said about each component.",
        [*map(Column, ("decomposition", "component", "group", "annotator", "automatic", "answer", "theme"))],
        [
            (each.decomposition, each.component, each.group, said.who, said.automatic, said.theme, said.words)
            for each in scores.themes
            for said in each.answers
        ],
    )
    return annotators, pairs, themes


def _share_columns(name: str) -> list[Column]:
    shown = [Column(name.replace("_", " "), only="text"), Column("interval", only="text")]
    return shown + [Column(f"{name}_{entry}", only="csv") for entry in _ENTRIES]


def _cells(share: Share) -> list[Cell]:
    text = "" if share.share is None else f"{share.share:.0%} ({share.count} of {share.of})"
    interval = "" if share.low is None else f"{share.low:.0%} to {share.high:.0%}"
    return [text, interval, *(getattr(share, entry) for entry in _ENTRIES)]
