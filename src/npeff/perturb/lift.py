"""From a component of the sketch back to the parameters: as a sum of a run's rows, and as the same sum of gradients.

A stored row is the sketch of v J / c, with v an output direction, J = ∂z/∂θ and c a norm. So Σ α · row is the sketch
of Σ (α/c) v J: a backward pass in which an example's output gradient is (α/c) v. Several vectors share the forward pass
and, where every example has one direction, the output gradients δ: each adds only Σ_t (α/c) δ_t x_tᵀ of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from npeff.collect.capture import Capture
from npeff.collect.directions import combine_to_predicted, make_directions, predicted, split_length
from npeff.collect.session import Prepared
from npeff.collect.sketch.base import Captured, by_matrix, with_bias
from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Block, Blocks
from npeff.decompose.config import LIFTABLE_METHODS
from npeff.decompose.solver import gram, inverse
from npeff.models.select import CapturedModule
from npeff.store.rows import RowSource, SubsetRows
from npeff.store.run import Run
from npeff.utils import Array, UserError

Parameters = dict[str, torch.Tensor]
"""A vector of parameter space: module name → float32 [d_out, columns]."""
LEVELS = 64
"""Sizes of prefix that `truncate` tries for each vector."""


# --- components as sums of rows -----------------------------------------------------------------------------


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


def group_sum(source: RowSource, examples: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction that a group of examples shares: the leading singular vector of their rows.

    It is the component that a decomposition of the group alone into one component would have.

    Args:
        source: Rows at unit norm.
        examples: The group, ascending.

    Returns:
        The vector, float32 [p], and the weights that make it of all rows of the source, float32 [rows].
    """
    rows = SubsetRows(source, examples).read(0, len(examples))
    left, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    weights = torch.zeros(int(source.ranks.sum()))
    weights[torch.from_numpy(np.isin(row_owners(source), examples))] = left[:, 0] / sizes[0]
    return right[0], weights


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
    owners = {kind: row_owners(sources[kind]) for kind in sums.weights}
    sizes = example_sizes(sums, sources, chunk)
    J, m = sizes.shape
    used = (sizes > 0).sum(1)
    # level of each example: how far down the ranking by size it comes, in geometric steps
    place = np.empty((J, m), dtype=np.int64)
    np.put_along_axis(place, np.argsort(-sizes, axis=1, kind="stable"), np.arange(m)[None], axis=1)
    steps = np.unique(np.geomspace(1, m, LEVELS).round().astype(np.int64))
    levels = np.searchsorted(steps, place, side="right")
    buckets = torch.zeros(J, len(steps) + 1, sums.vectors.shape[1])
    for kind, owner in owners.items():
        for rows, first, last in _row_chunks(sources[kind], chunk):
            for j in range(J):
                weighted = rows * sums.weights[kind][j, first:last, None]
                buckets[j].index_add_(0, torch.from_numpy(levels[j, owner[first:last]]), weighted)
    partial = buckets.cumsum(1)
    cosines = torch.nn.functional.cosine_similarity(partial, sums.vectors[:, None], dim=2)
    vectors, kept, reached = sums.vectors.clone(), [], []
    weights = {kind: values.clone() for kind, values in sums.weights.items()}
    for j in range(J):
        good = (cosines[j] >= fidelity).nonzero().view(-1)
        level = int(good[0]) if len(good) else len(steps)
        keep = levels[j] <= level
        for kind, owner in owners.items():
            weights[kind][j][torch.from_numpy(~keep[owner])] = 0
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
    squares = torch.zeros(len(sums.vectors), len(next(iter(sources.values())).ranks), dtype=torch.float64)
    for kind, weights in sums.weights.items():
        owner = torch.from_numpy(row_owners(sources[kind]))
        for rows, first, last in _row_chunks(sources[kind], chunk):
            values = weights[:, first:last].double().square() * rows.double().square().sum(1)
            squares.index_add_(1, owner[first:last], values)
    return squares.sqrt().numpy()


def row_owners(source: RowSource) -> Array:
    """Example of each row, [rows]."""
    return np.repeat(np.arange(len(source.ranks)), source.ranks)


def _row_chunks(source: RowSource, examples: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Rows of a source, those of a few examples at a time, with the places of the first and behind the last."""
    ends = np.concatenate([[0], np.cumsum(source.ranks)])
    for start in range(0, len(source.ranks), examples):
        stop = min(start + examples, len(source.ranks))
        yield source.read(start, stop), int(ends[start]), int(ends[stop])


# --- the same sums of gradients -----------------------------------------------------------------------------


class Lifter:
    """Lifts sums of a run's rows with the run's own model."""

    def __init__(self, run: Run, prepared: Prepared, prompts: Sequence[Sequence[int]]) -> None:
        self.run, self.prepared, self.prompts = run, prepared, prompts
        self._mixture = run.tensor("mixture") if run.has_tensor("mixture") else None
        self._sources = {kind: run.source(kind) for kind in run.manifest.collected}
        self._starts = {kind: np.cumsum(source.ranks) - source.ranks for kind, source in self._sources.items()}
        self._norms = {"fisher": run.table["pef_norm"].to_numpy() ** 0.5} if "fisher" in self._sources else {}
        if "gradient" in self._sources:
            self._norms["gradient"] = run.tensor("gradient_norm").numpy()

    def lift(self, sums: RowSums) -> list[Parameters]:
        """The vectors in parameter space.

        Args:
            sums: J vectors of the sketch, as sums of rows.

        Returns:
            J vectors; memory 4 · parameters · J, and 4 · J · tokens of a batch · d_out while it runs.
        """
        J = len(sums.vectors)
        modules, device = self.prepared.selection.modules, self.prepared.model.device
        totals = {module.name: torch.zeros(J, *module.shape, device=device) for module in modules}
        chosen = self.examples(sums)
        batches = self.prepared.collector.batches([self.prompts[i] for i in chosen], self.prepared.config.batch_tokens)
        with tqdm(total=len(chosen), unit="ex", desc=f"Lifting {J} components", disable=None) as bar:
            for batch in batches:
                self._add_batch(sums, [chosen[i] for i in batch], totals)
                bar.update(len(batch))
        return [{name: total[j] for name, total in totals.items()} for j in range(J)]

    def examples(self, sums: RowSums) -> list[int]:
        """Examples that carry weight in any of the sums.

        Args:
            sums: J vectors of the sketch, as sums of rows.

        Returns:
            Their numbers, ascending.
        """
        used = {kind: (weights != 0).any(0).numpy() for kind, weights in sums.weights.items()}
        carriers = [row_owners(self._sources[kind])[rows] for kind, rows in used.items()]
        return np.unique(np.concatenate(carriers)).tolist()

    def passes(self, sums: RowSums) -> int:
        """Forward passes of one example that lifting the sums takes about as long as."""
        J = len(sums.vectors)
        shared = set(sums.weights) == {"gradient"} or int(self._sources["fisher"].ranks.max()) == 1
        products = sum(len(self.examples(sums.take([j]))) for j in range(J))
        return len(self.examples(sums)) * (2 if shared else 1 + J) + products

    def _add_batch(self, sums: RowSums, examples: list[int], totals: dict[str, torch.Tensor]) -> None:
        """Add what a batch of examples brings to every vector: totals[module] is [J, d_out, columns]."""
        answer_model = self.prepared.collector.answer_model
        prompts = [self.prompts[i] for i in examples]
        with Capture(self.prepared.selection.modules, lambda module, x: x) as capture:
            capture.start(len(prompts), *answer_model.sequences(prompts))
            z, _ = answer_model.logits(prompts)
            V, mix = self._directions(sums, z.detach().double().softmax(1), examples)
            V, lengths = split_length(V)
            mix = mix * lengths
            rows = mix.any(0).any(0).nonzero().view(-1).tolist()
            for row in rows:
                shares = mix[:, :, row].to(z.device, torch.float32)

                def consumer(module: Captured, delta: torch.Tensor, x: torch.Tensor) -> None:
                    for each, outputs, inputs in by_matrix(module, delta, x):
                        total = totals[each.name]
                        _add_products(each, outputs, inputs, shares, total)  # noqa: B023 - used up in this turn

                capture.backward(z, V[:, row].float(), consumer, keep_graph=row != rows[-1])

    def _directions(self, sums: RowSums, p: torch.Tensor, examples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output directions V [B, q, r] and what each vector takes of them, mix [J, B, q]; float64.

        A pass costs 2 units, and each product of a vector in it 2 more. So q > 1 directions shared by J vectors would
        cost q (2 + 2 J); instead each vector has its own sum of directions, in a pass of its own: J (2 + 2).
        """
        J, B = len(sums.vectors), len(examples)
        V, mix = p.new_zeros(B, 0, p.shape[1]), p.new_zeros(J, B, 0)
        if "fisher" in sums.weights:
            V, _ = make_directions(self.prepared.config.directions, p, examples)
            if self.prepared.config.directions.rank is not None:  # rows were mixed after the sketch
                if self._mixture is None:
                    raise UserError(f"{self.run.path} has no record of how --rank mixed its rows. Collect it again.")
                V = self._mixture[examples][:, :, : V.shape[1]].to(V) @ V
            mix = p.new_zeros(J, B, V.shape[1])
            starts, ranks = self._starts["fisher"], self._sources["fisher"].ranks
            for b, i in enumerate(examples):
                rows = slice(starts[i], starts[i] + ranks[i])
                mix[:, b, : ranks[i]] = sums.weights["fisher"][:, rows].to(mix) / self._norms["fisher"][i]
        if "gradient" in sums.weights:
            norms = torch.from_numpy(self._norms["gradient"][examples]).to(mix)
            shares = sums.weights["gradient"][:, self._starts["gradient"][examples]].to(mix) / norms
            combined = combine_to_predicted(V, p) if V.shape[1] else None
            if combined is not None:
                mix = mix + shares[:, :, None] * combined
            else:
                V = torch.cat([V, predicted(p)[:, None]], 1)
                mix = torch.cat([mix, shares[:, :, None]], 2)
        if V.shape[1] > 1:
            V = torch.einsum("jbq,bqr->bjr", mix, V)
            carried = mix.any(2)
            mix = torch.eye(J, dtype=mix.dtype, device=mix.device)[:, None, :] * carried[:, :, None]
        return V, mix


def _add_products(
    module: CapturedModule, delta: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, total: torch.Tensor
) -> None:
    """Total [J, d_out, columns] += Σ_b shares_jb Σ_t δ_bt x_btᵀ; delta [B, T, d_out], x [B, T, d_in], shares [J, B]."""
    J, d_out, columns = total.shape
    inputs = with_bias(module, x).to(total.device, torch.float32)
    outputs = delta.to(total.device, torch.float32)
    if bool((shares != 0).all()):  # one large product is faster than J small ones
        weighted = (outputs[:, :, None] * shares.T[:, None, :, None]).reshape(-1, J * d_out)
        total.view(J * d_out, columns).addmm_(weighted.T, inputs.reshape(-1, columns))
        return
    for j, share in enumerate(shares):  # a vector takes only the examples that carry it
        carrying = share.nonzero().view(-1)
        if len(carrying):
            weighted = (outputs[carrying] * share[carrying, None, None]).reshape(-1, d_out)
            total[j].addmm_(weighted.T, inputs[carrying].reshape(-1, columns))


def norm(vector: Parameters) -> float:
    """Euclidean norm of a vector of parameter space."""
    return float(sum(float(part.double().square().sum()) for part in vector.values())) ** 0.5


def scale_to_unit(vector: Parameters) -> float:
    """Divide a vector by its norm in place, and return that norm; a zero vector stays."""
    length = norm(vector)
    for part in vector.values():
        part /= length or 1.0
    return length
