"""Measurements of recipes that compare decompositions with each other, and the spectra of Fishers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import torch

from npeff.analyse import matching
from npeff.analyse.config import SpectraConfig
from npeff.analyse.spectra import spectra
from npeff.analyse.stability import compare_seeds
from npeff.collect.directions import reduce_rank
from npeff.decompose.base import Decomposition
from npeff.decompose.methods import create, load
from npeff.paper.recipe import Step
from npeff.paper.runs import Experiment
from npeff.paper.values import Changed, Measured, Missing, Value
from npeff.store.rows import RowSource
from npeff.utils.configs import replace, to_dict


def _distinct(experiment: Experiment, counts: tuple[int, ...]) -> tuple[dict[int, Experiment], list[Missing]]:
    """The paper's numbers of components that are still different from each other at this scale, and the others."""
    first: dict[int, int] = {}
    kept: dict[int, Experiment] = {}
    missing = []
    for count in counts:
        varied = experiment.varied(count)
        here = varied.here.components
        if here in first:
            why = f"at this scale {here} components, as for {first[here]}"
            missing.append(Missing(f"{experiment.here.task}, {count} components", why))
        else:
            first[here], kept[count] = count, varied
    return kept, missing


def stability(experiment: Experiment, step: Step) -> Iterator[Measured]:
    """Similarity of matched components over pairs of seeds.

    Args:
        experiment: What to measure.
        step: The step of the recipe, with seeds and numbers of components.

    Yields:
        Mean and standard deviation by coefficients (W) and by pseudo-Fishers (G), for each number of components.
    """
    kept, missing = _distinct(experiment, step.options.counts)
    yield from missing
    seeds = ", ".join(map(str, step.options.seeds))
    for count, varied in kept.items():
        similarity = compare_seeds([varied.varied(seed=seed).fit() for seed in step.options.seeds])
        changed: Changed = {"components": (count, varied.here.components), "seed": (seeds, seeds)}
        for measure, value in (
            ("W", similarity.coefficients),
            ("W sd", similarity.coefficients_deviation),
            ("G", similarity.pseudo_fishers),
            ("G sd", similarity.pseudo_fishers_deviation),
        ):
            yield Value({"components": count, "measure": measure}, value, changed)


def splits(experiment: Experiment, step: Step) -> Iterator[Measured]:
    """Percentage of the splits of prediction-tuned components that are tuned to the same prediction.

    Args:
        experiment: What to measure.
        step: The step of the recipe, with numbers of components.

    Yields:
        The percentage for each pair of numbers of components, and the mean over pairs.
    """
    kept, missing = _distinct(experiment, step.options.counts)
    yield from missing
    percentages = []
    for (coarse, first), (fine, second) in combinations(kept.items(), 2):
        parent = matching.parents(matching.coefficient_similarity(first.fit().coefficients, second.fit().coefficients))
        tuned = (each.analysis().tuned_predictions for each in (first, second))
        preserved, of = matching.preserved(parent, *tuned)
        percentages += [100 * preserved / of] if of else []
        pair = f"{coarse} → {fine}"
        changed = {"components": (pair, f"{first.here.components} → {second.here.components}")}
        yield Value({"pair": pair}, percentages[-1] if of else None, changed)
    mean = float(np.mean(percentages)) if percentages else None
    yield Value({"pair": "mean"}, mean, {"components": ("all", "all")})


class ReducedRows:
    """Fishers of a source with fewer rows each, by SVD, at unit norm again."""

    def __init__(self, source: RowSource, rank: int) -> None:
        self._source, self._rank = source, rank
        self.ranks = np.minimum(source.ranks, rank)

    @property
    def dim(self) -> int:
        return self._source.dim

    def read(self, start: int, stop: int) -> torch.Tensor:
        counts = self._source.ranks[start:stop]
        parts = torch.split(self._source.read(start, stop), counts[counts > 0].tolist())
        return torch.cat([self._reduce(part) for part in parts]) if parts else torch.empty(0, self.dim)

    def _reduce(self, rows: torch.Tensor) -> torch.Tensor:
        rows = reduce_rank(rows[None], self._rank)[0][0]
        norm = (rows @ rows.T).square().sum().sqrt()
        return rows / torch.where(norm > 0, norm.sqrt(), 1.0)


def _fit_reduced(experiment: Experiment, rank: int) -> Decomposition:
    """NPEFF of a run with its Fishers reduced to `rank`; kept beside the runs, because it is of other rows."""
    config = experiment.fit_config().with_components(experiment.here.components)
    folder = experiment.kept("reduced", rank, to_dict(config))
    if (folder / "config.json").is_file():
        return load(folder)
    decomposition = create(config, quiet=False).fit(ReducedRows(experiment.run.source("fisher"), rank))
    decomposition.save(folder)
    return decomposition


def _similarity(first: Decomposition, second: Decomposition) -> float:
    return matching.mean_best_similarity(matching.coefficient_similarity(first.coefficients, second.coefficients))


def rank_similarity(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Similarity of the decomposition of Fishers of lower rank to that of the whole ones.

    Args:
        experiment: What to measure; its directions are random projections.
        step: The step of the recipe, with ranks and two seeds.

    Yields:
        The similarity for each lower rank and, for the full rank, that of the other seed.
    """
    projections = int(experiment.paper.directions.split(":")[1])
    first, second = (experiment.varied(seed=seed) for seed in step.options.seeds)
    whole = first.fit()
    for rank in step.options.ranks:
        if rank < projections:
            similarity = _similarity(whole, _fit_reduced(first, rank))
            yield Value({"eps": projections, "rank": rank}, similarity, {"rank": (rank, rank)})
    yield Value({"eps": projections, "rank": projections}, _similarity(whole, second.fit()))


def projection_similarity(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Similarity to the decomposition with more projections of the expectation."""
    most = experiment.runs.experiment(replace(experiment.paper, directions=step.options.against))
    yield Value({"measure": "Similarity"}, _similarity(experiment.fit(), most.fit()))


def eigenvalue_decay(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Mean share of the trace in each eigenvalue."""
    for number, share in enumerate(spectra(SpectraConfig(str(experiment.run.path))).decay, 1):
        yield Value({"number": number}, share)
