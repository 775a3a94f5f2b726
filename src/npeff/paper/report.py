"""A reproduction for people and machines: the paper's numbers beside the measured ones, and the settings of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npeff.paper.recipe import Recipe
from npeff.utils.files import remove_partials, write_csv, write_json
from npeff.utils.report import BLUE, RED, new_figure, plain_axes, write_figure
from npeff.utils.tables import write_tables

SETTINGS = ("task", "model", "examples", "components", "directions", "rank", "sketch", "dim", "solver", "seed")
"""What is shown of a setup; more where it differs."""


def write(directory: Path, recipe: Recipe, found: dict[str, Any]) -> None:
    """Write table.csv, .md, .tex, .png, .svg and, last, .json."""
    (directory / "table.json").unlink(missing_ok=True)
    remove_partials(directory)
    _write_cells(directory / "table.csv", found)
    write_tables(directory / "table", markdown(recipe, found))
    if found["cells"]:
        _figure(directory / "table", recipe, found)
    about = {"recipe": recipe.name, "label": recipe.label, "title": recipe.title}
    write_json(directory / "table.json", {**about, **found})


def number(value: float | None) -> str:
    """As a table would have it; empty for none."""
    if value is None:
        return ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def layout(recipe: Recipe, found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Rows and columns: the paper's, then what was measured beyond; of some `--tasks` only their columns."""
    rows = list(dict.fromkeys([*recipe.rows, *(cell["row"] for cell in found["cells"])]))
    measured = [cell["column"] for cell in found["cells"]]
    columns = list(dict.fromkeys([*recipe.columns, *measured]))
    if found.get("options", {}).get("tasks"):
        columns = [column for column in columns if column in measured]
    return rows, columns


def markdown(recipe: Recipe, found: dict[str, Any]) -> str:
    """The table with `measured (paper)` in every cell, settings, gaps and texts."""
    lines = [f"# {recipe.title}", "", f"`{recipe.name}`, {recipe.label} of the paper. {recipe.note}".rstrip(), ""]
    if recipe.rows or found["cells"]:
        measured = {(cell["row"], cell["column"]): cell["measured"] for cell in found["cells"]}
        lines += ["Measured, and in brackets the paper's number:", "", *_table(recipe, found, measured), ""]
    lines += ["## Settings", "", "Here, and in brackets the paper's where they differ:", "", *_settings(found)]
    if found["missing"]:
        lines += ["", "## Not measured", "", *(f"- {gap['what']}: {gap['why']}" for gap in found["missing"])]
    for listing in found["listings"]:
        lines += ["", f"## {listing['title']}", "", *(f"- {_plain(line)}" for line in listing["lines"])]
    return "\n".join(lines) + "\n"


def paper_table(recipe: Recipe) -> str:
    """The paper's numbers alone."""
    return "\n".join(_table(recipe, {"cells": []}, {}))


def _table(recipe: Recipe, found: dict[str, Any], measured: dict[tuple[str, str], float | None]) -> list[str]:
    rows, columns = layout(recipe, found)
    lines = [f"| | {' | '.join(map(_plain, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = []
        for column in columns:
            paper = number(recipe.paper(row, column))
            cells.append(f"{number(measured.get((row, column))) or '-'}{f' ({paper})' if paper else ''}")
        lines.append(f"| {_plain(row)} | {' | '.join(cells)} |")
    return lines


def _settings(found: dict[str, Any]) -> list[str]:
    shown = [name for name in SETTINGS if any(name in pair["here"] for pair in found["settings"])]
    for pair in found["settings"]:
        differing = [name for name in pair["here"] if pair["here"][name] != found["settings"][0]["here"][name]]
        # the rates follow from the number of examples
        shown += [name for name in differing if name not in shown and not name.endswith("_rate")]
    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    for pair in found["settings"]:
        here, paper = pair["here"], pair["paper"]
        cells = [
            _value(here[name]) + ("" if here[name] == paper[name] else f" ({_value(paper[name])})") for name in shown
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _value(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    """Text that does not break a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _write_cells(path: Path, found: dict[str, Any]) -> None:
    names = [f"{side}_{name}" for side in ("here", "paper") for name in SETTINGS]
    rows = [["row", "column", "paper", "measured", *names]]
    for cell in found["cells"]:
        pair = found["settings"][cell["settings"]]
        values = [pair[side][name] for side in ("here", "paper") for name in SETTINGS]
        rows.append([cell["row"], cell["column"], cell["paper"], cell["measured"], *values])
    write_csv(path, rows)


def _figure(path: Path, recipe: Recipe, found: dict[str, Any]) -> None:
    """A panel per column, a line per row: a ring for the paper's number, a dot for the measured one."""
    rows, columns = layout(recipe, found)
    measured = {(cell["row"], cell["column"]): cell["measured"] for cell in found["cells"]}
    figure = new_figure(2 + 1.7 * len(columns), 1.2 + 0.28 * len(rows))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
        for source, style in ((recipe.paper, "ring"), (lambda row, name: measured.get((row, name)), "dot")):
            points = [(value, place) for place, row in enumerate(rows) if (value := source(row, column)) is not None]
            face, label = ("none", "paper") if style == "ring" else (RED, "measured")
            edge = BLUE if style == "ring" else RED
            size = 60 if style == "ring" else 18  # a ring is seen around the dot of an equal number
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=size, facecolors=face, edgecolors=edge, label=label
            )
        axes.set_title(column, fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
        axes.tick_params(labelsize=7)
        plain_axes(axes)
    panels[0].set_yticks(range(len(rows)), [row if len(row) <= 40 else row[:39] + "…" for row in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    write_figure(path, figure, dpi=130)
