"""Directions that act on one component and on little else: rejection (the paper's) and Fisher whitening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from npeff.decompose.base import Decomposition
from npeff.decompose.solver import gram
from npeff.perturb.config import Direction
from npeff.perturb.lift import RowSums, component_sums, example_sizes
from npeff.perturb.protocol import Plan
from npeff.store.rows import SubsetRows
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.types import Array

RIDGES = tuple(10.0 ** (power / 2) for power in range(-12, 1))
"""Ridges that are tried, as shares of the largest eigenvalue of the mean Fisher."""
JITTER = 1e-9
"""Added to a diagonal, as a share of its mean: rows may depend on each other."""
BACKGROUND_ROWS = 4096
"""Most Fisher rows of a background."""
FEWEST = 10
"""Background examples that a ridge can be chosen on."""
VALIDATION = 0.2
"""Share of the background examples on which a ridge is chosen."""


@dataclass(frozen=True)
class RidgeTrial:
    """A ridge that was tried."""

    ridge: float
    """What is added to the mean Fisher."""
    ratio: float
    """Second-order KL ratio on held-out background examples, geometric mean over components."""


@dataclass(frozen=True)
class Notes:
    """What was chosen before the first component was perturbed; components that are added later use the same."""

    ridge: float | None = None
    """whiten: what is added to the mean Fisher."""
    ridges: list[RidgeTrial] = field(default_factory=list)
    """whiten: the ridges that were tried; empty if the ridge was given."""
    background_examples: int | None = None
    """whiten: examples of the mean Fisher."""
    key: str | None = None
    """Which settings of which run and decomposition this belongs to."""

    removed: ClassVar[dict[str, str]] = {"stationarity": "it is in the records of the components."}


def rejection_mix(gram: torch.Tensor, chosen: Sequence[int], threshold: float) -> torch.Tensor:
    """What the paper's sequential rejection makes of components, as mixtures of all of them.

    One component after another, those with |cosine| below `threshold` to what is left are projected out. A component is
    never rejected from itself.

    Args:
        gram: HHᵀ [C, C].
        chosen: The J components to keep.
        threshold: Largest |cosine| of a component that is projected out.

    Returns:
        The mixtures, float64 [J, C].
    """
    K = gram.double()
    lengths = K.diagonal().sqrt()
    mixes = torch.zeros(len(chosen), len(K), dtype=torch.float64)
    for mix, j in zip(mixes, chosen, strict=True):
        mix[j] = 1
        for other in range(len(K)):
            if other == j or lengths[other] == 0:
                continue
            inner = float(K[other] @ mix)
            length = float(mix @ K @ mix) ** 0.5
            if length > 0 and abs(inner) < threshold * length * float(lengths[other]):
                mix[other] -= inner / float(K[other, other])
    return mixes


@dataclass(frozen=True)
class FisherRows:
    """Rows of some examples at their own length: G_iᵀG_i is the Fisher of example i, not one of unit norm."""

    examples: Array
    """Numbers of the examples, ascending, [n]."""
    owner: Array
    """Position in `examples` of each row, [R]."""
    places: Array
    """Place of each row among all rows of the run, [R]."""
    scales: torch.Tensor
    """What a stored row was multiplied with, float64 [R]."""
    rows: torch.Tensor
    """float32 [R, p]."""

    def part(self, inside: Array) -> torch.Tensor:
        """Positions of the rows of some of the examples; `inside` is bool [n]."""
        return torch.from_numpy(inside[self.owner].nonzero()[0])


def read_fishers(run: Run, examples: Array) -> FisherRows:
    """The Fisher rows of some examples.

    Args:
        run: The run.
        examples: Numbers of the examples in any order, none of them twice, [n].

    Returns:
        Their rows; memory 4 · rows · p.
    """
    source = run.source("fisher")
    examples = np.sort(np.asarray(examples, dtype=np.int64))
    ranks = source.ranks[examples]
    starts = (np.cumsum(source.ranks) - source.ranks)[examples]
    owner = np.repeat(np.arange(len(examples)), ranks)
    places = starts[owner] + np.arange(len(owner)) - (np.cumsum(ranks) - ranks)[owner]
    norms = torch.from_numpy(run.table["pef_norm"].to_numpy().astype(np.float64))
    scales = norms[torch.from_numpy(examples)].sqrt()[torch.from_numpy(owner)]
    rows = SubsetRows(source, examples).read(0, len(examples))
    return FisherRows(examples, owner, places, scales, rows * scales[:, None].float())


def whiten(gram: torch.Tensor, products: torch.Tensor, examples: int, ridge: float) -> torch.Tensor:
    """Weights a with (F̄ + λI)⁻¹h ∝ h − Gᵀa, for F̄ = GᵀG / examples.

    By Woodbury's identity the inverse of a p × p matrix needs only an R × R one:
    (F̄ + λI)⁻¹ = (I − Gᵀ(GGᵀ + λ·examples·I)⁻¹G) / λ.

    Args:
        gram: GGᵀ, float64 [R, R].
        products: GHᵀ, float64 [R, J].
        examples: How many examples the rows G belong to.
        ridge: λ.

    Returns:
        The weights, float64 [R, J].
    """
    system = gram.clone()
    system.diagonal().add_(ridge * examples)
    return torch.cholesky_solve(products, torch.linalg.cholesky(system))


def whiten_within(
    span: torch.Tensor, background: torch.Tensor, h: torch.Tensor, examples: int, ridge: float
) -> torch.Tensor:
    """Weights c of the rows of a span for which δ = spanᵀc comes closest to (F̄ + λI)⁻¹h.

    That is the minimum of ½ δᵀ(F̄ + λI)δ − δᵀh over the span, with F̄ = GᵀG / examples of the background G: few rows
    carry the direction, but their weights make up for those left out.

    Args:
        span: Rows that may carry the direction, [S, p].
        background: Rows of the mean Fisher, [R, p].
        h: What is whitened, [p].
        examples: How many examples the background belongs to.
        ridge: λ.

    Returns:
        The weights, float64 [S].
    """
    cross = (span @ background.T).double()
    system = cross @ cross.T / examples + ridge * (span @ span.T).double()
    system.diagonal().add_(JITTER * float(system.diagonal().mean()))
    return torch.cholesky_solve((span @ h).double()[:, None], torch.linalg.cholesky(system))[:, 0]


def choose_ridge(
    background: FisherRows, top: Sequence[FisherRows], vectors: torch.Tensor, seed: int
) -> tuple[float, list[RidgeTrial]]:
    """The ridge with the best second-order KL ratio on examples that the whitening does not see.

    A part of the background is held out; vectors are whitened against the rest, without any vector's top examples. The
    geometric mean over vectors of mean effect on top examples ÷ mean effect on held-out ones is compared.

    Args:
        background: Rows of examples to whiten against.
        top: Rows of the top examples of each vector.
        vectors: Components to whiten, [J, p].
        seed: Seed of the examples that are held out.

    Returns:
        The ridge, and all that were tried.

    Raises:
        UserError: Too few examples are left.
    """
    tops = np.unique(np.concatenate([rows.examples for rows in top]))
    candidates = np.setdiff1d(background.examples, tops)
    if len(candidates) < FEWEST:
        raise UserError(
            f"Only {len(candidates)} background examples are left to choose a ridge on. Collect more examples, lower "
            f"--random, or give --ridge."
        )
    held_out = np.random.default_rng([seed, 3]).permutation(candidates)[: max(2, round(VALIDATION * len(candidates)))]
    fitted = np.isin(background.examples, np.setdiff1d(candidates, held_out))
    G = background.rows[background.part(fitted)]
    V = background.rows[background.part(np.isin(background.examples, held_out))]
    values, basis = torch.linalg.eigh((G @ G.T).double())
    products = basis.T @ (G @ vectors.T).double()
    count = int(fitted.sum())
    largest = float(values[-1]) / count
    on_held_out = (V @ vectors.T).double(), (V @ G.T).double() @ basis
    on_top = [((T.rows @ h).double(), (T.rows @ G.T).double() @ basis) for T, h in zip(top, vectors, strict=True)]
    trials = []
    for share in RIDGES:
        ridge = share * largest
        a = products / (values.clamp_min(0) + ridge * count)[:, None]
        beside = (on_held_out[0] - on_held_out[1] @ a).square().sum(0) / len(held_out)
        inside = [
            (plain - cross @ a[:, j]).square().sum() / len(top[j].examples) for j, (plain, cross) in enumerate(on_top)
        ]
        trials.append(RidgeTrial(ridge, float((torch.stack(inside) / beside).log().mean().exp())))
    return max(trials, key=lambda trial: trial.ratio).ridge, trials


def read_background(run: Run, plan: Plan, seed: int) -> FisherRows:
    """Rows of the mean Fisher: those of random examples of the plan's background, at most `BACKGROUND_ROWS`."""
    ranks = run.source("fisher").ranks
    shuffled = np.random.default_rng([seed, 2]).permutation(plan.background)
    return read_fishers(run, shuffled[np.cumsum(ranks[shuffled]) <= BACKGROUND_ROWS])


def whiten_sums(
    run: Run, sums: RowSums, background: FisherRows, excluded: Sequence[Array], ridge: float, carriers: float
) -> RowSums:
    """Whiten vectors, and solve for them again within the span of those examples that weigh most in the result.

    Random examples, which are neither in the background nor excluded, carry nothing.

    Args:
        run: The run.
        sums: J vectors.
        background: Rows of the mean Fisher.
        excluded: For each vector, the examples that do not belong to its background.
        ridge: What is added to the mean Fisher.
        carriers: Share of the examples that may carry a vector; 1 takes the first solution, which all of them carry.

    Returns:
        The whitened vectors, as sums of rows.
    """
    inside = [~np.isin(background.examples, without) for without in excluded]
    products = (background.rows @ background.rows.T).double()
    vectors = sums.vectors.clone()
    weights = {kind: values.clone() for kind, values in sums.weights.items()}
    fisher = weights.setdefault("fisher", torch.zeros(len(vectors), int(run.source("fisher").ranks.sum())))
    for j, mask in enumerate(inside):
        keep = background.part(mask)
        G = background.rows[keep]
        on_vector = (G @ sums.vectors[j, :, None]).double()
        a = whiten(products[keep][:, keep], on_vector, int(mask.sum()), ridge)[:, 0]
        vectors[j] -= a.float() @ G
        fisher[j, background.places[keep.numpy()]] -= (a * background.scales[keep]).float()
    whole = RowSums(vectors, weights)
    if carriers >= 1:
        return whole
    sizes = example_sizes(whole, {kind: run.source(kind) for kind in weights})
    carried = RowSums(torch.zeros_like(vectors), {"fisher": torch.zeros_like(fisher)})
    for j, (mask, without) in enumerate(zip(inside, excluded, strict=True)):
        allowed = np.union1d(background.examples, without)
        order = allowed[np.argsort(-sizes[j, allowed], kind="stable")]
        span = read_fishers(run, order[: max(1, round(carriers * len(order)))])
        G = background.rows[background.part(mask)]
        c = whiten_within(span.rows, G, sums.vectors[j], int(mask.sum()), ridge)
        carried.vectors[j] = c.float() @ span.rows
        carried.weights["fisher"][j, span.places] = (c * span.scales).float()
    return carried


@dataclass(frozen=True)
class Directions:
    """Directions of the sketch for a plan's components."""

    sums: RowSums
    """The directions as sums of rows."""
    targets: torch.Tensor
    """What they should be: made of the components as they are stored, float32 [J, p]."""
    stationarity: list[float]
    """Cosine of each component with the sum of rows that stands for it."""
    notes: Notes
    """What was chosen on the way."""


def plan_directions(
    run: Run,
    decomposition: Decomposition,
    plan: Plan,
    direction: Direction,
    threshold: float = 0.5,
    ridge: float | None = None,
    carriers: float = 1.0,
    seed: int = 0,
) -> Directions:
    """The directions of a plan's components.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        plan: Components and examples.
        direction: whiten, reject or plain.
        threshold: reject: components with a cosine of at least this size are not rejected from.
        ridge: whiten: what is added to the mean Fisher; chosen if not given.
        carriers: whiten: share of the examples that carry the direction.
        seed: whiten: seed of the background.

    Returns:
        One direction for each component of the plan.

    Raises:
        UserError: The run has no Fisher rows to whiten with.
    """
    mix = torch.eye(len(decomposition.components), dtype=torch.float64)[plan.components]
    if direction == "reject":
        mix = rejection_mix(gram(decomposition.components.float()), plan.components, threshold)
    sums = component_sums(decomposition, run.source(decomposition.kind), mix)
    targets = (mix @ decomposition.components.double()).float()
    cosines = torch.nn.functional.cosine_similarity(sums.vectors, targets, dim=1)
    stationarity = [round(value, 6) for value in cosines.tolist()]
    if direction != "whiten":
        return Directions(sums, targets, stationarity, Notes())
    if "fisher" not in run.manifest.collected:
        raise UserError(f"{run.path} has no Fisher rows to whiten with. Collect with --fisher, or use reject.")
    background = read_background(run, plan, seed)
    tops = [plan.top_examples(number) for number in plan.components]
    trials: list[RidgeTrial] = []
    if ridge is None:
        ridge, trials = choose_ridge(background, [read_fishers(run, top) for top in tops], sums.vectors, seed)
    white = whiten_sums(run, sums, background, tops, ridge, carriers)
    return Directions(white, white.vectors, stationarity, Notes(ridge, trials, len(background.examples)))
