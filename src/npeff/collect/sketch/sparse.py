"""The paper's sparse random projection.

The parameters of a module, in the order of its flattened [d_out, columns] matrix, are cut into regions of s = p / 32.
Every projected coordinate takes one parameter of every region, with a random sign, and adds them up:

    y_j = 1/√32 Σ_r sign(r, j) g[r s + index(r, j)]

so each parameter goes to 32 coordinates on average. The matrix is never stored: index and sign come from a hash of
the region's two random words and j, made again at every use (or kept, where they fit a small budget).
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.base import Sketch
from npeff.models.select import CapturedModule
from npeff.utils.random import random_bits

USES = 32
"""How many coordinates a parameter goes to, on average."""
BLOCK_PICKS = 2**19
"""Picks made at once. The table that they point into then has 2^15 rows, so that they can be kept as int16."""
KEPT_BYTES = 2**28
"""Picks are kept from one product to the next where those of all modules fit here: 4 million parameters."""

# A Weyl step and the multipliers of "lowbias32" (hash-prospector, public domain).
STEP, FIRST, SECOND = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97


class Span(NamedTuple):
    """Consecutive regions of equal length: parameters [start, stop) of a module."""

    words: torch.Tensor
    """Two random words for every region: int32 [2, regions]."""
    start: int
    stop: int
    length: int
    weight: float
    """√(length / s), because a shorter region picks each of its entries more often: this keeps E‖y‖² = ‖g‖²."""

    @property
    def regions(self) -> int:
        return self.words.shape[1]


class SparseSketch(Sketch):
    """One signed entry of every region for every coordinate.

    Working memory in plain torch, whatever the size of the model: 16 bytes for each of the BLOCK_PICKS picks of a block
    (8 MB), and 4 (BLOCK_PICKS / 16 + 2p) bytes for each example of the batch (0.3 MB at p = 16384), besides the
    gradients of one module. A batch shares one making of the picks.
    """

    def __init__(self, config: SketchConfig, modules: Iterable[CapturedModule], device: torch.device | str = "cpu"):
        super().__init__(config, modules, device)
        self.region = config.dim // USES
        self._words = {module.name: self._make_words(module) for module in self.modules.values()}
        steps = np.arange(config.dim, dtype=np.uint32) * np.uint32(STEP)
        self._steps = torch.from_numpy(steps.view(np.int32)).to(self.device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._kept_type = torch.int16 if config.dim <= BLOCK_PICKS else torch.int32
        picks = sum(words.shape[1] for words in self._words.values()) * config.dim
        self._keep = picks * self._kept_type.itemsize <= KEPT_BYTES

    def _make_words(self, module: CapturedModule) -> torch.Tensor:
        """int32 [2, regions]: 64 random bits for each region. With 32, some regions of a large model would be alike."""
        regions = -(-module.size // self.region)
        bits = random_bits(8 * regions, "sparse", self.config.sketch_seed, module.name)
        words = bits.view("<i4").astype(np.int32).reshape(regions, 2)
        return torch.from_numpy(words.T.copy()).to(self.device)

    def _spans(self, module: CapturedModule, most: int) -> Iterator[Span]:
        """The module's regions, at most `most` at a time; a shorter last one comes alone."""
        words, length = self._words[module.name], self.region
        full, rest = divmod(module.size, length)
        for first in range(0, full, most):
            last = min(first + most, full)
            yield Span(words[:, first:last], first * length, last * length, length, 1.0)
        if rest:
            yield Span(words[:, full:], full * length, module.size, rest, math.sqrt(rest / length))

    def _blocks(self, module: CapturedModule) -> Iterator[tuple[Span, torch.Tensor]]:
        """Spans with their picks: int64 [p, regions], good until the next block is asked for.

        A pick is a place in a table [regions, 2, length] that holds -g of every region, then its +g.
        """
        for span in self._spans(module, max(1, BLOCK_PICKS // self.dim)):
            picks = self._buffer("picks", torch.int64, self.dim, span.regions)
            kept = self._kept.get((module.name, span.start))
            if kept is not None:
                picks.copy_(kept)
            else:
                mixed = self._buffer("mixed", torch.int32, self.dim, span.regions)
                spare = self._buffer("spare", torch.int32, self.dim, span.regions)
                draw_slots(self._steps, span.words, span.length, mixed, spare, picks)
                picks += torch.arange(span.regions, device=self.device) * (2 * span.length) + span.length
                if self._keep:
                    self._kept[module.name, span.start] = picks.to(self._kept_type)
            yield span, picks

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Memory that the next block uses again: fresh pages would cost as much as the arithmetic on them."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, device=self.device)
        return self._buffers[name][:size].view(shape)

    def accumulator(self, batch: int) -> torch.Tensor:
        return torch.zeros(self.dim, batch, device=self.device)

    def add(self, module: CapturedModule, gradient: torch.Tensor, total: torch.Tensor) -> None:
        batch = len(gradient)
        flat = gradient.reshape(batch, -1).T
        for span, picks in self._blocks(module):
            table = self._buffer("table", torch.float32, span.regions, 2, span.length, batch)
            torch.mul(flat[span.start : span.stop].view(span.regions, -1, batch), span.weight, out=table[:, 1])
            torch.neg(table[:, 1], out=table[:, 0])
            total += _sum_rows(table.view(-1, batch), picks)

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        return (total.T / math.sqrt(USES)).contiguous()

    def rmatvec_module(self, module: CapturedModule, y: torch.Tensor) -> torch.Tensor:
        y = y.to(self.device, torch.float32) / math.sqrt(USES)
        result = y.new_empty(module.size)
        for span, picks in self._blocks(module):
            table = self._buffer("table", torch.float32, span.regions, 2, span.length).zero_()
            table.view(-1).scatter_add_(0, picks.view(-1), y[:, None].expand_as(picks).reshape(-1))
            part = result[span.start : span.stop].view(span.regions, -1)
            torch.sub(table[:, 1], table[:, 0], out=part).mul_(span.weight)
        return result.view(module.shape)


def draw_slots(
    steps: torch.Tensor, words: torch.Tensor, length: int, mixed: torch.Tensor, spare: torch.Tensor, slots: torch.Tensor
) -> None:
    """What every coordinate takes of every region.

    A slot i ≥ 0 means +1 at entry i, a slot i < 0 means -1 at entry i + length. The 32-bit arithmetic wraps.

    Args:
        steps: STEP times the coordinate, int32 [p].
        words: Random words, int32 [2, regions].
        length: Entries of a region.
        mixed: To work in, int32 [p, regions].
        spare: To work in, int32 [p, regions].
        slots: Gets whole numbers in [-length, length), int64 [p, regions].
    """
    torch.add(steps[:, None], words[0], out=mixed)
    _xor_shift(mixed, 16, spare)
    mixed *= FIRST
    _xor_shift(mixed, 15, spare)
    mixed += words[1]
    mixed *= SECOND
    # The high half of a product with 2 · length: takes the well mixed high bits, and needs no power of two. That the
    # hash counts as signed puts half of the slots below zero.
    slots.copy_(mixed).mul_(2 * length).bitwise_right_shift_(32)


def _xor_shift(h: torch.Tensor, by: int, spare: torch.Tensor) -> None:
    """H ^= h >> by in place, with the zeros that an unsigned shift brings in."""
    torch.bitwise_right_shift(h, by, out=spare)
    h ^= spare.bitwise_and_((1 << (32 - by)) - 1)


def _sum_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of a table [N, B] that each line of `rows` [p, R] names: [p, B]."""
    if table.device.type == "mps":  # not every release has embedding_bag there
        return table[rows].sum(1)
    return F.embedding_bag(rows, table, mode="sum")  # never forms the [p, R, B] that it adds up
