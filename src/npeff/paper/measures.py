"""Steps of recipes: tunings, perturbations, in-context learning, held-out losses, texts; all call the package."""

from __future__ import annotations

from collections.abc import Callable

from npeff.analyse import ranking
from npeff.analyse.sweep import held_out_tunings
from npeff.collect.session import collect_texts
from npeff.decompose.config import METHOD_TITLES
from npeff.paper import costs, similarity
from npeff.paper.config import IclConfig
from npeff.paper.found import Findings, Listing, Missing, Value
from npeff.paper.icl import icl
from npeff.paper.recipe import Step
from npeff.paper.runs import TOP, Bench, Workshop
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.utils.errors import UserError
from npeff.utils.files import read_json

PERTURBED, RANDOM, MAGNITUDE, THRESHOLD = 128, 1000, 20.0, 0.5
"""The paper's perturbations; a step's options may say otherwise."""
SHOTS, SETS, SCORED = 6, 50, 1024
"""The paper's contexts."""


def tunings(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Percentages of prediction- and LnP-tuned components of each method."""
    for method in step.methods:
        rates = shop.analysis(bench, method).tunings
        for measure, rate in (("Pred", rates["prediction"]), ("LnP", rates["lnp"])):
            if rate is not None:
                value = None if rate.share is None else 100 * rate.share
                yield Value({"method": METHOD_TITLES[method], "measure": measure}, value)


def perturbations(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Geometric means of KL ratios and norm ratios of each method.

    As in the paper at its scale; below, compressed sensing of the paper's length means little for a small model, so
    components are lifted exactly and compared at equal effect.
    """
    examples, scale, paper = len(bench.run.table), shop.scale, bench.paper
    for method in step.methods:
        fit = shop.fit_config(bench, method)
        components = shop.fit(bench, method).config.components
        config = PerturbConfig(
            str(bench.run.path),
            fit.decomposition,
            count=scale.perturbed(paper, step.options.get("count", PERTURBED), components),
            random=scale.count(paper, step.options.get("random", RANDOM), max(1, examples // 4)),
            way="lift" if scale.is_small(paper) else "sensing",
            direction="reject",
            threshold=THRESHOLD,
            top=TOP,
            magnitude=None if scale.is_small(paper) else MAGNITUDE,
            predict=False,  # the paper's tables have no predictions
            device=shop.device,
            perturbation=f"reproduce-{fit.decomposition}",
        )
        try:
            (results,) = perturb(config).values()
        except UserError as error:  # a method may have no component with enough examples; the others go on
            yield Missing(f"{bench.here.task}, {METHOD_TITLES[method]}: perturbations", str(error))
            continue
        yield Value({"method": METHOD_TITLES[method], "measure": "KL"}, results.summary.kl_ratio)
        yield Value({"method": METHOD_TITLES[method], "measure": "Norm"}, results.summary.norm_ratio)


def in_context(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Accuracy of the classifier on components, and how often it agrees with 0-shot and few-shot predictions."""
    names = []
    for method in step.methods:
        shop.fit(bench, method)
        names.append(str(shop.fit_config(bench, method).decomposition))
    labelled = len(bench.run.table) - bench.run.table["label"].null_count
    config = IclConfig(
        str(bench.run.path),
        tuple(names),
        shots=int(step.options.get("shots", SHOTS)),
        sets=shop.scale.count(bench.paper, SETS, SETS),
        scored=shop.scale.count(bench.paper, SCORED, max(1, labelled // 2)),
        device=shop.device,
    )
    found = read_json(icl(config) / "table.json")
    for row in found["rows"]:
        for measure, key in (
            ("Accuracy", "accuracy"),
            ("Similarity 0-Shot", "similarity_0"),
            ("Similarity ICL", "similarity_k"),
        ):
            yield Value({"method": METHOD_TITLES[row["method"]], "measure": measure}, 100 * row[key])
    for measure, key in (("0-Shot", "accuracy_0"), ("ICL", "accuracy_k")):
        yield Value({"method": measure, "measure": "Accuracy"}, 100 * found[key])


def held_out(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Losses held in and held out, and tunings on the held-out examples."""
    decomposition = shop.fit(bench)
    yield Value({"measure": "Recon-In"}, decomposition.notes.held_in_loss)
    yield Value({"measure": "Recon-Out"}, decomposition.notes.held_out_loss)
    for measure, share in zip(("Pred", "LnP"), held_out_tunings(bench.run, decomposition, TOP), strict=True):
        yield Value({"measure": measure}, None if share is None else 100 * share)


def top_examples(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Top examples of the components with most energy: to look at, there is nothing to count."""
    shown, texts = int(step.options.get("examples", 5)), bench.run.table["text"]
    components = sorted(shop.analysis(bench).component, key=lambda component: -component.energy)
    for component in components[: int(step.options.get("components", 10))]:
        top = component.orderings[0].top[:shown]
        yield Listing(f"{bench.here.task}, component {component.number}", tuple(texts[i].as_py() for i in top))


def nearest_component(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Coefficients of the paper's texts for the component that theirs is likely to be: the strongest on `find`."""
    decomposition = shop.fit(bench)
    texts, find = list(step.options["texts"]), list(step.options["find"])
    rows, _ = collect_texts(bench.run, [*texts, *find])
    coefficients = decomposition.transform(rows)
    number = int(coefficients[len(texts) :].sum(dim=0).argmax())
    for text, coefficient in zip(texts, coefficients[: len(texts), number].tolist(), strict=True):
        yield Value({"text": text}, coefficient)
    yield Listing(
        f"{bench.here.task}, top examples of component {number}, the strongest on the paper's texts",
        tuple(
            bench.run.table["text"][i].as_py()
            for i in ranking.top_examples(decomposition.coefficients[:, number].numpy(), count=8).tolist()
        ),
    )


STEPS: dict[str, Callable[[Workshop, Bench, Step], Findings]] = {
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
