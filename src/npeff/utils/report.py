"""Results as files: tables as Markdown, CSV and LaTeX, figures as PNG and SVG.

A report is a list of blocks: texts in Markdown, and tables. `write_report` writes all of it as Markdown and its tables
as LaTeX; `Table.write_csv` writes one table with its values unrounded.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from npeff.utils.configs import Record, write_record
from npeff.utils.files import whole_file, write_text

Axes = Any
Figure = Any
"""Those of matplotlib, which is imported only where something is drawn."""
Value = str | float | bool | None


class Emphasis(Record):
    """A value of a table that stands out where it is read."""

    value: Value
    style: Literal["bold", "underlined"] = "bold"


Cell = Value | Emphasis


class Column(Record):
    """A column of a table."""

    name: str
    """Head of the column in CSV and, unless `title` is given, wherever it is read."""
    format: str = ""
    """How numbers are read, in Python's format language (".1%", ".3g"); CSV has them unrounded."""
    title: str | None = None
    """Head of the column where it is read."""
    only: Literal["csv", "text"] | None = None
    """csv: left out where the table is read; text: left out of the CSV."""


@dataclass
class Table:
    """Rows of values, written once and read as Markdown, CSV or LaTeX. Texts are literal: they cannot be markup."""

    caption: str
    columns: Sequence[Column]
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table in Markdown, without its caption."""
        shown = self._shown()
        lines = [[as_literal(self.columns[n].title or self.columns[n].name) for n in shown]]
        lines += [["---:" if self._numeric(n) else "---" for n in shown]]
        lines += [[self._styled(row[n], n, as_literal, _MARKDOWN_STYLES) for n in shown] for row in self.rows]
        return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)

    def latex(self) -> str:
        """The table for documents that load the package booktabs.

        Returns:
            A tabular behind a comment with the caption.
        """
        shown = self._shown()
        head = " & ".join(_latex(self.columns[n].title or self.columns[n].name) for n in shown)
        body = [" & ".join(self._styled(row[n], n, _latex, _LATEX_STYLES) for n in shown) for row in self.rows]
        kinds = "".join("r" if self._numeric(n) else "l" for n in shown)
        lines = [f"% {' '.join(self.caption.split())}", f"\\begin{{tabular}}{{{kinds}}}", r"\toprule", rf"{head} \\"]
        lines += [r"\midrule", *(rf"{line} \\" for line in body), r"\bottomrule", r"\end{tabular}"]
        return "\n".join(lines) + "\n"

    def write_csv(self, path: Path) -> None:
        """Write the table as CSV, whole or not at all: values unrounded, flags as 0 and 1, None as an empty cell.

        Args:
            path: The file.
        """
        kept = [n for n, column in enumerate(self.columns) if column.only != "text"]
        with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow([self.columns[n].name for n in kept])
            for row in self.rows:
                values = [_bare(row[n]) for n in kept]
                writer.writerow([int(value) if isinstance(value, bool) else value for value in values])

    def _shown(self) -> list[int]:
        return [n for n, column in enumerate(self.columns) if column.only != "csv"]

    def _numeric(self, n: int) -> bool:
        values = [_bare(row[n]) for row in self.rows]
        return any(value is not None for value in values) and not any(isinstance(v, str | bool) for v in values)

    def _styled(self, cell: Cell, n: int, literal: Callable[[str], str], styles: dict[str, tuple[str, str]]) -> str:
        text = literal(self._text(_bare(cell), n))
        before, after = styles[cell.style] if isinstance(cell, Emphasis) and text else ("", "")
        return f"{before}{text}{after}"

    def _text(self, value: Value, n: int) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else format(value, self.columns[n].format)


def _bare(cell: Cell) -> Value:
    return cell.value if isinstance(cell, Emphasis) else cell


_MARKDOWN_STYLES = {"bold": ("**", "**"), "underlined": ("<u>", "</u>")}
_LATEX_STYLES = {"bold": (r"\textbf{", "}"), "underlined": (r"\underline{", "}")}
_LATEX = {char: f"\\{char}" for char in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
_LATEX |= {">": r"\textgreater{}", "→": r"$\to$", "±": r"$\pm$", "÷": r"$\div$", "\u2212": "$-$", "√": r"$\surd$"}
_LATEX |= {"τ": r"$\tau$", "…": r"\ldots{}"}
_LATEX |= {"[": "{[}", "]": "{]}"}  # at the beginning of a line it would be an option of the line before


def as_literal(text: str) -> str:
    """`text` as literal text of Markdown, on one line: neither markup nor a link nor a mention of somebody."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    escaped = "".join(f"\\{char}" if char in r"\`*_[]<>|#&!~$" else char for char in printable)
    return escaped.replace("@", "&#64;").replace("://", ":&#47;/")


def _latex(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return "".join(_LATEX.get(char, char) for char in printable)


def record_table(caption: str, records: Iterable[Any], formats: dict[str, str]) -> Table:
    """A line for each record: the fields that `formats` names, each with how its numbers are read."""
    rows = [[getattr(record, name) for name in formats] for record in records]
    return Table(caption, [Column(name, how) for name, how in formats.items()], list(rows))


def as_markdown(blocks: Iterable[str | Table]) -> str:
    """Texts and tables one below the other, each table behind its caption."""
    parts = (block if isinstance(block, str) else f"{block.caption}\n\n{block.markdown()}" for block in blocks)
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def write_report(path: Path, blocks: Sequence[str | Table], csv: Table | None = None) -> str:
    """Write a report as `path`.md, its tables as `path`.tex and, if `csv` is given, that table as `path`.csv.

    Args:
        path: Where to, without the endings.
        blocks: Texts and tables.
        csv: The table to write as CSV.

    Returns:
        The report in Markdown.
    """
    text = as_markdown(blocks)
    if csv is not None:
        csv.write_csv(path.with_name(f"{path.name}.csv"))
    tables = [block.latex() for block in blocks if isinstance(block, Table)]
    write_text(path.with_name(f"{path.name}.tex"), "\n".join(tables))
    write_text(path.with_name(f"{path.name}.md"), text)
    return text


def write_result(path: Path, result: Any, blocks: Sequence[str | Table], draw: Draw, panels: int = 1) -> str:
    """Write a result in all its forms: a report, its first table as CSV, a figure and, last, JSON.

    Args:
        path: Where to, without the endings.
        result: A record; a folder that has it as JSON is finished.
        blocks: What the report says; the first block is a table.
        draw: As for `draw_figure`.
        panels: As for `draw_figure`.

    Returns:
        The report in Markdown.
    """
    text = write_report(path, blocks, csv=next(block for block in blocks if isinstance(block, Table)))
    draw_figure(path, draw, result, panels)
    write_record(path.with_name(f"{path.name}.json"), result)
    return text


Draw = Callable[[Any, Any], None]
"""Fills axes with values; several axes if there are several panels."""
BLUE, RED, PURPLE = "#1f6f8b", "#b03a2e", "#6a4c93"
"""Colours that figures share."""


def new_figure(width: float = 6, height: float = 3.5) -> Figure:
    """An empty figure, in inches. No window system is asked for, and matplotlib is imported only here."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_figure(path: Path, draw: Draw, values: Any, panels: int = 1) -> None:
    """Let `draw` fill axes with `values`, so many panels beside each other, and write the figure."""
    figure = new_figure(3 + 3 * panels)
    draw(figure.subplots(1, panels), values)
    for axes in figure.axes:
        plain_axes(axes)
    write_figure(path, figure)


def write_figure(path: Path, figure: Figure, dpi: int = 150) -> None:
    """Write a figure as PNG and SVG; the same figure gives the same files.

    Args:
        path: Where to, without the endings .png and .svg.
        figure: The figure.
        dpi: Resolution of the PNG.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "npeff", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # texts have characters that the font does not
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            with whole_file(path.with_name(f"{path.name}.{kind}")) as temporary:
                figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)


def plain_axes(axes: Any) -> None:
    """Without the frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
