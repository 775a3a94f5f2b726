"""The default sketch: a sum of Kronecker products.

    y = Σ_l Σ_c A_lc G_l B_lcᵀ            A: side × d_out, B: side × columns, entries ±1

A module's gradient is G_l = Σ_t δ_t x_tᵀ, so y is made of A δ_t and B x_t alone: small matrix products whose cost per
token grows with d and not with d². The side of the inputs is computed once and shared by all rows of an example.

In `kron` A and B are full. In `blocks` they are block-diagonal behind a random order of their columns, which is the
same for all modules as wide: each of 8 groups of as many columns meets an eighth of the rows. Inner products have the
same variance, if over the order as well, for an eighth of the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.base import Captured, RoutedExperts, Sketch, random_signs, with_bias
from npeff.models.experts import grouped
from npeff.models.select import CapturedModule
from npeff.utils.random import random_bits

PART = 128
"""Side of the part that estimates inner products at a quarter of the cost or less."""
BLOCKS = 8
"""Blocks on the diagonal of A and B."""


class KronSketch(Sketch):
    """Two-sided random signs with `copies` independent copies.

    The matrix of sums is side × side; where that has more than p entries, each is added with a random sign to one of p
    places. A side of 2√p and one copy is cheaper than four copies with a side of √p and as accurate
    (docs/performance.md).
    """

    def __init__(self, config: SketchConfig, modules: Iterable[CapturedModule], device: torch.device | str = "cpu"):
        super().__init__(config, modules, device)
        self.copies = config.copies
        self.blocks = BLOCKS if config.sketch == "blocks" else 1
        side = config.side or 2 * (math.isqrt(config.dim - 1) + 1)
        self.side = side + -side % self.blocks
        self.width = self.side // self.blocks
        """Rows of a block, which is how many sums a column adds to."""
        # A power of two is exact in every precision and keeps the sums near one; `finish` sets the scale right.
        self._entry = 2.0 ** -round(math.log2(math.sqrt(self.width)))
        self._scale = 1 / (self._entry**2 * self.width * math.sqrt(self.copies))
        self._matrices: dict[tuple[str, str, torch.dtype], torch.Tensor] = {}
        self._orders: dict[int, torch.Tensor] = {}
        self._folding = self._fold() if self.side**2 != self.dim else None

    def part(self, vectors: torch.Tensor) -> tuple[Sketch, torch.Tensor]:
        smaller = KronPart(self, min(PART, self.side))
        # the first rows of every block, so that the part sees all columns
        some = torch.arange(self.side).view(self.blocks, -1)[:, : smaller.width].flatten()
        cells = self._cells(vectors.to(self.device, torch.float32))[:, some][:, :, some]
        share = smaller.dim / (self.side**2 * self.copies)
        return smaller, cells.reshape(len(vectors), -1) * (self._scale / smaller._scale / share)

    def _cells(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors [n, p] as what each of the side × side sums weighs in them, [n, side, side]."""
        if self._folding is None:
            return vectors.view(-1, self.side, self.side)
        cells = vectors.new_zeros(len(vectors), self.side**2)
        for place, sign in zip(*self._folding, strict=True):
            cells.index_add_(1, place, vectors * sign)
        return cells.view(-1, self.side, self.side)

    def _fold(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each of the p places, which of the side² sums go there, and their signs; unused slots have sign 0."""
        cells = self.side**2
        keys = random_bits(8 * cells, "kron fold", self.config.sketch_seed).view("<u8")
        places = torch.from_numpy(keys.argsort(kind="stable"))
        signs = random_signs(cells, "kron fold signs", self.config.sketch_seed).float()
        unused = (0, -cells % self.dim)
        places, signs = (F.pad(part, unused).view(-1, self.dim).to(self.device) for part in (places, signs))
        return places, signs

    def _matrix(self, module: CapturedModule, side: str, dtype: torch.dtype) -> torch.Tensor:
        """Aᵀ or Bᵀ of a module, copies beside each other, without what is zero: [d, copies · width].

        Its lines are in the order of `_order`, one block after another, with some for padding.
        """
        key = (module.name, side, dtype)
        if key not in self._matrices:
            lines = module.shape[side == "in"]
            lines += -lines % self.blocks
            name = self.config.sketch
            keys = [(name, self.config.sketch_seed, module.name, side, copy) for copy in range(self.copies)]
            copies = [random_signs(lines * self.width, *key).view(-1, self.width) for key in keys]
            self._matrices[key] = torch.cat(copies, 1).to(self.device, dtype).mul_(self._entry)
        return self._matrices[key]

    def _order(self, width: int) -> torch.Tensor:
        """For every copy, in which order the columns of A or B of this width go into blocks, [copies, padded width]."""
        if width not in self._orders:
            padded = width + -width % self.blocks
            keys = [("blocks order", self.config.sketch_seed, width, copy) for copy in range(self.copies)]
            orders = [random_bits(8 * padded, *key).view("<u8").argsort(kind="stable") for key in keys]
            self._orders[width] = torch.from_numpy(np.stack(orders)).to(self.device)
        return self._orders[width]

    def _matrices_of(self, experts: RoutedExperts, side: str, dtype: torch.dtype) -> torch.Tensor:
        """`_matrix` of all experts of a layer, [experts, d, copies · width]; each one's own becomes a view of it."""
        key = (experts.name, side, dtype)
        if key not in self._matrices:
            whole = torch.stack([self._matrix(module, side, dtype) for module in experts.experts])
            self._matrices[key] = whole
            self._matrices |= {(module.name, side, dtype): whole[i] for i, module in enumerate(experts.experts)}
        return self._matrices[key]

    def fold_input(self, module: Captured, x: torch.Tensor) -> torch.Tensor:
        """B x_t of all copies.

        Args:
            module: The module, or the experts of a layer.
            x: Its inputs, [B, T, d_in]; those of experts, [S, d_in].

        Returns:
            [B, T, copies · side].
        """
        each = module.experts[0] if isinstance(module, RoutedExperts) else module
        return self._project(module, "in", with_bias(each, x.to(self.device)))  # a model may lie on several

    def _project(self, module: Captured, side: str, lines: torch.Tensor) -> torch.Tensor:
        """A or B of all copies times each of `lines` [B, T, d], or [S, d] of experts: [B, T, copies · side]."""
        if isinstance(module, RoutedExperts):
            matrix = self._matrices_of(module, side, lines.dtype)
        else:
            matrix = self._matrix(module, side, lines.dtype)
        flat = lines.reshape(-1, lines.shape[-1])
        sums = flat.new_empty(len(flat), self.copies, self.blocks, self.width)
        missing = -flat.shape[1] % self.blocks
        padded = F.pad(flat, (0, missing)) if missing else flat
        for copy in range(self.copies):
            ordered = padded.index_select(1, self._order(flat.shape[1])[copy]) if self.blocks > 1 else padded
            parts = ordered.view(len(flat), self.blocks, -1).transpose(0, 1)
            own = matrix[..., copy * self.width : (copy + 1) * self.width]
            own = own.view(*matrix.shape[:-2], self.blocks, -1, self.width)
            if isinstance(module, RoutedExperts):
                for block, part in enumerate(parts):
                    sums[:, copy, block] = grouped(part, own[:, block], module.routing)
            else:
                torch.bmm(parts, own, out=sums[:, copy].transpose(0, 1))
        sums = sums.view(len(flat), -1)
        return module.by_example(sums) if isinstance(module, RoutedExperts) else sums.view(*lines.shape[:-1], -1)

    def accumulator(self, batch: int) -> torch.Tensor:
        return torch.zeros(batch, self.side, self.side, device=self.device)

    def accumulate(self, module: Captured, delta: torch.Tensor, folded: torch.Tensor, total: torch.Tensor) -> None:
        batch = len(folded)
        left = self._project(module, "out", delta.to(self.device)).reshape(batch, -1, self.side)
        right = folded.reshape(batch, -1, self.side)
        # sums over tokens are taken in float32 whatever the model's precision: half of it could overflow
        total.baddbmm_(left.float().mT, right.float())

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        flat = total.reshape(len(total), -1)
        if self._folding is not None:
            folded = flat.new_zeros(len(flat), self.dim)
            for place, sign in zip(*self._folding, strict=True):
                folded += flat[:, place] * sign
            flat = folded
        return flat * self._scale

    def add(self, module: CapturedModule, gradient: torch.Tensor, total: torch.Tensor) -> None:
        left, right = self._by_copy(module, "out"), self._by_copy(module, "in")
        for example, matrix in zip(total, gradient, strict=True):
            example += (left.mT @ matrix @ right).sum(0)

    def _by_copy(self, module: CapturedModule, side: str) -> torch.Tensor:
        """Aᵀ or Bᵀ of every copy, zeros too, float32 [copies, d, side]."""
        matrix = self._matrix(module, side, torch.float32).view(-1, self.copies, self.width).transpose(0, 1)
        if self.blocks == 1:
            return matrix
        lines, width = matrix.shape[1], module.shape[side == "in"]
        whole = matrix.new_zeros(self.copies, lines, self.blocks, self.width)
        turn = torch.arange(lines, device=self.device)
        for copy, order in enumerate(self._order(width)):
            whole[copy, order, turn // (lines // self.blocks)] = matrix[copy]
        return whole.view(self.copies, lines, self.side)[:, :width]

    def rmatvec_module(self, module: CapturedModule, y: torch.Tensor) -> torch.Tensor:
        (cells,) = self._cells(y.to(self.device, torch.float32)[None] * self._scale)
        left, right = self._by_copy(module, "out"), self._by_copy(module, "in")
        return torch.bmm(left @ cells, right.mT).sum(0)


class KronPart(KronSketch):
    """Some of the sums of another such map: of its first copy those of the first rows of A and of B, in each block."""

    def __init__(self, whole: KronSketch, side: int) -> None:
        config = replace(whole.config, dim=side**2, side=side, copies=1)
        super().__init__(config, whole.modules.values(), whole.device)
        self._whole, self._entry = whole, whole._entry
        self._scale = 1 / (self._entry**2 * self.width)

    def _matrix(self, module: CapturedModule, side: str, dtype: torch.dtype) -> torch.Tensor:
        key = (module.name, side, dtype)
        if key not in self._matrices:
            self._matrices[key] = self._whole._matrix(module, side, dtype)[:, : self.width].contiguous()
        return self._matrices[key]
