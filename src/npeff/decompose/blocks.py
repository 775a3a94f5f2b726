"""Rows of a store in blocks: this rank's share, read a chunk at a time, scaled to PEFs of unit Frobenius norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from npeff.store.rows import RowSource
from npeff.utils import distributed
from npeff.utils.errors import UserError

# Rows whose scale leaves this range are scaled before they meet a matrix product: float32 would overflow inside it.
SAFE_SCALE = (1e-12, 1e12)


@dataclass
class Block:
    """The examples start..stop-1 and what turns their rows into PEFs of unit norm."""

    start: int
    stop: int
    ranks: np.ndarray
    """Rows per example, int64 [n]."""
    owner: torch.Tensor | None
    """Example of each row, counted from `start`, int64 [rows]; None if every example has one row."""
    scale: torch.Tensor | None
    """Factor of each row, float32 [rows]; None if the rows come scaled."""
    norms: torch.Tensor
    """Squared Frobenius norm of each scaled PEF: 1, or 0 for a zero PEF, float32 [n]."""

    @property
    def examples(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> int:
        return int(self.ranks.sum())

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply `values` [C, rows] by the factor of each row, in place."""
        return values if self.scale is None else values.mul_(self.scale)

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [C, rows] over the rows of each example: [C, n]."""
        if self.owner is None:
            return values
        return values.new_zeros(len(values), self.examples).index_add_(1, self.owner, values)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat `values` [C, n] for each row of an example: [C, rows]."""
        return values if self.owner is None else values.index_select(1, self.owner)


class Blocks:
    """The examples of a source that belong to this rank, in blocks of about `chunk` rows.

    Memory: two blocks of rows (one is read ahead while the other is used), or all rows of this rank if they fit in
    `keep_bytes`; 8 bytes a row besides.
    """

    def __init__(
        self, source: RowSource, chunk: int, device: torch.device, keep_bytes: float = 0.0, shard: bool = True
    ) -> None:
        self.source, self.device = source, device
        self.dim = source.dim
        ranks = np.asarray(source.ranks, dtype=np.int64)
        self.total_examples = len(ranks)
        ends = np.concatenate([[0], np.cumsum(ranks)])
        first, last = share(ends, distributed.rank(), distributed.world_size()) if shard else (0, len(ranks))
        self.first, self.last = first, last
        self.rows = int(ends[last] - ends[first])
        self.blocks = [_block(a, b, ranks[a:b], device) for a, b in chunks(ends, first, last, chunk)]
        self._kept: list[torch.Tensor] | None = [] if 4.0 * self.rows * self.dim <= keep_bytes else None
        self._scale_on_read = False
        self._measure(shard)

    def _measure(self, shard: bool) -> None:
        """One read of everything: find the scales, and refuse numbers that are not finite."""
        problem, nonzero = "", 0.0
        # Made once for all blocks: what is kept of each, between its large passing buffers, would tear the heap apart.
        all_norms = torch.empty(self.last - self.first, device=self.device)
        all_scales = torch.empty(self.rows, device=self.device)
        row = 0
        for block in self.blocks:
            rows = self.source.read(block.start, block.stop)
            if not _all_finite(rows):
                problem = f"Example {_first_bad(rows, block)} has rows with numbers that are not finite"
                break
            norms, scale = unit_scale(rows, block.ranks)
            block.norms = all_norms[block.start - self.first : block.stop - self.first].copy_(norms > 0)
            block.scale = all_scales[row : row + len(scale)].copy_(scale)
            row += len(scale)
            nonzero += float(block.norms.sum())
            used = scale[scale > 0]
            if len(used) and not (SAFE_SCALE[0] < float(used.min()) and float(used.max()) < SAFE_SCALE[1]):
                self._scale_on_read = True
            if self._kept is not None:
                self._kept.append((rows * scale[:, None]).float().to(self.device))
        found = [text for text in (distributed.everyone_has(problem) if shard else [problem]) if text]
        if found:
            raise UserError(f"{found[0]}; collect it again, or set it aside.")
        total = torch.tensor([nonzero], dtype=torch.float64)
        self.nonzero = int((distributed.sum_over_ranks(total) if shard else total).item())
        if self._kept is not None or self._scale_on_read:
            for block in self.blocks:
                block.scale = None

    def __iter__(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Every block with its rows, float32 [rows, p]; times `block.scale` they are PEF rows of unit norm."""
        if self._kept is not None:
            yield from zip(self.blocks, self._kept, strict=True)
            return
        with ThreadPoolExecutor(max_workers=1) as reader:
            waiting = reader.submit(self._read, self.blocks[0]) if self.blocks else None
            for number, block in enumerate(self.blocks):
                assert waiting is not None
                rows = waiting.result()
                if number + 1 < len(self.blocks):
                    waiting = reader.submit(self._read, self.blocks[number + 1])
                yield block, rows

    def _read(self, block: Block) -> torch.Tensor:
        rows = self.source.read(block.start, block.stop)
        if self._scale_on_read:
            rows = (rows * unit_scale(rows, block.ranks)[1][:, None]).float()
        return rows.to(self.device)

    def kept_rows(self) -> list[torch.Tensor] | None:
        """The scaled rows of every block if they are held in memory."""
        return self._kept

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor [m, ...] over the examples of all ranks, from this rank's `parts` [n, ...], one per block."""
        shape = parts[0].shape[1:] if parts else torch.Size()
        shape = max(distributed.everyone_has(shape), key=len)  # a rank may have no examples
        whole = torch.zeros(self.total_examples, *shape)
        for block, part in zip(self.blocks, parts, strict=True):
            whole[block.start : block.stop] = part.to("cpu", torch.float32)
        return distributed.sum_over_ranks(whole)


def share(ends: np.ndarray, rank: int, ranks: int) -> tuple[int, int]:
    """The examples first..last-1 of one rank: whole examples, in order, with about the same number of rows each.

    `ends` [m + 1] counts the rows before each example.
    """
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], ranks + 1), side="left")
    cuts[0], cuts[-1] = 0, len(ends) - 1
    return int(cuts[rank]), int(cuts[rank + 1])


def chunks(ends: np.ndarray, first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of examples with at most `rows` rows and `rows` examples each (at least one example)."""
    while first < last:
        stop = int(np.searchsorted(ends, ends[first] + rows, side="right")) - 1
        stop = min(max(stop, first + 1), last, first + rows)
        yield first, stop
        first = stop


def _block(start: int, stop: int, ranks: np.ndarray, device: torch.device) -> Block:
    single = bool((ranks == 1).all())
    owner = None if single else torch.from_numpy(np.repeat(np.arange(len(ranks)), ranks)).to(device)
    return Block(start, stop, ranks, owner, None, torch.ones(len(ranks), device=device))


def unit_scale(rows: torch.Tensor, ranks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms ‖GᵢᵀGᵢ‖ [n], and the factor of each row [rows] that brings them to 1 (0 for a zero PEF), both float64."""
    norms = pef_norms(rows, ranks)
    factors = torch.where(norms > 0, norms.rsqrt(), 0.0)
    return norms, torch.repeat_interleave(factors, torch.from_numpy(ranks))


def pef_norms(rows: torch.Tensor, ranks: np.ndarray) -> torch.Tensor:
    """Frobenius norm ‖GᵢᵀGᵢ‖ of each example, float64 [n]; `rows` [sum of ranks, p] may have any finite size."""
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


def leading_directions(rows: torch.Tensor, ranks: np.ndarray) -> torch.Tensor:
    """Unit leading right singular vector of every example that has one, float32 [n', p]."""
    directions = []
    for G in torch.split(rows, ranks.tolist()):
        size = G.abs().max() if len(G) else 0.0
        if size > 0:
            G = G / size
            vector = G[0] if len(G) == 1 else torch.linalg.eigh((G @ G.T).double())[1][:, -1].float() @ G
            directions.append(vector / vector.norm())
    return torch.stack(directions) if directions else rows.new_zeros(0, rows.shape[1])


def _all_finite(rows: torch.Tensor) -> bool:
    """Whether every number is; from the extremes, which need no buffer as large as the rows."""
    return not rows.numel() or bool(torch.stack(torch.aminmax(rows)).isfinite().all())


def _first_bad(rows: torch.Tensor, block: Block) -> int:
    bad_row = int((~torch.isfinite(rows)).any(dim=1).nonzero()[0])
    return block.start + int(np.searchsorted(np.cumsum(block.ranks), bad_row, side="right"))
