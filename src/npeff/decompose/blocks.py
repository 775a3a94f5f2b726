"""Rows of a store in blocks: this rank's share, read a chunk at a time, scaled to PEFs of unit Frobenius norm.

PEF is short for per-example Fisher: GᵢᵀGᵢ for the rows Gᵢ of example i.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from npeff.store.rows import ArrayRows, RowSource
from npeff.utils import UserError, distributed

# Rows whose scale leaves this range are scaled before they meet a matrix product: float32 would overflow inside it.
SAFE_SCALE = (1e-12, 1e12)

MOST_ROWS = 4096
"""Most rows for a `Rotation`: its factor costs rows³/3."""
SAMPLE = 4
"""k-means++ looks at this many examples per component, not at all: it would cost a pass over the rows per component."""
_RIDGE = 1e-6
"""Added to the diagonal in a `Rotation`: rows may depend on each other."""


@dataclass
class Block:
    """The examples start..stop-1 and what turns their rows into PEFs of unit norm."""

    start: int
    """First example."""
    stop: int
    """Example behind the last one."""
    ranks: np.ndarray
    """Rows per example, int64 [n]."""
    owner: Tensor | None
    """Example of each row, counted from `start`, int64 [rows]; None if every example has one row."""
    norms: Tensor
    """Squared Frobenius norm of each scaled PEF: 1, or 0 for a zero PEF, float32 [n]."""
    scale: Tensor | None = None
    """Factor of each row, float32 [rows]; None if the rows come scaled."""

    @property
    def examples(self) -> int:
        """Number n of examples."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.ranks.sum())

    def scaled(self, values: Tensor) -> Tensor:
        """Multiply `values` [C, rows] by the factor of each row, in place."""
        return values if self.scale is None else values.mul_(self.scale)

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sum `values` [C, rows] over the rows of each example: [C, n]."""
        if self.owner is None:
            return values
        return values.new_zeros(len(values), self.examples).index_add_(1, self.owner, values)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat `values` [C, n] for each row of an example: [C, rows]."""
        return values if self.owner is None else values.index_select(1, self.owner)

    def scaled_rows(self, rows: Tensor) -> Tensor:
        """The rows [rows, p] times their factors; not in place."""
        return rows if self.scale is None else rows * self.scale[:, None]

    def one_row_each(self, rows: Tensor) -> Tensor:
        """Scaled rows of examples that have one row or none, [n, p]; zero where there is none."""
        scaled = self.scaled_rows(rows)
        if self.owner is None:
            return scaled
        return rows.new_zeros(self.examples, rows.shape[1]).index_copy_(0, self.owner, scaled)


class Blocks:
    """The examples of a source that belong to this rank, in blocks of about `chunk` rows.

    Iterating gives every block with its rows, float32 [rows, p]; times `block.scale` they are PEF rows of unit norm.
    Entries that are not finite are refused. Memory: two blocks of rows (one is read ahead while the other is used), or
    all rows of this rank if they fit in `keep_bytes`; 8 bytes a row besides.

    Args:
        source: Where the rows are.
        chunk: Most rows and most examples of a block (an example is never split).
        device: Where the rows are needed.
        keep_bytes: Memory that may be used to keep all rows.
        shard: Whether each rank has a share of the examples, or all have all of them.
    """

    def __init__(
        self, source: RowSource, chunk: int, device: torch.device, keep_bytes: float = 0.0, shard: bool = True
    ) -> None:
        self.source, self.device, self.dim = source, device, source.dim
        ranks = np.asarray(source.ranks, dtype=np.int64)
        self.total_examples = len(ranks)
        ends = np.concatenate([[0], np.cumsum(ranks)])
        first, last = share(ends, distributed.rank(), distributed.world_size()) if shard else (0, len(ranks))
        ranges = list(chunks(ends, first, last, chunk))
        # Made once for all blocks: what is kept of each, between its large passing buffers, would tear the heap apart.
        norms = torch.split(torch.empty(last - first, device=device), [stop - start for start, stop in ranges])
        self.blocks = [
            Block(start, stop, ranks[start:stop], _owner(ranks[start:stop], device), part)
            for (start, stop), part in zip(ranges, norms, strict=True)
        ]
        rows = int(ends[last] - ends[first])
        self._kept: list[Tensor] | None = [] if 4.0 * rows * self.dim <= keep_bytes else None
        self._scale_on_read = False
        self._measure(torch.empty(rows, device=device), shard)

    def _measure(self, scales: Tensor, shard: bool) -> None:
        """One read of everything: find the scales, and refuse entries that are not finite."""
        problem, nonzero = "", 0
        rooms = torch.split(scales, [block.rows for block in self.blocks])
        for block, room in zip(self.blocks, rooms, strict=True):
            rows = self.source.read(block.start, block.stop)
            norms, scale = unit_scale(rows, block.ranks)
            if not bool(norms.isfinite().all()):  # then some entry is not either
                first_bad = block.start + int((~norms.isfinite()).nonzero()[0])
                problem = f"Example {first_bad} has entries that are not finite"
                break
            block.norms.copy_(norms > 0)
            block.scale = room.copy_(scale)
            nonzero += int((norms > 0).sum())
            used = scale[scale > 0]
            if len(used) and not (SAFE_SCALE[0] < float(used.min()) and float(used.max()) < SAFE_SCALE[1]):
                self._scale_on_read = True
            if self._kept is not None:
                self._kept.append((rows * scale[:, None]).float().to(self.device))
        everyone = distributed.everyone_has((problem, nonzero)) if shard else [(problem, nonzero)]
        for problem, _ in everyone:
            if problem:
                raise UserError(f"{problem}; collect it again, or set it aside.")
        self.nonzero = sum(count for _, count in everyone)
        if self._kept is not None or self._scale_on_read:
            for block in self.blocks:
                block.scale = None

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        if self._kept is not None:
            yield from zip(self.blocks, self._kept, strict=True)
            return
        with ThreadPoolExecutor(max_workers=1) as reader:
            waiting = [reader.submit(self._read, block) for block in self.blocks[:1]]
            for number, block in enumerate(self.blocks, start=1):
                rows = waiting.pop().result()
                waiting += [reader.submit(self._read, following) for following in self.blocks[number : number + 1]]
                yield block, rows

    def _read(self, block: Block) -> Tensor:
        rows = self.source.read(block.start, block.stop)
        if self._scale_on_read:
            rows = (rows * unit_scale(rows, block.ranks)[1][:, None]).float()
        return rows.to(self.device)

    def all_rows(self) -> Tensor:
        """The scaled rows of all blocks, [rows, p]; they must have been kept."""
        assert self._kept is not None
        return self._kept[0] if len(self._kept) == 1 else torch.cat(self._kept)

    def gather(self, parts: Iterable[tuple[Tensor, Tensor]], components: int) -> tuple[Tensor, Tensor]:
        """Put together what all ranks have computed of their examples.

        Args:
            parts: For each block of this rank coefficients [n, C] and residuals [n].
            components: Their number C.

        Returns:
            Coefficients [m, C] and residuals [m] of all examples, float32 on the CPU, on every rank.
        """
        coefficients, residuals = torch.zeros(self.total_examples, components), torch.zeros(self.total_examples)
        for block, (part, losses) in zip(self.blocks, parts, strict=True):
            coefficients[block.start : block.stop], residuals[block.start : block.stop] = part, losses
        return distributed.sum_over_ranks(coefficients), distributed.sum_over_ranks(residuals)


class Rotation:
    """Short rows for long ones, where there are fewer rows than entries in a row: passes get cheaper, nothing is lost.

    With the Cholesky factor GGᵀ = LLᵀ the rows of L have the inner products of the rows of G, and every solver step
    from components in the span of the rows stays in it. So G may be replaced by L, and components h of L belong to
    hL⁻¹G. Every rank holds all rows and the same factor.

    Args:
        source: The long rows.
        chunk: Rows read at a time.
        device: Where to compute.
    """

    def __init__(self, source: RowSource, chunk: int, device: torch.device) -> None:
        blocks = Blocks(source, chunk, device, keep_bytes=float("inf"), shard=False)
        self._rows = blocks.all_rows()
        K = (self._rows @ self._rows.T).double()
        self._factor = cholesky(K, _RIDGE * max(float(K.diagonal().mean()), _RIDGE))
        self.source = ArrayRows(self._factor.float().cpu(), np.asarray(source.ranks))
        # a zero row has to stay zero, whatever was added to the diagonal
        self.source.rows[(self._rows == 0).all(dim=1).cpu()] = 0

    def lift(self, H: Tensor) -> Tensor:
        """Components [C, p] of the long rows from components [C, rows] of the short ones."""
        weights = torch.linalg.solve_triangular(self._factor, H.to(self._factor), upper=False, left=False)
        return weights.float() @ self._rows

    @staticmethod
    def pays(source: RowSource, memory_bytes: float) -> bool:
        """True if the rows are few enough and fit in memory."""
        rows = int(np.sum(source.ranks))
        return 0 < rows <= min(MOST_ROWS, source.dim // 2) and 4.0 * rows * source.dim <= memory_bytes


def cholesky(M: Tensor, ridge: float) -> Tensor:
    """Cholesky factor of a symmetric matrix with a ridge.

    Args:
        M: The matrix; its diagonal is changed.
        ridge: Added to the diagonal; ten times as much again, and so on, if rounding needs it.

    Returns:
        The factor, lower triangular.

    Raises:
        ArithmeticError: No ridge is enough, because the matrix is not finite.
    """
    for power in range(9):
        M.diagonal().add_(ridge * 10**power)
        factor, failed = torch.linalg.cholesky_ex(M)
        if not int(failed):
            return factor
    raise ArithmeticError("a system of linear equations is not finite")


def share(ends: np.ndarray, rank: int, ranks: int) -> tuple[int, int]:
    """The examples of one rank: whole examples, in order, with about the same number of rows on each rank.

    Args:
        ends: Number of rows before each example, and of all rows, [m + 1].
        rank: Which rank.
        ranks: Number of ranks.

    Returns:
        The first example, and the one behind the last.
    """
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], ranks + 1), side="left")
    cuts[0], cuts[-1] = 0, len(ends) - 1
    return int(cuts[rank]), int(cuts[rank + 1])


def chunks(ends: np.ndarray, first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of examples with at most `rows` rows and `rows` examples each (at least one example).

    Args:
        ends: Number of rows before each example, and of all rows, [m + 1].
        first: First example.
        last: Example behind the last one.
        rows: Most rows of a range.

    Yields:
        The first example of a range, and the one behind its last.
    """
    while first < last:
        stop = int(np.searchsorted(ends, ends[first] + rows, side="right")) - 1
        stop = min(max(stop, first + 1), last, first + rows)
        yield first, stop
        first = stop


def _owner(ranks: np.ndarray, device: torch.device) -> Tensor | None:
    return None if (ranks == 1).all() else torch.repeat_interleave(torch.from_numpy(ranks)).to(device)


def unit_scale(rows: Tensor, ranks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Norms ‖GᵢᵀGᵢ‖ [n], and the factor of each row [rows] that brings them to 1 (0 for a zero PEF), both float64."""
    norms = pef_norms(rows, ranks)
    factors = torch.where(norms > 0, norms.rsqrt(), 0.0)
    return norms, torch.repeat_interleave(factors, torch.from_numpy(ranks))


def pef_norms(rows: Tensor, ranks: np.ndarray) -> Tensor:
    """Frobenius norm ‖GᵢᵀGᵢ‖ of each example.

    Args:
        rows: Rows one example after another, [sum of ranks, p], of any finite size.
        ranks: Rows per example, [n].

    Returns:
        Norms, float64 [n].
    """
    if (ranks == 1).all():
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    norms = torch.zeros(len(ranks), dtype=torch.float64)
    starts = np.cumsum(ranks) - ranks
    for rank in np.unique(ranks[ranks > 0]):
        which = np.flatnonzero(ranks == rank)
        picked = torch.from_numpy((starts[which, None] + np.arange(rank)).ravel())
        # float32 products would overflow for rows beyond 1e19, so the size is taken out first
        G = rows[picked].view(len(which), int(rank), -1)
        size = G.abs().amax(dim=(1, 2), keepdim=True)
        G = G / torch.where(size > 0, size, 1.0)
        gram = torch.bmm(G, G.transpose(1, 2)).double()
        norms[torch.from_numpy(which)] = gram.flatten(1).norm(dim=1) * size.view(-1).double().square()
    return norms


def leading_direction(source: RowSource, example: int) -> Tensor:
    """Unit leading right singular vector of an example.

    Args:
        source: The rows.
        example: Which example.

    Returns:
        The vector, float32 [1, p]; [0, p] of an example that is zero.
    """
    G = source.read(example, example + 1)
    size = G.abs().max() if len(G) else 0.0
    if size == 0:
        return G[:0]
    G = G / size
    vector = G[0] if len(G) == 1 else torch.linalg.eigh((G @ G.T).double())[1][:, -1].float() @ G
    return (vector / vector.norm())[None]


def start_components(source: RowSource, components: int, init: str, seed: int, signed: bool = False) -> Tensor:
    """Leading directions of some examples; every rank finds the same ones. Memory: 4C rows, their (4C)² products.

    Args:
        source: The rows.
        components: Number C of components.
        init: `kmeans++` draws examples one after another, each with probability proportional to its squared distance
            from those drawn before; `random` draws all with the same probability.
        seed: Seed of the draws.
        signed: Whether the distance is that of the vectors, or that of the matrices hhᵀ, in which h and −h are equal.

    Returns:
        Unit vectors, float32 [C, p].
    """
    generator = torch.Generator().manual_seed(seed)
    filled = np.flatnonzero(np.asarray(source.ranks) > 0)
    order = filled[torch.randperm(len(filled), generator=generator).numpy()]
    wanted = components if init == "random" else SAMPLE * components
    directions = torch.empty(0, source.dim)
    while len(directions) < components and len(order):  # zero PEFs have no direction; look further
        some, order = np.sort(order[:wanted]), order[wanted:]
        directions = torch.cat([directions, *(leading_direction(source, int(i)) for i in some)])
    if init == "random":
        return directions[torch.randperm(len(directions), generator=generator)[:components]]
    return directions[spread_out(directions, components, generator, signed)]


def spread_out(vectors: Tensor, count: int, generator: torch.Generator, signed: bool = False) -> Tensor:
    """Draw vectors as k-means++ does.

    Args:
        vectors: Unit vectors, [n, p].
        count: How many to draw.
        generator: Source of randomness.
        signed: As for `start_components`.

    Returns:
        Indices of the drawn ones, int64 [count].
    """
    similarity = vectors @ vectors.T
    distance = (1 - (similarity if signed else similarity.square())).clamp_(min=0)
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    nearest = distance[chosen[0]].double()
    while len(chosen) < count:
        nearest[chosen] = 0
        if float(nearest.sum()) == 0:  # only copies of chosen ones are left
            nearest = torch.ones_like(nearest)
            nearest[chosen] = 0
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
        nearest = torch.minimum(nearest, distance[chosen[-1]].double())
    return torch.tensor(chosen)


def worst_examples(losses: Tensor, start: int, count: int) -> list[tuple[float, int]]:
    """Pairs (loss, example) of the examples with the largest `losses` [n], of which the first is example `start`."""
    values, which = losses.topk(min(count, len(losses)))
    return list(zip(values.tolist(), (which + start).tolist(), strict=True))


def replacements(source: RowSource, losses: list[tuple[float, int]], most: int, count: int) -> Tensor:
    """Directions of badly explained examples that differ from each other; every rank finds the same ones.

    Args:
        source: The rows.
        losses: Pairs (loss, example) of this rank.
        most: How many examples to look at, of all ranks.
        count: Most directions.

    Returns:
        Unit vectors, float32 [n, p].
    """
    directions = torch.empty(0, source.dim)
    for _, example in sorted(chain(*distributed.everyone_has(losses)), reverse=True)[:most]:
        direction = leading_direction(source, example)
        if len(direction) and not bool(((directions @ direction[0]).square() > 0.9).any()):
            directions = torch.cat([directions, direction])
        if len(directions) == count:
            break
    return directions
