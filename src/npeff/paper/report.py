"""The files of a reproduction: the measured numbers beside the paper's, and the settings of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npeff.paper.recipe import Listing, Missing, Number, Recipe, Setting
from npeff.utils.configs import write_record
from npeff.utils.files import remove_partials
from npeff.utils.report import BLUE, RED, Column, Table, new_figure, plain_axes, write_figure, write_report
from npeff.utils.text import shorten

SETTINGS = ("task", "model", "examples", "components", "directions", "rank", "sketch", "dim", "solver", "seed")
"""Settings that are always shown; others are where they differ."""


@dataclass(frozen=True)
class Cell:
    """A number of the paper's table, measured again."""

    row: str
    """Row of the table."""
    column: str
    """Column of the table."""
    paper: Number
    """The paper's number, if it prints one."""
    measured: Number
    """The number here."""
    settings: int
    """Place of the number's settings in the list of settings."""


@dataclass(frozen=True)
class Settings:
    """Settings that numbers were measured with."""

    paper: dict[str, Setting]
    """The paper's."""
    here: dict[str, Setting]
    """Those here."""


@dataclass
class Reproduction:
    """A table or figure of the paper, measured again: OUT/RECIPE/scale-SCALE/table.json."""

    recipe: str
    """Name of the recipe."""
    label: str
    """Label in the source of the paper."""
    title: str
    """Title of the table or figure."""
    npeff: str
    """Version of npeff."""
    options: dict[str, Any]
    """Options of the command."""
    cells: list[Cell] = field(default_factory=list)
    """All numbers."""
    settings: list[Settings] = field(default_factory=list)
    """The different settings that numbers were measured with."""
    missing: list[Missing] = field(default_factory=list)
    """What was not measured."""
    listings: list[Listing] = field(default_factory=list)
    """Texts to read."""

    def settings_number(self, settings: Settings) -> int:
        """Place of `settings` in the list; added if they are new."""
        if settings not in self.settings:
            self.settings.append(settings)
        return self.settings.index(settings)


def write(directory: Path, recipe: Recipe, result: Reproduction) -> None:
    """Write table.csv, .md, .tex, .png, .svg and, last, .json.

    Args:
        directory: Where to write.
        recipe: The recipe.
        result: What was measured.
    """
    (directory / "table.json").unlink(missing_ok=True)
    remove_partials(directory)
    write_report(directory / "table", report(recipe, result), csv=_all_cells(result))
    if result.cells:
        _draw(directory / "table", recipe, result)
    write_record(directory / "table.json", result)


def number(value: Number) -> str:
    """A number as a table of the paper would have it; empty for none."""
    if value is None:
        return ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def report(recipe: Recipe, result: Reproduction) -> list[str | Table]:
    """What there is to read about a reproduction.

    Args:
        recipe: The recipe.
        result: What was measured.

    Returns:
        Texts in Markdown, the table of numbers, the settings, what is missing, and the listings.
    """
    blocks: list[str | Table] = [f"# {recipe.title}", f"`{recipe.name}`, {recipe.label} of the paper. {recipe.note}"]
    if recipe.rows or result.cells:
        only_measured = bool(result.options.get("tasks"))
        blocks.append(comparison(recipe, result.cells, only_measured))
    blocks += ["## Settings", _settings(result)]
    if result.missing:
        gaps = [f"- {gap.what}: {gap.why}" for gap in result.missing]
        blocks += ["## Not measured", "\n".join(gaps)]
    for listing in result.listings:
        examples = Table("In order of their coefficients:", [Column("example")], [[line] for line in listing.lines])
        blocks += [f"## {listing.title}", examples]
    return blocks


def comparison(recipe: Recipe, cells: list[Cell], only_measured: bool = False) -> Table:
    """The table of the paper with `measured (paper)` in every cell.

    Args:
        recipe: The recipe.
        cells: What was measured; may be more than the paper has.
        only_measured: Whether to leave out columns of which nothing was measured.

    Returns:
        The table.
    """
    rows, columns, measured = _layout(recipe, cells, only_measured)

    def text(row: str, column: str) -> str:
        paper = number(recipe.paper(row, column))
        return f"{number(measured.get((row, column))) or '-'}{f' ({paper})' if paper else ''}"

    table = Table("Measured, and in brackets the paper's number:", [Column(name) for name in ("", *columns)])
    table.rows += [[row, *(text(row, column) for column in columns)] for row in rows]
    return table


def _layout(
    recipe: Recipe, cells: list[Cell], only_measured: bool
) -> tuple[list[str], list[str], dict[tuple[str, str], Number]]:
    """Rows and columns: the paper's, then what was measured beyond. And (row, column) → what was measured."""
    measured = {(cell.row, cell.column): cell.measured for cell in cells}
    rows = dict.fromkeys([*recipe.rows, *(row for row, _ in measured)])
    columns = dict.fromkeys([*(() if only_measured else recipe.columns), *(column for _, column in measured)])
    return list(rows), list(columns), measured


def _settings(result: Reproduction) -> Table:
    first = result.settings[0].here if result.settings else {}
    shown = dict.fromkeys(name for name in SETTINGS if name in first)
    for each in result.settings:
        # the learning rates follow from the number of examples
        shown |= dict.fromkeys(n for n in each.here if each.here[n] != first[n] and not n.endswith("_rate"))

    def text(here: Setting, paper: Setting) -> str:
        values = ["none" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in (here, paper)]
        return values[0] if here == paper else f"{values[0]} ({values[1]})"

    table = Table("Here, and in brackets the paper's where they differ:", [Column(name) for name in shown])
    table.rows += [[text(each.here[name], each.paper[name]) for name in shown] for each in result.settings]
    return table


def _all_cells(result: Reproduction) -> Table:
    """A line per number, with the settings of both."""
    settings = [f"{side}_{name}" for side in ("here", "paper") for name in SETTINGS]
    table = Table(result.title, [Column(name) for name in ("row", "column", "paper", "measured", *settings)])
    for cell in result.cells:
        used = result.settings[cell.settings]
        values = [side[name] for side in (used.here, used.paper) for name in SETTINGS]
        table.rows.append([cell.row, cell.column, cell.paper, cell.measured, *values])
    return table


def _draw(path: Path, recipe: Recipe, result: Reproduction) -> None:
    """A panel per column, a line per row: a ring for the paper's number, a dot for the measured one."""
    rows, columns, measured = _layout(recipe, result.cells, bool(result.options.get("tasks")))
    figure = new_figure(2 + 1.7 * len(columns), 1.2 + 0.28 * len(rows))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
        paper = [recipe.paper(row, column) for row in rows]
        here = [measured.get((row, column)) for row in rows]
        # a ring is seen around the dot of an equal number
        for label, values, size, face, edge in (("paper", paper, 60, "none", BLUE), ("measured", here, 18, RED, RED)):
            known = [(value, place) for place, value in enumerate(values) if value is not None]
            x, y = zip(*known, strict=True) if known else ((), ())
            axes.scatter(x, y, s=size, facecolors=face, edgecolors=edge, label=label)
        axes.set_title(column, fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
        axes.tick_params(labelsize=7)
        plain_axes(axes)
    panels[0].set_yticks(range(len(rows)), [shorten(row, 40) for row in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    write_figure(path, figure, dpi=130)
