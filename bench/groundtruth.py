"""Are mechanisms that are known found again? Toy models, trained on the spot, by every method where it applies; then
those that are planted in the embedded language model (bench/mechanisms.py).

Everything is kept in bench/cache/groundtruth, so that a stopped benchmark continues; remove the folder to measure
again. The tables of docs/groundtruth.md are written there too (tables.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import entry, mechanisms
from bench.advice import measure as measure_users
from bench.advice import users_needed
from bench.toys import CompressedComputation, Examples, Superposition
from npeff.analyse.groups import groups
from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import start_components
from npeff.decompose.config import METHOD_TITLES, METHODS, FitConfig, Method, SaeConfig
from npeff.decompose.methods import create, kind_of
from npeff.utils.files import read_object, whole_file, write_json
from npeff.utils.report import Column, Table, write_report

CACHE = Path(__file__).parent / "cache" / "groundtruth"
SEEDS = (0, 1, 2)
MODELS = {"5-2": (5, 2), "40-10": (40, 10)}
DENSITIES = (0.05, 0.2)
EXAMPLES = {("5-2", 0.05): 8000, ("5-2", 0.2): 4000, ("40-10", 0.05): 4000, ("40-10", 0.2): 16_000}
"""Dense examples hold eight features each: more of them are needed to tell these apart."""
HELD_OUT = 2000
PURE = 0.8
"""Share of a component's or a group's squared length that must read one feature for this input to be found by it."""
COMPRESSED_EXAMPLES = 5000


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    yield entry("groundtruth.tms_5_2", worst("5-2", 0.05, 1), ">= 0.998")
    yield entry("groundtruth.tms_40_10", worst("40-10", 0.05, 1), ">= 0.99")
    yield entry("groundtruth.tms_40_10_dense", worst("40-10", 0.2, 2), ">= 0.95")
    found = compressed("npeff", 200)
    yield entry("groundtruth.compressed_component", found["component"], "reported")
    yield entry("groundtruth.compressed_group", found["group"], "reported")
    yield entry("groundtruth.users_needed", users_needed(advice()["64"]), "reported")
    write_tables()
    yield from mechanisms.benchmarks(data)


def advice() -> dict[str, Any]:
    """How many examples must use a mechanism: see bench/advice.py."""
    return cached("advice", measure_users)


def worst(model: str, density: float, factor: int) -> float:
    """NPEFF's mean maximal cosine, in the worst of the seeds."""
    return min(superposition(model, density, factor, seed, "npeff")["mean"] for seed in SEEDS)


def cached(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured under this name, now or before."""
    path = CACHE / f"{name}.json"
    if not path.is_file():
        write_json(path, measure())
    return read_object(path)


@cache
def trained(model: str, seed: int) -> Superposition:
    return Superposition(*MODELS[model], seed)


@lru_cache(2)
def drawn(model: str, density: float, seed: int, held_out: bool = False) -> Examples:
    count = HELD_OUT if held_out else EXAMPLES[model, density]
    return trained(model, seed).examples(count, density, 2 * seed + held_out)


def fit(method: Method, components: int, seed: int, examples: Examples) -> Decomposition:
    config = FitConfig(method=method, components=components, seed=seed, sae=SaeConfig(sae_batch=512, sae_steps=3000))
    return create(config).fit(getattr(examples, kind_of(method)))


def superposition(model: str, density: float, factor: int, seed: int, method: Method | None) -> dict[str, float]:
    """Mean and worst maximal cosine of the true columns, and how coefficients go with features of other examples.

    Without a method, directions of random examples take the place of components.
    """
    name = f"tms-{model}-{density:g}-{factor}-{seed}-{method or 'random'}"
    components = factor * MODELS[model][0]

    def measure() -> dict[str, float]:
        toy, examples = trained(model, seed), drawn(model, density, seed)
        if method is None:
            return cosines(toy.mechanisms(), start_components(examples.fisher, components, "random", seed))
        fitted = fit(method, components, seed, examples)
        of_activations = kind_of(method) == "activation"  # there a feature is its column of W alone
        truth = torch.nn.functional.normalize(toy.W.T, dim=1) if of_activations else toy.mechanisms()
        others = drawn(model, density, seed, held_out=True)
        coefficients = fitted.transform(getattr(others, kind_of(method)))
        return cosines(truth, fitted.components) | follow(truth, fitted.components, coefficients, others.features)

    return cached(name, measure)


def applies(model: str, factor: int, method: Method | None) -> bool:
    """Whether a method can have so many components: an SVD of activations has no more than hidden units."""
    features, hidden = MODELS[model]
    return method != "svd-activations" or factor * features <= hidden


def nearest(truth: Tensor, components: Tensor) -> Tensor:
    """|cos| of every true direction with every component, [n, C]."""
    return (truth @ torch.nn.functional.normalize(components, dim=1).T).abs()


def cosines(truth: Tensor, components: Tensor) -> dict[str, float]:
    best = nearest(truth, components).amax(dim=1)
    return {"mean": float(best.mean()), "worst": float(best.min())}


def follow(truth: Tensor, components: Tensor, coefficients: Tensor, features: Tensor) -> dict[str, float]:
    """Correlation of each feature with the coefficient of the component nearest to it; beside it, with the next one's.

    The next feature in the list has nothing to do with the component: that is what chance gives.
    """
    sizes = coefficients[:, nearest(truth, components).argmax(dim=1)].abs().numpy()

    def mean_correlation(x: Tensor) -> float:
        pairs = zip(sizes.T, x.T.numpy(), strict=True)
        return float(np.mean([np.corrcoef(w, v)[0, 1] if w.std() > 0 else 0.0 for w, v in pairs]))

    return {"follows": mean_correlation(features), "chance": mean_correlation(features.roll(1, dims=1))}


# --- compressed computation ---------------------------------------------------------------------------------


@cache
def compressed_model() -> tuple[CompressedComputation, Examples]:
    path = CACHE / "compressed.safetensors"
    toy = CompressedComputation(steps=0 if path.is_file() else 5000)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            save_file({"A": toy.A, "B": toy.B}, temporary)
    weights = load_file(path)
    toy.A, toy.B = weights["A"], weights["B"]
    return toy, toy.examples(COMPRESSED_EXAMPLES, seed=1)


def compressed(method: Method, components: int) -> dict[str, float]:
    """How many of the input mechanisms are found by a component, and by a group of components."""

    def measure() -> dict[str, float]:
        toy, examples = compressed_model()
        fitted = fit(method, components, 0, examples)
        single = [[j] for j in range(components)]
        together = single + [group.members for group in groups(fitted)]
        alone, best = recovered(toy, fitted, single), recovered(toy, fitted, together)
        return {
            "component": float((alone > 0).sum()),
            "covered": float(alone.mean()),
            "group": float((best > 0).sum()),
            "covered_by_group": float(best.mean()),
        }

    return cached(f"compressed-{method}-{components}", measure)


def recovered(toy: CompressedComputation, fitted: Decomposition, candidates: list[list[int]]) -> Tensor:
    """How much of the Fisher of each input mechanism the best candidate covers that reads its feature alone, [n]."""
    best = torch.zeros(toy.A.shape[1])
    shares, energy = toy.share_of_feature(fitted.components), fitted.energy.float()
    for members in candidates:
        about = (energy[members, None] * shares[members]).sum(dim=0) / energy[members].sum().clamp(min=1e-30)
        feature = int(about.argmax())
        if about[feature] >= PURE:
            span = torch.linalg.qr(fitted.components[members].T)[0].T.contiguous()
            best[feature] = max(float(best[feature]), toy.covered(span, feature))
    return best


# --- tables -------------------------------------------------------------------------------------------------


def write_tables() -> None:
    """All results as Markdown."""
    which = itertools.product(MODELS, DENSITIES, (1, 2))
    tables = [*itertools.starmap(superposition_table, which), compressed_table()]
    write_report(CACHE / "tables", tables)


def superposition_table(model: str, density: float, factor: int) -> Table:
    names = ("mean", "worst", "follows", "chance")
    caption = f"{model}, density {density:g}, C = {factor * MODELS[model][0]}: worst of three seeds"
    table = Table(caption, [Column("method"), *(Column(name, ".3f") for name in names)])
    for method in (*METHODS, None):
        if not applies(model, factor, method):
            continue
        seeds = [superposition(model, density, factor, seed, method) for seed in SEEDS]
        title = METHOD_TITLES[method] if method else "random examples"
        table.rows.append([title, *(min((each[n] for each in seeds if n in each), default=None) for n in names)])
    return table


def compressed_table() -> Table:
    names = ("component", "covered", "group", "covered_by_group")
    table = Table(
        "Compressed computation, 100 input mechanisms",
        [
            Column("method"),
            Column("components"),
            *(Column(name, ".3f" if "covered" in name else ".0f") for name in names),
        ],
    )
    of_parameters: tuple[Method, ...] = ("npeff", "gnpeff", "clusters", "svd-gradients")
    for method, components in [*itertools.product(of_parameters, (100,)), ("npeff", 200), ("gnpeff", 200)]:
        found = compressed(method, components)
        table.rows.append([METHOD_TITLES[method], components, *(found[name] for name in names)])
    return table
