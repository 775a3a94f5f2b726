"""`npeff stability`: is the same found again with other seeds and other numbers of components?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from npeff.analyse import matching
from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import AnalysisOptions, SeedSimilarity, Split, Stability
from npeff.analyse.report import draw_by_count
from npeff.analyse.run import analyse_one
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, suggest_components, suggest_fitted
from npeff.decompose.run import common_holdout, decompose
from npeff.store.layout import STABILITY
from npeff.store.run import Run
from npeff.utils import __version__, from_dict, remove_partials, replace, to_dict, write_record
from npeff.utils.report import Cell, Column, Table, draw_figure, write_report

_TITLES = {"coefficients": "coefficients W", "pseudo_fishers": "pseudo-Fishers G", "best": "best, by coefficients"}
TREE = "Which component splits into which: `npeff explore` draws the tree."
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
    levels = [_tuned(config, run, count) for count in counts] if len(counts) > 1 else []
    result = Stability(
        npeff=__version__,
        run=run.fingerprint,
        options={key: value for key, value in to_dict(config).items() if key not in ("run", "device")},
        seeds=seeds,
        splits=[_split(coarse, fine) for coarse, fine in combinations(levels, 2)],
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
    fields: dict[str, object] = {"components": len(decompositions[0].components), "pairs": len(pairs)}
    for name, of_pairs in values.items():
        mean, deviation = matching.mean_and_deviation(of_pairs) if pairs else (None, None)
        fields |= {name: mean, f"{name}_deviation": deviation, f"{name}_pairs": of_pairs}
    return from_dict(SeedSimilarity, fields)


# --- splits -------------------------------------------------------------------------------------------------------


Tuned = tuple[list[str | None], torch.Tensor]
"""The prediction that each of C components is tuned to, if it is, and the coefficients [m, C]."""


def _tuned(config: StabilityConfig, run: Run, components: int) -> Tuned:
    """The decomposition into a number of components, with the first seed."""
    decomposition = _fit(config, run, components, config.seeds[0])
    analysis = analyse_one(run, decomposition.config.name, AnalysisOptions(config.top), quiet=True)
    return analysis.tuned_predictions, decomposition.coefficients


def _split(coarse: Tuned, fine: Tuned) -> Split:
    """Which coarse component each fine one is a split of, and whether splits keep the prediction tuning."""
    similarity = matching.coefficient_similarity(coarse[1], fine[1])
    parents = matching.parents(similarity)
    kept, splits = matching.preserved(parents, coarse[0], fine[0])
    return Split(
        coarse=len(coarse[0]),
        fine=len(fine[0]),
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
    """Write the tables, the figure and, last, stability.json.

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
    shown: list[str | Table] = [table for name, table in tables.items() if table.rows or name == "seeds"]
    text = write_report(directory / "stability", [*shown, TREE] if result.splits else shown)
    if any(row.pairs for row in result.seeds):
        draw_figure(directory / "seeds", _draw_seeds, result)
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
