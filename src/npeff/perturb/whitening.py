"""Directions that act on one component and on little else: rejection (the paper's) and Fisher whitening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from npeff.decompose.als import gram
from npeff.decompose.base import Decomposition
from npeff.perturb.config import Direction
from npeff.perturb.protocol import Plan
from npeff.perturb.row_weights import RowSums, component_sums, example_sizes
from npeff.store.run import Run
from npeff.utils.errors import UserError

RIDGES = tuple(10.0 ** (power / 2) for power in range(-12, 1))
"""Ridges that are tried, as shares of the largest eigenvalue of the mean Fisher."""
JITTER = 1e-9
"""Added to a diagonal, as a share of its mean: rows may depend on each other."""
VALIDATION = 0.2
"""Share of the background examples on which a ridge is chosen."""


def rejection_mix(gram: torch.Tensor, chosen: Sequence[int], threshold: float) -> torch.Tensor:
    """What the paper's sequential rejection makes of components, as mixtures of all of them: float64 [J, C].

    `gram` = HHᵀ [C, C]. One component after another, those with |cosine| below `threshold` to what is left are
    projected out. A component is never rejected from itself.
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

    examples: np.ndarray
    """Numbers of the examples, ascending, [n]."""
    owner: np.ndarray
    """Position in `examples` of each row, [R]."""
    places: np.ndarray
    """Place of each row among all rows of the run, [R]."""
    scales: torch.Tensor
    """What a stored row was multiplied with, float64 [R]."""
    rows: torch.Tensor
    """float32 [R, p]."""

    def effects(self, vectors: torch.Tensor) -> torch.Tensor:
        """Second-order KL ½‖G_i v‖² of each example for vectors [J, p] of the sketch: float64 [J, n]."""
        squares = (vectors.to(self.rows) @ self.rows.T).double().square() / 2
        result = torch.zeros(len(vectors), len(self.examples), dtype=torch.float64)
        return result.index_add_(1, torch.from_numpy(self.owner), squares)


def read_fishers(run: Run, examples: np.ndarray) -> FisherRows:
    """The Fisher rows of examples (any order, no example twice); memory 4 · rows · p."""
    source = run.source("fisher")
    examples = np.sort(np.asarray(examples, dtype=np.int64))
    ranks = source.ranks[examples]
    starts = (np.cumsum(source.ranks) - source.ranks)[examples]
    owner = np.repeat(np.arange(len(examples)), ranks)
    places = starts[owner] + np.arange(len(owner)) - (np.cumsum(ranks) - ranks)[owner]
    norms = torch.from_numpy(run.table["pef_norm"].to_numpy().astype(np.float64))
    scales = norms[torch.from_numpy(examples)].sqrt()[torch.from_numpy(owner)]
    parts = [source.read(int(i), int(i) + 1) for i in examples]
    rows = torch.cat(parts) if parts else torch.empty(0, source.dim)
    return FisherRows(examples, owner, places, scales, rows * scales[:, None].float())


def whiten(gram: torch.Tensor, products: torch.Tensor, examples: int, ridge: float) -> torch.Tensor:
    """Weights a [R, J] with (F̄ + λI)⁻¹h ∝ h − Gᵀa, for F̄ = GᵀG / examples and λ = `ridge`.

    `gram` = GGᵀ [R, R] and `products` = GHᵀ [R, J], float64. By Woodbury's identity the inverse of a p × p matrix
    needs only an R × R one: (F̄ + λI)⁻¹ = (I − Gᵀ(GGᵀ + λ·examples·I)⁻¹G) / λ.
    """
    system = gram.clone()
    system.diagonal().add_(ridge * examples)
    return torch.cholesky_solve(products, torch.linalg.cholesky(system))


def whiten_within(
    span: torch.Tensor, background: torch.Tensor, h: torch.Tensor, examples: int, ridge: float
) -> torch.Tensor:
    """Weights c [S] of the rows of `span` [S, p] for which δ = spanᵀc comes closest to (F̄ + λI)⁻¹h.

    That is the minimum of ½ δᵀ(F̄ + λI)δ − δᵀh over the span, with F̄ = GᵀG / examples of the `background` G [R, p]: few
    rows carry the direction, but their weights make up for those left out. float64.
    """
    cross = (span @ background.T).double()
    system = cross @ cross.T / examples + ridge * (span @ span.T).double()
    system.diagonal().add_(JITTER * float(system.diagonal().mean()))
    return torch.cholesky_solve((span @ h).double()[:, None], torch.linalg.cholesky(system))[:, 0]


def choose_ridge(
    background: FisherRows, top: Sequence[FisherRows], vectors: torch.Tensor, seed: int
) -> tuple[float, list[dict[str, float]]]:
    """The ridge with the best second-order KL ratio on examples that the whitening does not see.

    A part of the background is held out; vectors [J, p] are whitened against the rest (without any vector's top
    examples, `top`), and the geometric mean over vectors of mean effect on top examples ÷ mean effect on held-out ones
    is compared. Returns the ridge and the table of {ridge, ratio}.
    """
    tops = np.unique(np.concatenate([rows.examples for rows in top]))
    candidates = np.setdiff1d(background.examples, tops)
    if len(candidates) < 10:
        raise UserError(
            f"Only {len(candidates)} background examples are left to choose a ridge on. Collect more examples, lower "
            f"--random, or give --ridge."
        )
    held_out = np.random.default_rng([seed, 3]).permutation(candidates)[: max(2, round(VALIDATION * len(candidates)))]
    fitted = np.isin(background.examples, np.setdiff1d(candidates, held_out))[background.owner]
    checked = np.isin(background.examples, held_out)[background.owner]
    G, V = background.rows[fitted], background.rows[checked]
    values, basis = torch.linalg.eigh((G @ G.T).double())
    products = basis.T @ (G @ vectors.T).double()
    count = int(np.isin(background.examples, np.setdiff1d(candidates, held_out)).sum())
    largest = float(values[-1]) / count
    on_checked = (V @ vectors.T).double(), (V @ G.T).double() @ basis
    on_top = [((T.rows @ h).double(), (T.rows @ G.T).double() @ basis) for T, h in zip(top, vectors, strict=True)]
    table = []
    for share in RIDGES:
        ridge = share * largest
        a = products / (values.clamp_min(0) + ridge * count)[:, None]
        beside = (on_checked[0] - on_checked[1] @ a).square().sum(0) / len(held_out)
        inside = [
            (plain - cross @ a[:, j]).square().sum() / len(top[j].examples) for j, (plain, cross) in enumerate(on_top)
        ]
        ratio = float((torch.stack(inside) / beside).log().mean().exp())
        table.append({"ridge": ridge, "ratio": ratio})
    return max(table, key=lambda entry: entry["ratio"])["ridge"], table


@dataclass(frozen=True)
class Whitening:
    """A background to whiten against, and the ridge."""

    background: FisherRows
    gram: torch.Tensor
    """GGᵀ of its rows, float64 [R, R]."""
    ridge: float
    table: list[dict[str, float]]
    """Second-order ratios of the ridges that were tried; empty if the ridge was given."""

    @staticmethod
    def prepare(
        run: Run, plan: Plan, vectors: torch.Tensor, ridge: float | None, most_rows: int, seed: int
    ) -> Whitening:
        """Read the background, at most `most_rows` rows, and choose the ridge for vectors [J, p] of plan.components."""
        ranks = run.source("fisher").ranks
        shuffled = np.random.default_rng([seed, 2]).permutation(plan.background)
        kept = shuffled[np.cumsum(ranks[shuffled]) <= most_rows]
        background = read_fishers(run, kept)
        table: list[dict[str, float]] = []
        if ridge is None:
            top = [read_fishers(run, plan.top_examples(number)) for number in plan.components]
            ridge, table = choose_ridge(background, top, vectors, seed)
        return Whitening(background, (background.rows @ background.rows.T).double(), ridge, table)

    def apply(self, sums: RowSums, excluded: Sequence[np.ndarray], total_rows: int) -> RowSums:
        """Whiten every vector against the background without the examples that are `excluded` for it."""
        vectors = sums.vectors.clone()
        weights = {kind: values.clone() for kind, values in sums.weights.items()}
        fisher = weights.setdefault("fisher", torch.zeros(len(vectors), total_rows))
        for j, without in enumerate(excluded):
            inside = ~np.isin(self.background.examples, without)
            keep = torch.from_numpy(inside[self.background.owner].nonzero()[0])
            G = self.background.rows[keep]
            products = (G @ sums.vectors[j, :, None]).double()
            a = whiten(self.gram[keep][:, keep], products, int(inside.sum()), self.ridge)[:, 0]
            vectors[j] -= a.float() @ G
            fisher[j, self.background.places[keep.numpy()]] -= (a * self.background.scales[keep]).float()
        return RowSums(vectors, weights)

    def carry(self, run: Run, whole: RowSums, h: torch.Tensor, excluded: Sequence[np.ndarray], share: float) -> RowSums:
        """Whitened vectors anew, carried by a share of the examples: those that weigh most in `whole`, from `apply`.

        `h` [J, p] is what is whitened. Examples that are neither in the background nor excluded (a component's top
        examples are the one, random ones the other) carry nothing.
        """
        sizes = example_sizes(whole, {kind: run.source(kind) for kind in whole.weights})
        vectors = torch.zeros_like(whole.vectors)
        weights = torch.zeros_like(whole.weights["fisher"])
        for j, without in enumerate(excluded):
            allowed = np.union1d(self.background.examples, without)
            order = allowed[np.argsort(-sizes[j, allowed], kind="stable")]
            span = read_fishers(run, order[: max(1, round(share * len(order)))])
            inside = ~np.isin(self.background.examples, without)
            G = self.background.rows[torch.from_numpy(inside[self.background.owner])]
            c = whiten_within(span.rows, G, h[j], int(inside.sum()), self.ridge)
            vectors[j] = c.float() @ span.rows
            weights[j, span.places] = (c * span.scales).float()
        return RowSums(vectors, {"fisher": weights})


@dataclass(frozen=True)
class Directions:
    """Directions of the sketch for a plan's components."""

    sums: RowSums
    """The directions as sums of rows."""
    targets: torch.Tensor
    """What they should be: made of the components as they are stored, float32 [J, p]."""
    notes: dict[str, Any]
    """What was chosen on the way; stationarity is the cosine of each component with the sum that stands for it."""


def plan_directions(
    run: Run,
    decomposition: Decomposition,
    plan: Plan,
    direction: Direction,
    threshold: float = 0.5,
    ridge: float | None = None,
    background_rows: int = 4096,
    carriers: float = 1.0,
    seed: int = 0,
) -> Directions:
    """The directions of a plan's components."""
    C = len(decomposition.components)
    mix = torch.eye(C, dtype=torch.float64)[plan.components]
    if direction == "reject":
        mix = rejection_mix(gram(decomposition.components.float()), plan.components, threshold)
    sums = component_sums(decomposition, run.source(decomposition.kind), mix)
    targets = (mix @ decomposition.components.double()).float()
    cosines = torch.nn.functional.cosine_similarity(sums.vectors, targets, dim=1)
    notes: dict[str, Any] = {"stationarity": [round(value, 6) for value in cosines.tolist()]}
    if direction == "whiten":
        if "fisher" not in run.manifest["identity"]["collected"]:
            raise UserError(f"{run.path} has no Fisher rows to whiten with. Collect with --fisher, or use reject.")
        whitening = Whitening.prepare(run, plan, sums.vectors, ridge, background_rows, seed)
        excluded = [plan.top_examples(number) for number in plan.components]
        h = sums.vectors
        sums = whitening.apply(sums, excluded, int(run.source("fisher").ranks.sum()))
        if carriers < 1:
            sums = whitening.carry(run, sums, h, excluded, carriers)
        notes |= {
            "ridge": whitening.ridge,
            "ridges": whitening.table,
            "background_examples": len(whitening.background.examples),
        }
        targets = sums.vectors
    return Directions(sums, targets, notes)
