"""The default sketch: a sum of Kronecker products.

    y = Σ_l Σ_c A_lc G_l B_lcᵀ            A: side × d_out, B: side × columns, entries ±1

A module's gradient is G_l = Σ_t δ_t x_tᵀ, so y is made of A δ_t and B x_t alone: small matrix products whose cost per
token grows with d and not with d². The side of the inputs is computed once and shared by all rows of an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.base import Captured, RoutedExperts, Sketch, random_signs
from npeff.models.experts import grouped
from npeff.models.select import CapturedModule
from npeff.utils.random import random_bits

PART = 128
"""Side of the part that estimates inner products at a quarter of the cost or less."""


class KronSketch(Sketch):
    """Two-sided random signs with `copies` independent copies.

    The matrix of sums is side × side; where that has more than p entries, each is added with a random sign to one of p
    places. A side of 2√p and one copy is cheaper than four copies with a side of √p and as accurate
    (docs/performance.md).
    """

    def __init__(self, config: SketchConfig, modules: Iterable[CapturedModule], device: torch.device | str = "cpu"):
        super().__init__(config, modules, device)
        self.copies = config.copies
        self.side = config.side or 2 * (math.isqrt(config.dim - 1) + 1)
        # A power of two is exact in every precision and keeps the sums near one; `finish` sets the scale right.
        self._entry = 2.0 ** -round(math.log2(math.sqrt(self.side)))
        self._scale = 1 / (self._entry**2 * self.side * math.sqrt(self.copies))
        self._matrices: dict[tuple[str, str, torch.dtype], torch.Tensor] = {}
        self._folding = self._fold() if self.side**2 != self.dim else None

    def part(self, vectors: torch.Tensor) -> tuple[Sketch, torch.Tensor]:
        smaller = KronPart(self, min(PART, self.side))
        cells = self._cells(vectors.to(self.device, torch.float32))[:, : smaller.side, : smaller.side]
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
        """Aᵀ or Bᵀ of a module, copies beside each other: [d, copies · side]."""
        key = (module.name, side, dtype)
        if key not in self._matrices:
            count = module.shape[side == "in"] * self.side
            keys = [("kron", self.config.sketch_seed, module.name, side, copy) for copy in range(self.copies)]
            copies = [random_signs(count, *key).view(-1, self.side) for key in keys]
            self._matrices[key] = torch.cat(copies, 1).to(self.device, dtype).mul_(self._entry)
        return self._matrices[key]

    def _matrices_of(self, experts: RoutedExperts, side: str, dtype: torch.dtype) -> torch.Tensor:
        """`_matrix` of all experts of a layer, [experts, d, copies · side]; each one's own becomes a view of it."""
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
        x = x.to(self.device)  # a model may lie on several
        if isinstance(module, RoutedExperts):
            return module.by_example(self._fold_routed(module, x))
        matrix = self._matrix(module, "in", x.dtype)
        if not module.weight:
            return matrix.expand(*x.shape[:-1], -1)
        if module.bias:
            flat = torch.addmm(matrix[-1], x.reshape(-1, x.shape[-1]), matrix[:-1])
            return flat.view(*x.shape[:-1], -1)
        return x @ matrix

    def _fold_routed(self, experts: RoutedExperts, x: torch.Tensor) -> torch.Tensor:
        """`fold_input` of lines [S, d_in] that are sorted by expert."""
        matrices, each = self._matrices_of(experts, "in", x.dtype), experts.experts[0]
        bias = experts.routing.lines(matrices[:, -1]) if each.bias else None
        if not each.weight:
            assert bias is not None
            return bias
        folded = grouped(x, matrices[:, : x.shape[1]], experts.routing)
        return folded if bias is None else folded + bias

    def accumulator(self, batch: int) -> torch.Tensor:
        return torch.zeros(batch, self.side, self.side, device=self.device)

    def accumulate(self, module: Captured, delta: torch.Tensor, folded: torch.Tensor, total: torch.Tensor) -> None:
        batch, delta = len(folded), delta.to(self.device)
        if isinstance(module, RoutedExperts):
            matrices = self._matrices_of(module, "out", delta.dtype)
            left = module.by_example(grouped(delta, matrices, module.routing))
        else:
            left = delta @ self._matrix(module, "out", delta.dtype)
        left = left.reshape(batch, -1, self.side)
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
        """Aᵀ or Bᵀ of every copy, float32 [copies, d, side]."""
        return self._matrix(module, side, torch.float32).view(-1, self.copies, self.side).transpose(0, 1)

    def rmatvec_module(self, module: CapturedModule, y: torch.Tensor) -> torch.Tensor:
        (cells,) = self._cells(y.to(self.device, torch.float32)[None] * self._scale)
        left, right = self._by_copy(module, "out"), self._by_copy(module, "in")
        return torch.bmm(left @ cells, right.mT).sum(0)


class KronPart(KronSketch):
    """Some of the sums of another such map: of its first copy those of the first rows and columns."""

    def __init__(self, whole: KronSketch, side: int) -> None:
        config = replace(whole.config, dim=side**2, side=side, copies=1)
        super().__init__(config, whole.modules.values(), whole.device)
        self._whole, self._entry = whole, whole._entry
        self._scale = 1 / (self._entry**2 * side)

    def _matrix(self, module: CapturedModule, side: str, dtype: torch.dtype) -> torch.Tensor:
        key = (module.name, side, dtype)
        if key not in self._matrices:
            self._matrices[key] = self._whole._matrix(module, side, dtype)[:, : self.side].contiguous()
        return self._matrices[key]
