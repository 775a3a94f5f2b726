"""Steps of recipes that compare decompositions with each other, and the spectra of Fishers."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations

import numpy as np
import torch

from npeff.analyse import matching
from npeff.analyse.config import SpectraConfig
from npeff.analyse.spectra import spectra
from npeff.analyse.stability import compare_seeds
from npeff.collect.directions import reduce_rank
from npeff.decompose.base import Decomposition
from npeff.decompose.config import FitConfig, PaperConfig
from npeff.decompose.methods import create, load
from npeff.paper.recipe import Step
from npeff.paper.runs import Bench, Workshop
from npeff.paper.values import Findings, Missing, Value
from npeff.store.rows import RowSource
from npeff.utils.configs import replace, to_dict


def _with(shop: Workshop, bench: Bench, components: int | None = None, seed: int | None = None) -> Bench:
    """The same run with another of the paper's component counts, or another seed."""
    here = bench.here
    if components is not None:
        count = shop.scale.components(replace(bench.paper, components=components), len(bench.run.table))
        here = replace(here, components=count)
    return replace(bench, here=replace(here, seed=here.seed if seed is None else seed))


def _distinct(shop: Workshop, bench: Bench, counts: list[int]) -> tuple[list[int], list[Missing]]:
    """The paper's component counts that are still different from each other at this scale."""
    kept: dict[int, int] = {}
    missing = []
    for count in counts:
        here = _with(shop, bench, count).here.components
        if here in kept:
            why = f"at this scale {here} components, as for {kept[here]}"
            missing.append(Missing(f"{bench.here.task}, {count} components", why))
        else:
            kept[here] = count
    return list(kept.values()), missing


def stability(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Mean and deviation over pairs of seeds of the similarity of matched components."""
    counts, missing = _distinct(shop, bench, step.options["components"])
    yield from missing
    for count in counts:
        fits = [shop.fit(_with(shop, bench, count, seed)) for seed in step.options["seeds"]]
        similarity = compare_seeds(fits)
        seeds = ", ".join(map(str, step.options["seeds"]))
        changed = {"components": (count, len(fits[0].components)), "seed": (seeds, seeds)}
        for measure, mean, deviation in (
            ("W", similarity.coefficients, similarity.coefficients_deviation),
            ("G", similarity.pseudo_fishers, similarity.pseudo_fishers_deviation),
        ):
            yield Value({"components": count, "measure": measure}, mean, changed)
            yield Value({"components": count, "measure": f"{measure} sd"}, deviation, changed)


def splits(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Percentage of the splits of prediction-tuned components that are tuned to the same prediction."""
    counts, missing = _distinct(shop, bench, step.options["components"])
    yield from missing
    shares = []
    for coarse, fine in combinations(counts, 2):
        pair = [_with(shop, bench, count) for count in (coarse, fine)]
        first, second = (shop.fit(one) for one in pair)
        parent = matching.parents(matching.coefficient_similarity(first.coefficients, second.coefficients))
        kept, of = matching.preserved(parent, *(shop.analysis(one).tuned_predictions for one in pair))
        if of:
            shares.append(100 * kept / of)
        here = " → ".join(str(one.here.components) for one in pair)
        changed = {"components": (f"{coarse} → {fine}", here)}
        yield Value({"pair": f"{coarse} → {fine}"}, shares[-1] if of else None, changed)
    yield Value({"pair": "mean"}, float(np.mean(shares)) if shares else None, {"components": ("all", "all")})


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


def _fit_rows(shop: Workshop, bench: Bench, rank: int | None, seed: int) -> Decomposition:
    """NPEFF of a run with its Fishers reduced to `rank`; kept beside the runs, because it is of other rows."""
    if rank is None:
        return shop.fit(_with(shop, bench, seed=seed))
    asked = shop.fit_config(_with(shop, bench, seed=seed))
    config = FitConfig(components=bench.here.components, seed=seed, solver=asked.solver, device=asked.device)
    if asked.solver == "paper":
        config = replace(config, paper=asked.paper)
    else:
        assert asked.paper == PaperConfig()
    name = json.dumps([bench.run.fingerprint, rank, to_dict(config)], sort_keys=True)
    folder = shop.out / "reduced" / hashlib.sha256(name.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return load(folder)
    decomposition = create(config, quiet=False).fit(ReducedRows(bench.run.source("fisher"), rank))
    decomposition.save(folder)
    return decomposition


def _alike(first: Decomposition, second: Decomposition) -> float:
    return matching.mean_best_similarity(matching.coefficient_similarity(first.coefficients, second.coefficients))


def rank_similarity(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Similarity to the decomposition of all rows, for Fishers of fewer; for all rows, that of another seed."""
    projections = int(bench.paper.directions.split(":")[1])
    seed, other = step.options["seeds"]
    whole = _fit_rows(shop, bench, None, seed)
    for rank in step.options["ranks"]:
        if rank < projections:
            alike = _alike(whole, _fit_rows(shop, bench, rank, seed))
            yield Value({"eps": projections, "rank": rank}, alike, {"rank": (rank, rank)})
    yield Value({"eps": projections, "rank": projections}, _alike(whole, _fit_rows(shop, bench, None, other)))


def projection_similarity(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Similarity to the decomposition with more projections of the expectation."""
    most = shop.fit(shop.bench(replace(bench.paper, directions=step.options["against"])))
    yield Value({"measure": "Similarity"}, _alike(shop.fit(bench), most))


def eigenvalue_decay(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Mean share of the trace in each eigenvalue."""
    for number, share in enumerate(spectra(SpectraConfig(str(bench.run.path))).decay, 1):
        yield Value({"number": number}, share)
