"""Tables and figures of `npeff stability`, and the tree of splits, from what its JSON file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from npeff.analyse.records import Similarity, Stability
from npeff.collect.identity import brief
from npeff.utils.configs import write_record
from npeff.utils.files import remove_partials, write_text
from npeff.utils.report import (
    BLUE,
    RED,
    Cell,
    Column,
    Table,
    as_literal,
    draw_figure,
    new_figure,
    plain_axes,
    remove_figure,
    write_figure,
    write_report,
)
from npeff.utils.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TALLEST = 60.0
"""Inches of the longest tree."""
_LINE = 0.17
"""Inches of a component in the figure of a tree that has room for it."""
_READABLE = 0.1
"""Inches below which components are drawn without their text."""
_CLASSES = 9
"""Classes with a colour of their own."""


_TITLES = {
    "coefficients": "coefficients W",
    "pseudo_fishers": "pseudo-Fishers G",
    "best": "best, by coefficients",
}


def write(directory: Path, result: Stability) -> None:
    """Write the tables, the tree, the figures and, last, stability.json."""
    (directory / "stability.json").unlink(missing_ok=True)
    remove_partials(directory)
    for name, table in (("seeds", seeds_table), ("splits", splits_table), ("against", against_table)):
        table(result).write_csv(directory / f"{name}.csv")
    write_report(directory / "stability", tables(result))
    seeds, tree = directory / "seeds", directory / "tree"
    remove_figure(seeds)  # of other options
    remove_figure(tree)
    tree.with_suffix(".md").unlink(missing_ok=True)
    if any(row.pairs for row in result.seeds):
        draw_figure(seeds, _draw_seeds, result)
    if result.splits:
        write_text(tree.with_suffix(".md"), tree_markdown(result))
        _draw_tree(tree, result)
    write_record(directory / "stability.json", result)


# --- tables -------------------------------------------------------------------------------------------------------


def tables(result: Stability) -> list[Table]:
    """The paper's two tables, and one of other runs; those that have rows, and always the one of seeds."""
    others = [table for table in (splits_table(result), against_table(result)) if table.rows]
    return [seeds_table(result), *others]


def seeds_table(result: Stability) -> Table:
    """A line per number of components."""
    kinds = ("coefficients", "pseudo_fishers", "best")
    return Table(
        f"Mean similarity of matched components over pairs of {len(result.options['seeds'])} seeds",
        [Column("components"), *_columns(kinds)],
        [[row.components, *_cells(row, kinds)] for row in result.seeds],
    )


def splits_table(result: Stability) -> Table:
    """A line per two numbers of components."""
    csv = ("with_splits", "mean_best_similarity")
    columns = [
        Column("coarse"),
        Column("fine"),
        Column("preserved", title="kept"),
        Column("tuned_splits", title="of"),
        Column("share_preserved", ".1%", title="share"),
        *(Column(name, only="csv") for name in csv),
        Column("coarse ones with splits", only="text"),
    ]
    names = [column.name for column in columns[:-1]]
    table = Table("Splits of prediction-tuned components that keep the tuning", columns)
    for row in result.splits:
        table.rows.append([*(getattr(row, name) for name in names), f"{row.with_splits} of {row.coarse}"])
    return table


def against_table(result: Stability) -> Table:
    """A line per other run and number of components."""
    kinds = ("coefficients", "best")
    table = Table(
        "Similarity to the decompositions of other runs, with the same seeds",
        [Column("against", title="run"), Column("components"), *_columns(kinds), Column("what differs", only="text")],
    )
    for row in result.against:
        differs = "; ".join(f"{name}: {brief(here)} → {brief(there)}" for name, (here, there) in row.differs.items())
        table.rows.append([row.against, row.components, *_cells(row, kinds), differs or "nothing"])
    return table


def _columns(kinds: Sequence[str]) -> list[Column]:
    """Columns of similarities: mean and deviation in CSV, both in one where the table is read."""
    columns = [Column("pairs", only="csv")]
    for kind in kinds:
        columns += [Column(kind, only="csv"), Column(f"{kind}_deviation", only="csv")]
        columns.append(Column(_TITLES[kind], only="text"))
    return columns


def _cells(row: Similarity, kinds: Sequence[str]) -> list[Cell]:
    cells: list[Cell] = [row.pairs]
    for kind in kinds:
        mean, deviation = getattr(row, kind), getattr(row, f"{kind}_deviation")
        cells += [mean, deviation, None if mean is None else f"{mean:.2f} ± {deviation:.2f}"]
    return cells


def _draw_seeds(axes: Axes, result: Stability) -> None:
    """Similarity against the number of components, with deviations over pairs of seeds."""
    counts = [row.components for row in result.seeds]
    for kind, title, colour in (("coefficients", "coefficients", BLUE), ("pseudo_fishers", "pseudo-Fishers", RED)):
        means, deviations = ([getattr(row, name) for row in result.seeds] for name in (kind, f"{kind}_deviation"))
        axes.errorbar(counts, means, yerr=deviations, marker="o", markersize=4, capsize=3, color=colour, label=title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    seeds = len(result.options["seeds"])
    axes.set(ylim=(0, 1.05), xlabel="components", ylabel="mean |cos| of matched components", title=f"{seeds} seeds")
    axes.legend(frameon=False, loc="lower left")
    plain_axes(axes)


# --- the tree of splits -------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A component of one level, and the components of the next one that are its splits, most similar first."""

    level: int
    number: int
    tuned: str | None
    text: str
    similarity: float | None = None
    """With its parent; None at the first level, and for what has no parent."""
    children: list[Node] = field(default_factory=list)
    place: float = 0.0
    """Height in the figure."""


def grow_tree(result: Stability) -> list[Node]:
    """The roots: all components of the smallest count, then those of others that share no example with any coarser."""
    levels = [
        [Node(depth, number, *values) for number, values in enumerate(zip(level.tuned, level.texts, strict=True))]
        for depth, level in enumerate(result.levels)
    ]
    roots = list(levels[0])
    rows = {(row.coarse, row.fine): row for row in result.splits}
    for coarse, fine in pairwise(levels):
        row = rows[len(coarse), len(fine)]
        for node, parent, similarity in zip(fine, row.parent, row.similarity, strict=True):
            if parent is None:
                roots.append(node)
            else:
                node.similarity = similarity
                coarse[parent].children.append(node)
    for node in (node for level in levels for node in level):
        node.children.sort(key=lambda child: (-(child.similarity or 0), child.number))
    return roots


def tree_markdown(result: Stability) -> str:
    """The tree as a nested list: number, similarity with the parent, what it is tuned to, first example."""
    counts = " → ".join(str(level.components) for level in result.levels)
    lines = [
        f"# Splits, {counts} components",
        "",
        "Each component stands below the one of the next smaller count with the most similar coefficients (|cos| in "
        "brackets), with the prediction that its top examples share, if they do, and its first example.",
        "",
    ]

    def add(node: Node, depth: int) -> None:
        similarity = "" if node.similarity is None else f" ({node.similarity:.2f})"
        tuned = "" if node.tuned is None else f" **{as_literal(node.tuned.strip())}**"
        count = f"{result.levels[node.level].components}:"
        lines.append(f"{'  ' * depth}- {count}{node.number}{similarity}{tuned} {as_literal(shorten(node.text, 100))}")
        for child in node.children:
            add(child, depth + 1)

    for root in grow_tree(result):
        add(root, 0)
    return "\n".join(lines) + "\n"


def _draw_tree(path: Path, result: Stability) -> None:
    """Counts from left to right; a line thins with the similarity, and is dashed where a split loses the tuning."""
    roots = grow_tree(result)
    frequent = Counter(tuned for level in result.levels for tuned in level.tuned if tuned is not None)
    colours = {name: f"C{n}" if n < _CLASSES else "black" for n, (name, _) in enumerate(frequent.most_common())}
    lines = _place(roots)
    height = min(_TALLEST, 1.2 + _LINE * lines)
    figure = new_figure(3 + 1.6 * len(result.levels), max(2.5, height))
    axes = figure.subplots()
    readable = height / lines >= _READABLE
    for root in roots:
        _draw_node(axes, root, colours, readable)
    for name in list(colours)[:_CLASSES]:
        axes.plot([], [], "o", color=colours[name], label=f"predicted{name if name[:1] == ' ' else f' {name}'}")
    axes.plot([], [], "o", markerfacecolor="white", color="grey", label="several predictions")
    axes.plot([], [], "--", color="grey", label="a split that loses the prediction")
    counts = [str(level.components) for level in result.levels]
    axes.set_xticks(range(len(counts)), counts)
    axes.set(xlim=(-0.3, len(counts) + 0.6), ylim=(lines, -1), xlabel="components", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, fontsize=7, frameon=False)
    write_figure(path, figure, dpi=120)


def _place(roots: list[Node]) -> int:
    """Give every node its place: leaves one below the other, others in the middle of theirs; returns the lines."""
    used = 0

    def place(node: Node) -> None:
        nonlocal used
        for child in node.children:
            place(child)
        if node.children:
            node.place = (node.children[0].place + node.children[-1].place) / 2
        else:
            node.place, used = used, used + 1

    for root in roots:
        place(root)
    return used


def _draw_node(axes: Axes, node: Node, colours: dict[str, str], readable: bool) -> None:
    colour = "grey" if node.tuned is None else colours[node.tuned]
    for child in node.children:
        lost = node.tuned is not None and child.tuned != node.tuned
        axes.plot(
            [node.level, child.level],
            [node.place, child.place],
            color=colour,
            linewidth=0.4 + 1.8 * (child.similarity or 0),
            linestyle="--" if lost else "-",
            alpha=0.7,
            zorder=1,
        )
        _draw_node(axes, child, colours, readable)
    face = "white" if node.tuned is None else colour
    axes.plot(node.level, node.place, "o", markersize=4, color=colour, markerfacecolor=face, zorder=2)
    if readable:
        text = shorten(node.text, 60) if not node.children else ""
        # a text may have a dollar sign, which is no formula here
        label = f"  {node.number} {text}" if text else f"{node.number}  "
        side = "left" if text else "right"
        axes.text(node.level, node.place, label, fontsize=6, ha=side, va="center", parse_math=False)
