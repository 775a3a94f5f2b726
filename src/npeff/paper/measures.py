"""Measurements of recipes: tunings, perturbations, in-context learning, held-out losses, texts, similarities.

Each calls the same functions as the commands do, and yields numbers, texts, and what could not be measured.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch

from npeff.analyse import matching, ranking
from npeff.analyse.config import SpectraConfig
from npeff.analyse.spectra import spectra
from npeff.analyse.stability import compare_seeds
from npeff.analyse.sweep import held_out_tunings
from npeff.analyse.tunings import compare_rates
from npeff.collect.directions import reduce_rank
from npeff.collect.session import collect_texts
from npeff.decompose.base import Decomposition
from npeff.decompose.config import HOLDOUT, METHOD_TITLES
from npeff.decompose.methods import create, load
from npeff.paper.config import IclConfig
from npeff.paper.costs import collection_time, decomposition_cost, early_stopping
from npeff.paper.icl import IclTable, icl
from npeff.paper.recipe import Listing, Measured, Missing, Step, Value, values
from npeff.paper.runs import FEWEST, FEWEST_PERTURBED, TOP, Experiment
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.store.rows import RowSource
from npeff.utils import UserError, read_record, replace, to_dict

MAGNITUDE, THRESHOLD = 20.0, 0.5
"""The paper's perturbations: length of the change, and cosine from which components are not rejected from."""


def tunings(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Percentages of prediction- and LnP-tuned components of each method, and tests of LnP against the first method.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Two percentages for each method, and p of Fisher's exact test for all but the first.
    """
    first = None
    for method in step.methods:
        experiment.fit(method)
        name = experiment.name(method)
        yield from values(experiment.tuned_percentages(name), method=METHOD_TITLES[method])
        rate = experiment.analysis(name).tunings["lnp"]
        if method != step.methods[0] and rate is not None:
            yield from values({"LnP p": compare_rates(first, rate)}, method=METHOD_TITLES[method])
        first = first or rate


def perturbations(experiment: Experiment, step: Step, count: int = 128, random: int = 1000) -> Iterator[Measured]:
    """Geometric means of KL ratios and norm ratios of each method: as in the paper, and on held-out examples.

    The paper's ratios are in-sample: top examples are those that components were fitted to. Beside them stand ratios of
    a decomposition that has held out examples, measured on these, along whitened directions for all methods, with their
    95% interval. Both have what random groups of examples give in place of components.

    At a small scale, compressed sensing with the paper's length of the change means little, because the model is
    another one: components are lifted exactly then, and compared at equal effect.

    Args:
        experiment: What to measure.
        step: The step of the recipe.
        count: Components to perturb.
        random: Random examples to compare with.

    Yields:
        Values for each method, or that they are missing.
    """
    runs, paper, run = experiment.runs, experiment.paper, experiment.run
    small = runs.is_small(paper)
    as_printed: dict[str, Any] = {
        "protocol": "paper",
        "random": runs.scaled(paper, random, FEWEST, len(run.table) // 4, root=True),
        "way": "lift" if small else "sensing",
        "direction": "reject",
        "threshold": THRESHOLD,
        "magnitude": None if small else MAGNITUDE,
    }
    held_out = experiment.varied(holdout=HOLDOUT)
    for method in step.methods:
        for varied, options, sample in ((experiment, as_printed, "in-sample"), (held_out, {}, "held-out")):
            name, components = varied.name(method), varied.fit(method).config.components
            config = PerturbConfig(
                str(run.path),
                name,
                count=runs.scaled(paper, count, FEWEST_PERTURBED, components),
                top=TOP,
                predict=False,  # the paper's tables have no predictions
                device=runs.config.device,
                perturbation=f"reproduce-{name}-{sample}",
                **options,
            )
            try:
                (results,) = perturb(config).values()
            except UserError as error:  # a method may have no component with enough examples; the others go on
                yield Missing(f"{experiment.here.task}, {METHOD_TITLES[method]}: {sample} perturbations", str(error))
                continue
            found = results.summary
            null = None if found.null is None else found.null.ratio
            ratios = {f"KL {sample}": found.kl_ratio, f"random groups {sample}": null}
            if sample == "held-out":
                ratios |= dict(zip(("low held-out", "high held-out"), found.interval or (None, None), strict=True))
            else:
                ratios["Norm"] = found.norm_ratio
            changed = {"holdout": (paper.holdout, varied.here.holdout)}
            yield from values(ratios, changed, method=METHOD_TITLES[method])


def in_context(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Accuracy of the classifier on components, and how often it agrees with 0-shot and few-shot predictions.

    Accuracy in the paper's sense is in-sample: the examples that are scored have a say in what components vote for.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Values for each method, among the examples that it decides, and the accuracies of the model itself.
    """
    runs, run = experiment.runs, experiment.run
    for method in step.methods:
        experiment.fit(method)
    labelled = len(run.table) - run.table["label"].null_count
    config = IclConfig(
        str(run.path),
        tuple(experiment.name(method) for method in step.methods),
        sets=runs.scaled(experiment.paper, IclConfig.sets, FEWEST, IclConfig.sets, root=True),
        scored=runs.scaled(experiment.paper, IclConfig.scored, FEWEST, labelled // 2, root=True),
        device=runs.config.device,
    )
    table = read_record(IclTable, icl(config) / "table.json")
    names = {"Accuracy": "in_sample", "Similarity 0-Shot": "similarity_0", "Similarity ICL": "similarity_k"}
    names |= {"Decided": "decided", "Accuracy held-out": "accuracy", "Gain over corrected 0-Shot": "gain"}
    for row in table.rows:
        shares = {measure: getattr(row, name) for measure, name in names.items()}
        ends = row.gain_interval or (None, None)
        shares |= dict(zip(("Gain, low", "Gain, high"), ends, strict=True))
        percentages = {measure: None if share is None else 100 * share for measure, share in shares.items()}
        yield from values({**percentages, "Gain, p": row.p}, method=METHOD_TITLES[row.method])
    for title, model in zip(("0-Shot", "0-Shot corrected", "ICL"), table.models, strict=True):
        yield from values({"Accuracy": 100 * (model.accuracy or 0)}, method=title)


def held_out(experiment: Experiment, step: Step) -> Iterator[Value]:
    """How well components explain examples that they were not fitted to.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Losses held in and held out, and percentages of components that are tuned on the held-out examples.
    """
    decomposition = experiment.fit()
    notes = decomposition.notes
    yield from values({"Recon-In": notes.held_in_loss, "Recon-Out": notes.held_out_loss})
    shares = zip(("Pred", "LnP"), held_out_tunings(experiment.run, decomposition, TOP), strict=True)
    yield from values({measure: None if share is None else 100 * share for measure, share in shares})


def top_examples(experiment: Experiment, step: Step, components: int = 10, examples: int = 5) -> Iterator[Listing]:
    """Texts to be read; there is nothing to count.

    Args:
        experiment: What to measure.
        step: The step of the recipe.
        components: Components to show.
        examples: Examples of each component.

    Yields:
        The top examples of each of the components with most energy.
    """
    experiment.fit()
    texts = experiment.run.table["text"]
    by_energy = sorted(experiment.analysis().component, key=lambda component: -component.energy)
    for component in by_energy[:components]:
        top = component.orderings[0].top[:examples]
        title = f"{experiment.here.task}, component {component.number}"
        yield Listing(title, tuple(texts.take(top).to_pylist()))


def nearest_component(
    experiment: Experiment, step: Step, texts: Sequence[str], find: Sequence[str]
) -> Iterator[Measured]:
    """Coefficients of the paper's texts for the component that is most likely the paper's.

    Args:
        experiment: What to measure.
        step: The step of the recipe.
        texts: Texts whose coefficients the table has.
        find: Texts that the component is found by: the sum of its coefficients of them is the largest.

    Yields:
        The coefficient of each of `texts`, and the top examples of the component.
    """
    decomposition = experiment.fit()
    rows, _ = collect_texts(experiment.run, [*texts, *find])
    coefficients = decomposition.transform(rows)
    number = int(coefficients[len(texts) :].sum(dim=0).argmax())
    for text, coefficient in zip(texts, coefficients[: len(texts), number].tolist(), strict=True):
        yield Value({"text": text}, coefficient)
    top = ranking.top_examples(decomposition.coefficients[:, number].numpy(), count=8)
    title = f"{experiment.here.task}, top examples of component {number}, the strongest on the paper's texts"
    yield Listing(title, tuple(experiment.run.table["text"].take(top).to_pylist()))


def stability(experiment: Experiment, step: Step, seeds: Sequence[int]) -> Iterator[Value]:
    """Similarity of matched components over pairs of seeds.

    Args:
        experiment: What to measure.
        step: The step of the recipe.
        seeds: Seeds to compare.

    Yields:
        Mean and standard deviation by coefficients (W) and by pseudo-Fishers (G).
    """
    similarity = compare_seeds([experiment.varied(seed=seed).fit() for seed in seeds])
    all_seeds = ", ".join(map(str, seeds))
    for title, kind in (("W", "coefficients"), ("G", "pseudo_fishers")):
        found = {title: getattr(similarity, kind), f"{title} sd": getattr(similarity, f"{kind}_deviation")}
        yield from values(found, {"seed": (all_seeds, all_seeds)})


def splits(experiment: Experiment, step: Step, counts: Sequence[int]) -> Iterator[Measured]:
    """Percentage of the splits of prediction-tuned components that are tuned to the same prediction.

    Args:
        experiment: What to measure.
        step: The step of the recipe.
        counts: Numbers of components to compare.

    Yields:
        The percentage for each pair of numbers of components that are different at this scale, and the mean over pairs.
    """
    kept: dict[int, tuple[int, Experiment]] = {}
    for count in counts:
        varied = experiment.varied(components=count)
        here = varied.here.components
        if here in kept:
            why = f"at this scale {here} components, as for {kept[here][0]}"
            yield Missing(f"{experiment.here.task}, {count} components", why)
        else:
            kept[here] = count, varied
    percentages = []
    for (coarse, first), (fine, second) in combinations(kept.values(), 2):
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


def rank_similarity(experiment: Experiment, step: Step, ranks: Sequence[int], seeds: Sequence[int]) -> Iterator[Value]:
    """Similarity of the decomposition of Fishers of lower rank to that of the whole ones.

    Args:
        experiment: What to measure; its directions are random projections.
        step: The step of the recipe.
        ranks: Ranks to reduce Fishers to.
        seeds: Two seeds.

    Yields:
        The similarity for each lower rank and, for the full rank, that of the other seed.
    """
    projections = int(experiment.paper.directions.split(":")[1])
    first, second = (experiment.varied(seed=seed) for seed in seeds)
    whole = first.fit()
    for rank in ranks:
        if rank < projections:
            similarity = _similarity(whole, _fit_reduced(first, rank))
            yield Value({"eps": projections, "rank": rank}, similarity, {"rank": (rank, rank)})
    yield Value({"eps": projections, "rank": projections}, _similarity(whole, second.fit()))


def projection_similarity(experiment: Experiment, step: Step, against: str) -> Iterator[Value]:
    """Similarity to the decomposition with more projections of the expectation: those of the directions `against`."""
    most = experiment.runs.experiment(replace(experiment.paper, directions=against))
    yield Value({"measure": "Similarity"}, _similarity(experiment.fit(), most.fit()))


def eigenvalue_decay(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Mean share of the trace in each eigenvalue."""
    for number, share in enumerate(spectra(SpectraConfig(str(experiment.run.path))).decay, 1):
        yield Value({"number": number}, share)


_OF_COMPONENTS = (tunings, perturbations, in_context, held_out, top_examples, nearest_component)
_OF_SIMILARITY = (stability, splits, rank_similarity, projection_similarity, eigenvalue_decay)
_OF_COSTS = (early_stopping, decomposition_cost, collection_time)
MEASURES: dict[str, Callable[..., Iterator[Measured]]] = {
    function.__name__.replace("_", "-"): function for function in (*_OF_COMPONENTS, *_OF_SIMILARITY, *_OF_COSTS)
}
"""What steps of recipes can do, by name; the options of a step are further parameters."""
KEEP_SOLVER = ("early-stopping",)
"""Steps that are about the paper's solver, so that no other may replace it."""
