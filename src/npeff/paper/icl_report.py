"""The table of `npeff icl` in the layout of the paper: Markdown, LaTeX, CSV, figures and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npeff.decompose.config import Method
from npeff.utils.configs import write_record
from npeff.utils.report import BLUE, RED, Column, Emphasis, Table, draw_figure, plain_axes, write_report

MEASURES = {"accuracy": "Accuracy", "similarity_0": "Similarity 0-shot", "similarity_k": "Similarity ICL"}


@dataclass(frozen=True)
class Context:
    """The best context."""

    examples: list[int]
    """Its worked examples."""
    text: str
    """What stands before every prompt."""
    scores: list[float]
    """Accuracy behind each context that was tried."""


@dataclass(frozen=True)
class IclRow:
    """The classifier on the components of one decomposition."""

    name: str
    """Name of the decomposition."""
    method: Method
    """Its method."""
    title: str
    """What the paper calls the method; the name where two decompositions have the same method."""
    components: int
    """Its number of components."""
    tuned: list[int]
    """Number of components that vote for each label."""
    left_out: int
    """Components with too few active examples to vote."""
    undecided: int
    """Examples for which all labels had the same score, so that the first one was taken."""
    accuracy: float
    """Share of examples where the classifier gives the label."""
    similarity_0: float
    """Share of examples where it gives the model's prediction without a context."""
    similarity_k: float
    """Share of examples where it gives the model's prediction behind the context."""


@dataclass(frozen=True)
class IclTable:
    """What `npeff icl` measured: RUN/icl/SHOTS-SEED/table.json."""

    npeff: str
    """Version of npeff."""
    run: str
    """Fingerprint of the run."""
    task: str
    """Name of the run's task."""
    model: str
    """The run's model."""
    options: dict[str, Any]
    """Options of the command."""
    context: Context
    """The best context."""
    examples: int
    """Examples that were counted: all usable ones but those of the context."""
    accuracy_0: float
    """Accuracy of the model without a context."""
    accuracy_k: float
    """Accuracy of the model behind the context."""
    similarity_0_k: float
    """Share of examples where the two predictions agree."""
    rows: list[IclRow]
    """The decompositions, in the order of the paper's methods."""


def write(directory: Path, result: IclTable) -> list[str | Table]:
    """Write table.csv, .md, .tex, .png, .svg and, last, .json.

    Args:
        directory: Where to write.
        result: What was measured.

    Returns:
        What there is to read, as in table.md.
    """
    names = ("title", "name", "components", "left_out", "undecided", *MEASURES)
    table = Table("", [Column(name) for name in names], [[getattr(row, n) for n in names] for row in result.rows])
    blocks = report(result)
    write_report(directory / "table", blocks, csv=table)
    draw_figure(directory / "table", _draw, result)
    write_record(directory / "table.json", result)
    return blocks


def report(result: IclTable) -> list[str | Table]:
    """What there is to read: percentages, a column per decomposition; the highest of a row is bold.

    Args:
        result: What was measured.

    Returns:
        The table, and a note on examples without a vote.
    """
    caption = (
        f"{result.task}, {result.model}, {result.examples} examples: accuracy {result.accuracy_0:.1%} 0-shot, "
        f"{result.accuracy_k:.1%} {result.options['shots']}-shot (best of {result.options['sets']} contexts); the two "
        f"agree on {result.similarity_0_k:.1%}. In percent:"
    )
    columns = [Column(""), *(Column(row.title, ".1f") for row in result.rows)]
    blocks: list[str | Table] = [table := Table(caption, columns)]
    for measure, title in MEASURES.items():
        values = [100 * getattr(row, measure) for row in result.rows]
        table.rows.append([title, *(Emphasis(value) if value == max(values) else value for value in values)])
    silent = [f"{row.title} {row.undecided}" for row in result.rows if row.undecided]
    if silent:
        blocks.append(f"Examples without a vote, for which the first label was taken: {', '.join(silent)}.")
    return blocks


def _draw(axes: Any, result: IclTable) -> None:
    """A group of bars per decomposition; lines at the accuracies of the model itself."""
    for k, (measure, colour) in enumerate(zip(MEASURES, (BLUE, "#a7a7a7", RED), strict=True)):
        places = [n + 0.27 * (k - 1) for n in range(len(result.rows))]
        values = [100 * getattr(row, measure) for row in result.rows]
        axes.bar(places, values, width=0.25, color=colour, label=MEASURES[measure])
    for shots, value, style in ((0, result.accuracy_0, ":"), (result.options["shots"], result.accuracy_k, "--")):
        axes.axhline(100 * value, color="black", linewidth=0.8, linestyle=style, label=f"{shots}-shot accuracy")
    axes.set_xticks(range(len(result.rows)), [row.title for row in result.rows])
    axes.set(ylim=(0, 100), ylabel="% of examples", title=f"{result.task}, {result.examples} examples")
    axes.legend(frameon=False, fontsize=7)
    plain_axes(axes)
