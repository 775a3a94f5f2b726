"""Measurements of recipes: tunings, perturbations, in-context learning, held-out losses, texts.

Each calls the same functions as the commands do, and yields numbers, texts, and what could not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npeff.analyse import ranking
from npeff.analyse.sweep import held_out_tunings
from npeff.collect.session import collect_texts
from npeff.decompose.config import METHOD_TITLES
from npeff.paper import costs, similarity
from npeff.paper.config import IclConfig
from npeff.paper.icl import IclTable, icl
from npeff.paper.recipe import Step
from npeff.paper.runs import TOP, Experiment
from npeff.paper.values import Listing, Measured, Missing, Value
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.utils.configs import read_record
from npeff.utils.errors import UserError

MAGNITUDE, THRESHOLD = 20.0, 0.5
"""The paper's perturbations: length of the change, and cosine from which components are not rejected from."""


def tunings(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Percentages of prediction- and LnP-tuned components of each method."""
    for method in step.methods:
        experiment.fit(method)
        for measure, percentage in experiment.tuned_percentages(experiment.name(method)):
            yield Value({"method": METHOD_TITLES[method], "measure": measure}, percentage)


def perturbations(experiment: Experiment, step: Step) -> Iterator[Measured]:
    """Geometric means of KL ratios and norm ratios of each method.

    At a small scale, compressed sensing with the paper's length of the change means little, because the model is
    another one: components are lifted exactly then, and compared at equal effect.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Two values for each method, or that it is missing.
    """
    scale, paper, run = experiment.runs.scale, experiment.paper, experiment.run
    small = scale.is_small(paper)
    for method in step.methods:
        name, components = experiment.name(method), experiment.fit(method).config.components
        config = PerturbConfig(
            str(run.path),
            name,
            count=scale.perturbed(paper, step.options.count, components),
            random=scale.count(paper, step.options.random, max(1, len(run.table) // 4)),
            way="lift" if small else "sensing",
            direction="reject",
            threshold=THRESHOLD,
            top=TOP,
            magnitude=None if small else MAGNITUDE,
            predict=False,  # the paper's tables have no predictions
            device=experiment.runs.device,
            perturbation=f"reproduce-{name}",
        )
        try:
            (results,) = perturb(config).values()
        except UserError as error:  # a method may have no component with enough examples; the others go on
            yield Missing(f"{experiment.here.task}, {METHOD_TITLES[method]}: perturbations", str(error))
            continue
        yield Value({"method": METHOD_TITLES[method], "measure": "KL"}, results.summary.kl_ratio)
        yield Value({"method": METHOD_TITLES[method], "measure": "Norm"}, results.summary.norm_ratio)


def in_context(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Accuracy of the classifier on components, and how often it agrees with 0-shot and few-shot predictions.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Three values for each method, and the accuracies of the model itself.
    """
    scale, run, options = experiment.runs.scale, experiment.run, step.options
    for method in step.methods:
        experiment.fit(method)
    labelled = len(run.table) - run.table["label"].null_count
    config = IclConfig(
        str(run.path),
        tuple(experiment.name(method) for method in step.methods),
        shots=options.shots,
        sets=scale.count(experiment.paper, options.sets, options.sets),
        scored=scale.count(experiment.paper, options.scored, max(1, labelled // 2)),
        device=experiment.runs.device,
    )
    table = read_record(IclTable, icl(config) / "table.json")
    for row in table.rows:
        title = METHOD_TITLES[row.method]
        yield Value({"method": title, "measure": "Accuracy"}, 100 * row.accuracy)
        yield Value({"method": title, "measure": "Similarity 0-Shot"}, 100 * row.similarity_0)
        yield Value({"method": title, "measure": "Similarity ICL"}, 100 * row.similarity_k)
    yield Value({"method": "0-Shot", "measure": "Accuracy"}, 100 * table.accuracy_0)
    yield Value({"method": "ICL", "measure": "Accuracy"}, 100 * table.accuracy_k)


def held_out(experiment: Experiment, step: Step) -> Iterator[Value]:
    """How well components explain examples that they were not fitted to.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Losses held in and held out, and percentages of components that are tuned on the held-out examples.
    """
    decomposition = experiment.fit()
    yield Value({"measure": "Recon-In"}, decomposition.notes.held_in_loss)
    yield Value({"measure": "Recon-Out"}, decomposition.notes.held_out_loss)
    for measure, share in zip(("Pred", "LnP"), held_out_tunings(experiment.run, decomposition, TOP), strict=True):
        yield Value({"measure": measure}, None if share is None else 100 * share)


def top_examples(experiment: Experiment, step: Step) -> Iterator[Listing]:
    """Texts to be read; there is nothing to count.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        The top examples of each of the components with most energy.
    """
    texts = experiment.run.table["text"]
    components = sorted(experiment.analysis().component, key=lambda component: -component.energy)
    for component in components[: step.options.components]:
        top = component.orderings[0].top[: step.options.examples]
        title = f"{experiment.here.task}, component {component.number}"
        yield Listing(title, tuple(texts.take(top).to_pylist()))


def nearest_component(experiment: Experiment, step: Step) -> Iterator[Measured]:
    """Coefficients of the paper's texts for the component that is most likely the paper's.

    Args:
        experiment: What to measure.
        step: The step of the recipe. The component is the one whose coefficients of its texts `find` have the largest
            sum.

    Yields:
        The coefficient of each of its `texts`, and the top examples of the component.
    """
    decomposition, texts = experiment.fit(), step.options.texts
    rows, _ = collect_texts(experiment.run, [*texts, *step.options.find])
    coefficients = decomposition.transform(rows)
    number = int(coefficients[len(texts) :].sum(dim=0).argmax())
    for text, coefficient in zip(texts, coefficients[: len(texts), number].tolist(), strict=True):
        yield Value({"text": text}, coefficient)
    top = ranking.top_examples(decomposition.coefficients[:, number].numpy(), count=8)
    title = f"{experiment.here.task}, top examples of component {number}, the strongest on the paper's texts"
    yield Listing(title, tuple(experiment.run.table["text"].take(top).to_pylist()))


MEASURES: dict[str, Callable[[Experiment, Step], Iterator[Measured]]] = {
    "tunings": tunings,
    "perturbations": perturbations,
    "icl": in_context,
    "held-out": held_out,
    "top-examples": top_examples,
    "nearest-component": nearest_component,
    "stability": similarity.stability,
    "splits": similarity.splits,
    "rank-similarity": similarity.rank_similarity,
    "projection-similarity": similarity.projection_similarity,
    "spectra": similarity.eigenvalue_decay,
    "early-stopping": costs.early_stopping,
    "decomposition-cost": costs.decomposition_cost,
    "collection-time": costs.collection_time,
}
KEEP_SOLVER = ("early-stopping",)
"""Steps that are about the paper's solver, so that no other may replace it."""
