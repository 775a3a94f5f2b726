"""The tree of splits of `npeff stability`: which component becomes which when there are more of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from npeff.analyse.records import Stability
from npeff.utils.report import Axes, as_literal, new_figure, write_figure
from npeff.utils.text import shorten

_TALLEST = 60.0
"""Inches of the longest tree."""
_LINE = 0.17
"""Inches of a component in the figure of a tree that has room for it."""
_READABLE = 0.1
"""Inches below which components are drawn without their text."""
_CLASSES = 9
"""Classes with a colour of their own."""


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

    def walk(self) -> Iterator[Node]:
        """The node and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


def grow_tree(result: Stability) -> list[Node]:
    """The tree of splits.

    Args:
        result: What was measured.

    Returns:
        The roots: all components of the smallest count, then those of others that share no example with any coarser.
    """
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
    """The tree as a nested list.

    Args:
        result: What was measured.

    Returns:
        Markdown: number, similarity with the parent, what it is tuned to, and first example of each component.
    """
    counts = " → ".join(str(level.components) for level in result.levels)
    lines = [
        f"# Splits, {counts} components",
        "",
        "Each component stands below the one of the next smaller count with the most similar coefficients (|cos| in "
        "brackets), with the prediction that its top examples share, if they do, and its first example.",
        "",
    ]
    for root in grow_tree(result):
        for node in root.walk():
            similarity = "" if node.similarity is None else f" ({node.similarity:.2f})"
            tuned = "" if node.tuned is None else f" **{as_literal(node.tuned.strip())}**"
            number = f"{'  ' * (node.level - root.level)}- {result.levels[node.level].components}:{node.number}"
            lines.append(f"{number}{similarity}{tuned} {as_literal(shorten(node.text, 100))}")
    return "\n".join(lines) + "\n"


def draw_tree(path: Path, result: Stability) -> None:
    """Draw the tree: counts from left to right; lines thin with the similarity, dashed where a split loses the tuning.

    Args:
        path: Where to write, without the ending.
        result: What was measured.
    """
    nodes = [node for root in grow_tree(result) for node in root.walk()]
    frequent = Counter(tuned for level in result.levels for tuned in level.tuned if tuned is not None)
    colours = {name: f"C{n}" if n < _CLASSES else "black" for n, (name, _) in enumerate(frequent.most_common())}
    lines = _place(nodes)
    height = min(_TALLEST, 1.2 + _LINE * lines)
    figure = new_figure(3 + 1.6 * len(result.levels), max(2.5, height))
    axes = figure.subplots()
    readable = height / lines >= _READABLE
    for node in nodes:
        _draw_node(axes, node, colours, readable)
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


def _place(nodes: list[Node]) -> int:
    """Give every node its place: leaves one below the other, others in the middle of theirs; returns the lines."""
    leaves = [node for node in nodes if not node.children]
    for line, leaf in enumerate(leaves):
        leaf.place = line
    for node in reversed(nodes):  # children come before their parents
        if node.children:
            node.place = (node.children[0].place + node.children[-1].place) / 2
    return len(leaves)


def _draw_node(axes: Axes, node: Node, colours: dict[str, str], readable: bool) -> None:
    """Draw a node, and the lines to its children."""
    colour = "grey" if node.tuned is None else colours[node.tuned]
    for child in node.children:
        style = "--" if node.tuned is not None and child.tuned != node.tuned else "-"
        ends, width = ([node.level, child.level], [node.place, child.place]), 0.4 + 1.8 * (child.similarity or 0)
        axes.plot(*ends, style, color=colour, linewidth=width, alpha=0.7, zorder=1)
    face = "white" if node.tuned is None else colour
    axes.plot(node.level, node.place, "o", markersize=4, color=colour, markerfacecolor=face, zorder=2)
    if readable:
        text = shorten(node.text, 60) if not node.children else ""
        # a text may have a dollar sign, which is no formula here
        label = f"  {node.number} {text}" if text else f"{node.number}  "
        side = "left" if text else "right"
        axes.text(node.level, node.place, label, fontsize=6, ha=side, va="center", parse_math=False)
