"""Components as weighted sums of a run's rows, so that the same sums of unprojected gradients can be formed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from npeff.decompose.als import gram, inverse
from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Block, Blocks
from npeff.store.rows import RowSource
from npeff.utils.errors import UserError
from npeff.utils.types import Array

LIFTABLE_METHODS = ("npeff", "gnpeff", "clusters", "svd-gradients")
"""Decomposition methods whose components are directions in parameter space."""
LEVELS = 64
"""Sizes of prefix that `truncate` tries for each vector."""


@dataclass
class RowSums:
    """J vectors of the sketch and the weights that make them of a run's rows as they are stored."""

    vectors: torch.Tensor
    """The sums, float32 [J, p]."""
    weights: dict[str, torch.Tensor]
    """Kind of rows (fisher, gradient) → float32 [J, rows of that kind]."""

    def take(self, which: Sequence[int]) -> RowSums:
        """Some of the vectors."""
        return RowSums(self.vectors[which], {kind: weights[which] for kind, weights in self.weights.items()})


def check_component(decomposition: Decomposition, number: int) -> None:
    """Refuse a component that does not exist or that no example uses.

    Args:
        decomposition: A decomposition.
        number: The component.

    Raises:
        UserError: There is no such component, or it is zero.
    """
    count = len(decomposition.components)
    if not 0 <= number < count:
        raise UserError(f"There is no component {number}: the decomposition has 0 to {count - 1}.")
    used = bool((fitted_coefficients(decomposition)[:, number] != 0).any())
    if not used or float(decomposition.components[number].norm()) == 0:
        raise UserError(f"Component {number} is dead: no example uses it, so it has no direction. Choose another.")


def check_method(decomposition: Decomposition) -> None:
    """Refuse methods that know nothing of parameters.

    Args:
        decomposition: A decomposition.

    Raises:
        UserError: Its components are no directions of parameters.
    """
    if decomposition.config.method not in LIFTABLE_METHODS:
        raise UserError(
            f"Components of {decomposition.config.method} are directions of activations, not of parameters. "
            f"Perturb one of {', '.join(LIFTABLE_METHODS)}."
        )


def fitted_coefficients(decomposition: Decomposition) -> torch.Tensor:
    """Coefficients of the examples that components are made of.

    Args:
        decomposition: A decomposition.

    Returns:
        The coefficients, zero for held-out examples, [m, C].
    """
    held_out = decomposition.notes.held_out
    if not held_out:
        return decomposition.coefficients
    coefficients = decomposition.coefficients.clone()
    coefficients[held_out] = 0
    return coefficients


def component_sums(decomposition: Decomposition, source: RowSource, mix: torch.Tensor) -> RowSums:
    """Mixtures of components as sums of rows.

    NPEFF: at a stationary point H = M⁻¹T with M = (WᵀW)∘(HHᵀ) and T_j = Σ_i W_ij (G_iᵀG_i) h_j, so the weight of row
    g in h_j is Σ_l (M⁻¹)_jl W_il ⟨g, h_l⟩. Away from one the sums are those of M⁻¹T, the solver's next H. Clusters: the
    mean of unit gradients. SVD: v_j = Σ_i (u_ij σ_j / σ_j²) g_i. Reads the rows twice.

    Args:
        decomposition: C components [C, p].
        source: The rows that they were fitted to.
        mix: What to make of the components, [J, C].

    Returns:
        The J mixtures and their weights; memory 4 · J · rows.
    """
    check_method(decomposition)
    H = decomposition.components.float()
    W = fitted_coefficients(decomposition)
    mix = (mix.double() @ _outer(decomposition.config.method, W, H)).float()
    blocks = Blocks(source, decomposition.config.chunk, torch.device("cpu"), shard=False)
    parts, vectors = [], torch.zeros(len(mix), source.dim, dtype=torch.float64)
    for block, rows in blocks:
        inner = _inner(decomposition.config.method, block, W[block.start : block.stop].T, H, rows)
        part = block.scaled(mix @ inner)
        vectors += (part @ rows).double()
        parts.append(part)
    return RowSums(vectors.float(), {decomposition.kind: torch.cat(parts, 1)})


def _outer(method: str, W: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    """What comes before the sum over examples, float64 [C, C]."""
    W = W.double()
    if method in ("npeff", "gnpeff"):
        return inverse((W.T @ W) * gram(H))
    sizes = W.square().sum(0) if method == "svd-gradients" else (W > 0).double().sum(0)
    return torch.diag(torch.where(sizes > 0, 1 / sizes, 0.0))


def _inner(method: str, block: Block, W: torch.Tensor, H: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Weight of each scaled row in each component before `_outer`, [C, rows]; W is the block's, [C, n]."""
    if method in ("npeff", "gnpeff"):
        return block.spread(W) * block.scaled(H @ rows.T)
    return block.spread(W if method == "svd-gradients" else (W > 0).float())


def truncate(
    sums: RowSums, sources: Mapping[str, RowSource], fidelity: float, chunk: int = 1024
) -> tuple[RowSums, list[int], list[float]]:
    """Keep the examples with the largest share in each vector, as few as reach a cosine of `fidelity` with it.

    Prefixes of `LEVELS` sizes are tried. Reads the rows twice; memory 4 · LEVELS · J · p.

    Args:
        sums: J vectors.
        sources: Kind of rows → the rows.
        fidelity: Cosine to reach.
        chunk: Examples to read at a time.

    Returns:
        The truncated sums, the number of examples left in each, and the cosines.
    """
    kinds = list(sums.weights)
    ranks = {kind: np.asarray(sources[kind].ranks, dtype=np.int64) for kind in kinds}
    owners = {kind: np.repeat(np.arange(len(ranks[kind])), ranks[kind]) for kind in kinds}
    sizes = example_sizes(sums, sources, chunk)
    J, m = sizes.shape
    used = (sizes > 0).sum(1)
    # level of each example: how far down the ranking by size it comes, in geometric steps
    place = np.empty((J, m), dtype=np.int64)
    np.put_along_axis(place, np.argsort(-sizes, axis=1, kind="stable"), np.arange(m)[None], axis=1)
    steps = np.unique(np.geomspace(1, m, LEVELS).round().astype(np.int64))
    levels = np.searchsorted(steps, place, side="right")
    buckets = torch.zeros(J, len(steps) + 1, sums.vectors.shape[1])
    for kind in kinds:
        for rows, first, last in _row_chunks(sources[kind], chunk):
            examples = owners[kind][first:last]
            for j in range(J):
                weighted = rows * sums.weights[kind][j, first:last, None]
                buckets[j].index_add_(0, torch.from_numpy(levels[j, examples]), weighted)
    partial = buckets.cumsum(1)
    cosines = torch.nn.functional.cosine_similarity(partial, sums.vectors[:, None], dim=2)
    vectors, kept, reached = sums.vectors.clone(), [], []
    weights = {kind: values.clone() for kind, values in sums.weights.items()}
    for j in range(J):
        good = (cosines[j] >= fidelity).nonzero().view(-1)
        level = int(good[0]) if len(good) else len(steps)
        keep = levels[j] <= level
        for kind in kinds:
            weights[kind][j][torch.from_numpy(~keep[owners[kind]])] = 0
        vectors[j] = partial[j, level]
        kept.append(int(min(keep.sum(), used[j])))
        reached.append(float(cosines[j, level]))
    return RowSums(vectors, weights), kept, reached


def example_sizes(sums: RowSums, sources: Mapping[str, RowSource], chunk: int = 1024) -> Array:
    """How much each example contributes to each vector: √Σ_k (weight · ‖row k‖)².

    Args:
        sums: J vectors.
        sources: Kind of rows → the rows.
        chunk: Examples to read at a time.

    Returns:
        The sizes, [J, m].
    """
    J = len(sums.vectors)
    squares = np.zeros((J, len(next(iter(sources.values())).ranks)))
    for kind, weights in sums.weights.items():
        owner = np.repeat(np.arange(squares.shape[1]), sources[kind].ranks)
        for rows, first, last in _row_chunks(sources[kind], chunk):
            values = (weights[:, first:last].double().square() * rows.double().square().sum(1)).numpy()
            for j in range(J):
                np.add.at(squares[j], owner[first:last], values[j])
    return np.sqrt(squares)


def _row_chunks(source: RowSource, examples: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Rows of a source, those of a few examples at a time, with the places of the first and behind the last."""
    ends = np.concatenate([[0], np.cumsum(source.ranks)])
    for start in range(0, len(source.ranks), examples):
        stop = min(start + examples, len(source.ranks))
        yield source.read(start, stop), int(ends[start]), int(ends[stop])
