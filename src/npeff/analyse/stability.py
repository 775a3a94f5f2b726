"""`npeff stability`: is the same found again with other seeds, other numbers of components, other collections?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch

from npeff.analyse import matching
from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import AnalysisOptions, Level, RunSimilarity, SeedSimilarity, Similarity, Split, Stability
from npeff.analyse.report import draw_by_count
from npeff.analyse.run import analyse_one
from npeff.collect.identity import brief, changes
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, suggest_components, suggest_fitted
from npeff.decompose.run import common_holdout, decompose
from npeff.store.examples import shown_texts, whole_texts
from npeff.store.layout import STABILITY
from npeff.store.run import Run
from npeff.utils import report
from npeff.utils.configs import replace, to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import remove_partials, write_text
from npeff.utils.report import Axes, Cell, Column, Table
from npeff.utils.text import shorten
from npeff.utils.version import __version__

_TITLES = {"coefficients": "coefficients W", "pseudo_fishers": "pseudo-Fishers G", "best": "best, by coefficients"}
_TALLEST = 60.0
"""Inches of the longest tree."""
_LINE = 0.17
"""Inches of a component in the figure of a tree that has room for it."""
_READABLE = 0.1
"""Inches below which components are drawn without their text."""
_CLASSES = 9
"""Classes with a colour of their own."""
Pairs = Sequence[tuple[Decomposition, Decomposition]]


def stability(config: StabilityConfig) -> Stability:
    """Make the decompositions that are missing, compare them, and write tables and figures.

    Args:
        config: The run, and what to compare.

    Returns:
        What stability.json holds.
    """
    run = Run.open(config.run)
    others = [_open_other(run, path) for path in config.against]
    if not config.components:
        usual = suggest_components(suggest_fitted(int(run.usable.sum())))
        config = replace(config, components=tuple(sorted({max(2, usual // 4), usual})))
    counts = sorted(config.components)
    seeds = [compare_seeds([_fit(config, run, count, seed) for seed in config.seeds]) for count in counts]
    levels = [_level(config, run, count) for count in counts] if len(counts) > 1 else []
    result = Stability(
        npeff=__version__,
        run=run.fingerprint,
        options={key: value for key, value in to_dict(config).items() if key not in ("run", "device")},
        seeds=seeds,
        splits=[_split(coarse, fine) for coarse, fine in combinations(levels, 2)],
        levels=[level for level, _ in levels],
        against=[_against(config, run, other, count) for other in others for count in counts],
    )
    directory = run.path / STABILITY / config.method
    print(f"\n{write(directory, result)}\nin {directory}")
    return result


def _open_other(run: Run, path: str) -> Run:
    """A run to compare with, after a check that it is of the same examples."""
    other = Run.open(path)
    if not whole_texts(run.table).equals(whole_texts(other.table)):
        raise UserError(
            f"{path} has other examples than {run.path}, or the same in another order: their coefficients cannot be "
            f"compared. Collect both with the same --data, --limit and --shuffle-seed."
        )
    return other


def _fit(config: StabilityConfig, run: Run, components: int, seed: int) -> Decomposition:
    names = (f"{config.method}-{count}-{each}" for count in config.components for each in config.seeds)
    which = {"method": config.method, "components": components, "seed": seed, "holdout": common_holdout(run, names)}
    wanted = DecomposeConfig(run=str(run.path), device=config.device, **which)  # type: ignore[arg-type]
    return decompose(wanted, made_for="stability")


# --- seeds, and other runs ----------------------------------------------------------------------------------------


def compare_seeds(decompositions: Sequence[Decomposition]) -> SeedSimilarity:
    """How alike all pairs of decompositions of the same rows are, by coefficients and by pseudo-Fisher vectors.

    Args:
        decompositions: Those of several seeds, with as many components each.

    Returns:
        Mean, deviation and single values of each similarity.
    """
    pairs = list(combinations(decompositions, 2))
    by_components = [
        matching.matched_similarity(matching.component_similarity(a.components, b.components)) for a, b in pairs
    ]
    return SeedSimilarity(
        components=len(decompositions[0].components),
        **_by_coefficients(pairs),
        **_values("pseudo_fishers", by_components),
    )


def _by_coefficients(pairs: Pairs) -> dict[str, Any]:
    """The fields of `Similarity` that compare coefficients."""
    similarities = [matching.coefficient_similarity(a.coefficients, b.coefficients) for a, b in pairs]
    return {
        "pairs": len(pairs),
        **_values("coefficients", [matching.matched_similarity(similarity) for similarity in similarities]),
        **_values("best", [matching.mean_best_similarity(similarity) for similarity in similarities]),
    }


def _values(name: str, values: list[float]) -> dict[str, Any]:
    """The fields of one similarity: mean, deviation, and the value of each pair."""
    mean, deviation = matching.mean_and_deviation(values) if values else (None, None)
    return {name: mean, f"{name}_deviation": deviation, f"{name}_pairs": values}


def _against(config: StabilityConfig, run: Run, other: Run, components: int) -> RunSimilarity:
    """Similarity of the decompositions of two runs, seed by seed. Their components may live in different spaces."""
    pairs = [(_fit(config, run, components, seed), _fit(config, other, components, seed)) for seed in config.seeds]
    changed = changes(run.manifest.identity, other.manifest.identity, but=("data.data", "shard_examples"))
    return RunSimilarity(
        against=str(other.path),
        components=components,
        **_by_coefficients(pairs),
        differs={name: [here, there] for name, here, there in changed},
    )


# --- splits -------------------------------------------------------------------------------------------------------


def _level(config: StabilityConfig, run: Run, components: int) -> tuple[Level, torch.Tensor]:
    """What the tree shows of a number of components, and the coefficients [m, C], with the first seed."""
    decomposition = _fit(config, run, components, config.seeds[0])
    analysis = analyse_one(run, decomposition.config.name, AnalysisOptions(config.top), quiet=True)
    tops = [component.orderings[0].top for component in analysis.component]
    texts = [shown_texts(run.table)[top[0]].as_py() if top else "" for top in tops]
    return Level(components, analysis.tuned_predictions, texts), decomposition.coefficients


def _split(first: tuple[Level, torch.Tensor], second: tuple[Level, torch.Tensor]) -> Split:
    """Which coarse component each fine one is a split of, and whether splits keep the prediction tuning."""
    (coarse, coarse_coefficients), (fine, fine_coefficients) = first, second
    similarity = matching.coefficient_similarity(coarse_coefficients, fine_coefficients)
    parents = matching.parents(similarity)
    kept, splits = matching.preserved(parents, coarse.tuned, fine.tuned)
    return Split(
        coarse=coarse.components,
        fine=fine.components,
        with_splits=len({*parents} - {matching.NOBODY}),
        tuned_splits=splits,
        preserved=kept,
        share_preserved=kept / splits if splits else None,
        mean_best_similarity=matching.mean_best_similarity(similarity),
        parent=[None if i == matching.NOBODY else i for i in parents],
        similarity=[round(value, 6) for value in similarity.amax(dim=0).tolist()],
    )


# --- files --------------------------------------------------------------------------------------------------------


def write(directory: Path, result: Stability) -> str:
    """Write the tables, the tree, the figures and, last, stability.json.

    Args:
        directory: Where to write.
        result: What was measured.

    Returns:
        The tables that have rows, and always the one of seeds, in Markdown.
    """
    for name in ("stability.json", "seeds.*", "tree.*"):  # what other options have drawn goes
        for old in directory.glob(name):
            old.unlink(missing_ok=True)
    remove_partials(directory)
    tables = _tables(result)
    for name, table in tables.items():
        table.write_csv(directory / f"{name}.csv")
    text = report.write_report(directory / "stability", [t for name, t in tables.items() if t.rows or name == "seeds"])
    if any(row.pairs for row in result.seeds):
        report.draw_figure(directory / "seeds", _draw_seeds, result)
    if result.splits:
        write_text(directory / "tree.md", tree_markdown(result))
        draw_tree(directory / "tree", result)
    write_record(directory / "stability.json", result)
    return text


def _tables(result: Stability) -> dict[str, Table]:
    """The paper's two tables, of seeds and of splits, and one of other runs."""
    kinds, others = ("coefficients", "pseudo_fishers", "best"), ("coefficients", "best")
    differs = Column("what differs", only="text")
    splits = [
        Column("coarse"),
        Column("fine"),
        Column("preserved", title="kept"),
        Column("tuned_splits", title="of"),
        Column("share_preserved", ".1%", title="share"),
        Column("with_splits", only="csv"),
        Column("mean_best_similarity", only="csv"),
    ]
    return {
        "seeds": Table(
            f"Mean similarity of matched components over pairs of {len(result.options['seeds'])} seeds",
            [Column("components"), *_columns(kinds)],
            [[row.components, *_cells(row, kinds)] for row in result.seeds],
        ),
        "splits": Table(
            "Splits of prediction-tuned components that keep the tuning",
            [*splits, Column("coarse ones with splits", only="text")],
            [
                [*(getattr(row, column.name) for column in splits), f"{row.with_splits} of {row.coarse}"]
                for row in result.splits
            ],
        ),
        "against": Table(
            "Similarity to the decompositions of other runs, with the same seeds",
            [Column("against", title="run"), Column("components"), *_columns(others), differs],
            [[row.against, row.components, *_cells(row, others), _differs(row)] for row in result.against],
        ),
    }


def _differs(row: RunSimilarity) -> str:
    changed = (f"{name}: {brief(here)} → {brief(there)}" for name, (here, there) in row.differs.items())
    return "; ".join(changed) or "nothing"


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
    lines = {"coefficients": "coefficients", "pseudo_fishers": "pseudo-Fishers"}
    draw_by_count(axes, result.seeds, lines, "mean |cos| of matched components")
    axes.set(ylim=(0, 1.05), title=f"{len(result.options['seeds'])} seeds")


# --- the tree of splits: which component becomes which when there are more of them -----------------------------------


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
        f"# Splits, {counts} components\n",
        "Each component stands below the one of the next smaller count with the most similar coefficients (|cos| in "
        "brackets), with the prediction that its top examples share, if they do, and its first example.\n",
    ]
    for root in grow_tree(result):
        for node in root.walk():
            similarity = "" if node.similarity is None else f" ({node.similarity:.2f})"
            tuned = "" if node.tuned is None else f" **{report.as_literal(node.tuned.strip())}**"
            number = f"{'  ' * (node.level - root.level)}- {result.levels[node.level].components}:{node.number}"
            lines.append(f"{number}{similarity}{tuned} {report.as_literal(shorten(node.text, 100))}")
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
    figure = report.new_figure(3 + 1.6 * len(result.levels), max(2.5, height))
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
    report.write_figure(path, figure, dpi=120)


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
