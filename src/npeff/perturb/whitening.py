"""Directions that act on one component and on little else: rejection (the paper's) and Fisher whitening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
