"""A study's result for people and machines: Markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from npeff.utils.files import write_csv, write_json
from npeff.utils.tables import write_tables


def write(directory: Path, found: dict[str, Any]) -> None:
    """Write all files; the JSON comes last."""
    write_csv(directory / "scores.csv", _score_rows(found))
    write_csv(directory / "agreement.csv", _pair_rows(found))
    write_csv(directory / "themes.csv", _theme_rows(found))
    write_tables(directory / "scores", markdown(found) + "\n" + themes(found))
    write_json(directory / "scores.json", found)


def markdown(found: dict[str, Any]) -> str:
    """The two tables of a study."""
    lines = [
        "# Do annotators see a theme?",
        "",
        "Themed: component groups with yes or maybe. False positives: random groups with yes or maybe. The intervals "
        "are 95% over groups.",
        "",
        "| annotator | decomposition | themed | interval | false positives | interval | not answered |",
        "|---|---|---|---|---|---|---|",
    ]
    for annotator in found["annotators"]:
        false = annotator["false_positives"]
        for name, themed in annotator["themed"].items():
            cells = [_share(themed), _interval(themed), _share(false), _interval(false), annotator["unanswered"]]
            lines.append(f"| {literal(annotator['title'])} | {literal(name)} | {' | '.join(map(str, cells))} |")
    if found["pairs"]:
        lines += ["", "Agreement: the same answer to a group, counting maybe as yes.", ""]
        lines += ["| annotators | agreement | interval | Cohen's kappa |", "|---|---|---|---|"]
    for pair in found["pairs"]:
        value = "not defined" if pair["kappa"] is None else f"{pair['kappa']:.2f}"
        names = f"{literal(pair['first'])}, {literal(pair['second'])}"
        lines.append(f"| {names} | {_share(pair['agreement'])} | {_interval(pair['agreement'])} | {value} |")
    return "\n".join(lines) + "\n"


def themes(found: dict[str, Any]) -> str:
    """What was said about each component."""
    lines = ["## Themes", "", "| component | group | annotator | answer | theme |", "|---|---|---|---|---|"]
    for row in found["themes"]:
        for answer in row["answers"]:
            where = f"{literal(row['decomposition'])} {row['component']} | {row['group']}"
            lines.append(f"| {where} | {literal(answer['who'])} | {answer['theme']} | {literal(answer['words'])} |")
    return "\n".join(lines) + "\n"


def _share(value: dict[str, Any]) -> str:
    return "" if value["share"] is None else f"{value['share']:.0%} ({value['count']} of {value['of']})"


def _interval(value: dict[str, Any]) -> str:
    return "" if value["low"] is None else f"{value['low']:.0%} to {value['high']:.0%}"


def literal(text: str) -> str:
    """`text` as literal text of a Markdown table."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return "".join(f"\\{char}" if char in r"\`*_[]<>|#&!~$" else char for char in printable)


_NUMBERS = ("count", "of", "share", "low", "high")


def _score_rows(found: dict[str, Any]) -> Iterable[list[Any]]:
    parts = [f"{kind}_{number}" for kind in ("themed", "false_positives") for number in _NUMBERS]
    yield ["annotator", "source", "decomposition", *parts, "not_answered"]
    for annotator in found["annotators"]:
        false = [annotator["false_positives"][number] for number in _NUMBERS]
        for name, themed in annotator["themed"].items():
            numbers = [*(themed[number] for number in _NUMBERS), *false]
            yield [annotator["title"], annotator["source"], name, *numbers, annotator["unanswered"]]


def _pair_rows(found: dict[str, Any]) -> Iterable[list[Any]]:
    yield ["first", "second", *(f"agreement_{number}" for number in _NUMBERS), "kappa"]
    for pair in found["pairs"]:
        numbers = [pair["agreement"][number] for number in _NUMBERS]
        yield [pair["first"], pair["second"], *numbers, pair["kappa"]]


def _theme_rows(found: dict[str, Any]) -> Iterable[list[Any]]:
    yield ["decomposition", "component", "group", "annotator", "automatic", "answer", "theme"]
    for row in found["themes"]:
        for said in row["answers"]:
            where = [row["decomposition"], row["component"], row["group"]]
            yield [*where, said["who"], int(said["automatic"]), said["theme"], said["words"]]
