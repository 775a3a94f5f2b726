"""`npeff stability`: is the same found again with other seeds and other numbers of components?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch

from npeff.analyse import matching
from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import AnalysisOptions, Level, SeedSimilarity, Split, Stability
from npeff.analyse.report import draw_by_count
from npeff.analyse.run import analyse_one
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, suggest_components, suggest_fitted
from npeff.decompose.run import common_holdout, decompose
from npeff.store.examples import shown_texts
from npeff.store.layout import STABILITY
from npeff.store.run import Run
from npeff.utils import __version__, remove_partials, replace, shorten, to_dict, write_record, write_text
from npeff.utils.report import Cell, Column, Table, as_literal, draw_figure, write_report

_TITLES = {"coefficients": "coefficients W", "pseudo_fishers": "pseudo-Fishers G", "best": "best, by coefficients"}
_SPLITS_IN_CSV = ("with_splits", "mean_best_similarity")


def stability(config: StabilityConfig) -> Stability:
    """Make the decompositions that are missing, compare them, and write tables and figures.

    Args:
        config: The run, and what to compare.

    Returns:
        What stability.json holds.
    """
    run = Run.open(config.run)
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
    )
    directory = run.path / STABILITY / config.method
    print(f"\n{write(directory, result)}\nin {directory}")
    return result


def _fit(config: StabilityConfig, run: Run, components: int, seed: int) -> Decomposition:
    names = (f"{config.method}-{count}-{each}" for count in config.components for each in config.seeds)
    which = {"method": config.method, "components": components, "seed": seed, "holdout": common_holdout(run, names)}
    wanted = DecomposeConfig(run=str(run.path), device=config.device, **which)  # type: ignore[arg-type]
    return decompose(wanted, made_for="stability")


# --- seeds --------------------------------------------------------------------------------------------------------


def compare_seeds(decompositions: Sequence[Decomposition]) -> SeedSimilarity:
    """How alike all pairs of decompositions of the same rows are, by coefficients and by pseudo-Fisher vectors.

    Args:
        decompositions: Those of several seeds, with as many components each.

    Returns:
        Mean, deviation and single values of each similarity.
    """
    pairs = list(combinations(decompositions, 2))
    by_coefficients = [matching.coefficient_similarity(a.coefficients, b.coefficients) for a, b in pairs]
    by_components = [matching.component_similarity(a.components, b.components) for a, b in pairs]
    values = {
        "coefficients": [matching.matched_similarity(similarity) for similarity in by_coefficients],
        "best": [matching.mean_best_similarity(similarity) for similarity in by_coefficients],
        "pseudo_fishers": [matching.matched_similarity(similarity) for similarity in by_components],
    }
    fields: dict[str, Any] = {"components": len(decompositions[0].components), "pairs": len(pairs)}
    for name, of_pairs in values.items():
        mean, deviation = matching.mean_and_deviation(of_pairs) if pairs else (None, None)
        fields |= {name: mean, f"{name}_deviation": deviation, f"{name}_pairs": of_pairs}
    return SeedSimilarity(**fields)


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
    """Write the tables, the tree, the figure and, last, stability.json.

    Args:
        directory: Where to write.
        result: What was measured.

    Returns:
        The tables that have rows, and always the one of seeds, in Markdown.
    """
    for name in ("stability.json", "seeds.*", "tree.*"):  # what other options have written goes
        for old in directory.glob(name):
            old.unlink(missing_ok=True)
    remove_partials(directory)
    tables = _tables(result)
    for name, table in tables.items():
        table.write_csv(directory / f"{name}.csv")
    text = write_report(directory / "stability", [t for name, t in tables.items() if t.rows or name == "seeds"])
    if any(row.pairs for row in result.seeds):
        draw_figure(directory / "seeds", _draw_seeds, result)
    if result.splits:
        write_text(directory / "tree.md", tree_markdown(result))
    write_record(directory / "stability.json", result)
    return text


def _tables(result: Stability) -> dict[str, Table]:
    """The paper's two tables, of seeds and of splits."""
    splits = [Column("coarse"), Column("fine"), Column("preserved", title="kept"), Column("tuned_splits", title="of")]
    splits += [Column("share_preserved", ".1%", "share"), *(Column(name, only="csv") for name in _SPLITS_IN_CSV)]
    seeds = Table(
        f"Mean similarity of matched components over pairs of {len(result.options['seeds'])} seeds",
        [Column("components"), *_columns()],
        [[row.components, *_cells(row)] for row in result.seeds],
    )
    tuned = Table(
        "Splits of prediction-tuned components that keep the tuning",
        [*splits, Column("coarse ones with splits", only="text")],
        [
            [*(getattr(row, each.name) for each in splits), f"{row.with_splits} of {row.coarse}"]
            for row in result.splits
        ],
    )
    return {"seeds": seeds, "splits": tuned}


def _columns() -> list[Column]:
    """Columns of similarities: mean and deviation in CSV, both in one where the table is read."""
    columns = [Column("pairs", only="csv")]
    for kind, title in _TITLES.items():
        in_csv = [Column(name, only="csv") for name in (kind, f"{kind}_deviation")]
        columns += [*in_csv, Column(title, only="text")]
    return columns


def _cells(row: SeedSimilarity) -> list[Cell]:
    cells: list[Cell] = [row.pairs]
    for kind in _TITLES:
        mean, deviation = getattr(row, kind), getattr(row, f"{kind}_deviation")
        cells += [mean, deviation, None if mean is None else f"{mean:.2f} ± {deviation:.2f}"]
    return cells


def _draw_seeds(axes: Any, result: Stability) -> None:
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
            tuned = "" if node.tuned is None else f" **{as_literal(node.tuned.strip())}**"
            number = f"{'  ' * (node.level - root.level)}- {result.levels[node.level].components}:{node.number}"
            lines.append(f"{number}{similarity}{tuned} {as_literal(shorten(node.text, 100))}")
    return "\n".join(lines) + "\n"
