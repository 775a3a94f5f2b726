"""`npeff stability`: is the same found again with other seeds, other numbers of components, other collections?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from npeff.analyse import matching
from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import AnalysisOptions, Level, RunSimilarity, SeedSimilarity, Similarity, Split, Stability
from npeff.analyse.report import draw_by_count
from npeff.analyse.run import analyse_one
from npeff.analyse.split_tree import draw_tree, tree_markdown
from npeff.collect.identity import brief, changes
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, suggest_components
from npeff.decompose.run import decompose
from npeff.store.examples import whole_texts
from npeff.store.layout import STABILITY
from npeff.store.run import Run
from npeff.utils.configs import replace, to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import remove_partials, write_text
from npeff.utils.report import Axes, Cell, Column, Table, draw_figure, remove_figure, write_report
from npeff.utils.version import __version__

_TITLES = {"coefficients": "coefficients W", "pseudo_fishers": "pseudo-Fishers G", "best": "best, by coefficients"}
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
        usual = suggest_components(int(run.usable.sum()))
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
    where, method, device = str(run.path), config.method, config.device
    wanted = DecomposeConfig(run=where, method=method, components=components, seed=seed, device=device)
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
    texts = [run.table["text"][top[0]].as_py() if top else "" for top in tops]
    return Level(components, analysis.tuned_predictions, texts), decomposition.coefficients


def _split(first: tuple[Level, torch.Tensor], second: tuple[Level, torch.Tensor]) -> Split:
    """Which coarse component each fine one is a split of, and whether splits keep the prediction tuning."""
    (coarse, coarse_coefficients), (fine, fine_coefficients) = first, second
    similarity = matching.coefficient_similarity(coarse_coefficients, fine_coefficients)
    parent = matching.parents(similarity)
    kept, splits = matching.preserved(parent, coarse.tuned, fine.tuned)
    return Split(
        coarse=coarse.components,
        fine=fine.components,
        with_splits=len({*parent.tolist()} - {matching.NOBODY}),
        tuned_splits=splits,
        preserved=kept,
        share_preserved=kept / splits if splits else None,
        mean_best_similarity=matching.mean_best_similarity(similarity),
        parent=[None if i == matching.NOBODY else i for i in parent.tolist()],
        similarity=[round(value, 6) for value in similarity.max(dim=0).values.tolist()],
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
    (directory / "stability.json").unlink(missing_ok=True)
    remove_partials(directory)
    tables = _tables(result)
    for name, table in tables.items():
        table.write_csv(directory / f"{name}.csv")
    text = write_report(directory / "stability", [t for name, t in tables.items() if t.rows or name == "seeds"])
    seeds, tree = directory / "seeds", directory / "tree"
    remove_figure(seeds)  # of other options
    remove_figure(tree)
    tree.with_suffix(".md").unlink(missing_ok=True)
    if any(row.pairs for row in result.seeds):
        draw_figure(seeds, _draw_seeds, result)
    if result.splits:
        write_text(tree.with_suffix(".md"), tree_markdown(result))
        draw_tree(tree, result)
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
