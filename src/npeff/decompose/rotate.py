"""Fewer rows than numbers in a row: turn the space so that rows become short. Nothing is lost, and passes get cheaper.

With the Cholesky factor GGᵀ = LLᵀ the rows of L have the inner products of the rows of G, and every solver step from
components in the span of the rows stays in it. So G may be replaced by L, and components h of L belong to hL⁻¹G.
"""

from __future__ import annotations

import numpy as np
import torch

from npeff.decompose.blocks import Blocks
from npeff.store.rows import ArrayRows, RowSource

MOST_ROWS = 4096
"""The factor costs rows³/3; beyond this it does not pay."""
RIDGE = 1e-6
"""Added to the diagonal: rows may depend on each other."""


class Rotation:
    """Short rows for long ones. Every rank holds all rows and the same factor."""

    def __init__(self, source: RowSource, chunk: int, device: torch.device) -> None:
        blocks = Blocks(source, chunk, device, keep_bytes=float("inf"), shard=False)
        kept = blocks.kept_rows() or []
        self._rows = torch.cat(kept) if len(kept) != 1 else kept[0]
        K = (self._rows @ self._rows.T).double()
        for power in range(6):  # a unit ridge makes any Gram matrix of unit rows positive definite
            K.diagonal().add_(RIDGE * 10**power * max(float(K.diagonal().mean()), RIDGE))
            self._factor, failed = torch.linalg.cholesky_ex(K)
            if not int(failed):
                break
        self.source = ArrayRows(self._factor.float().cpu(), np.asarray(source.ranks))
        # a zero row has to stay zero, whatever was added to the diagonal
        self.source.rows[(self._rows == 0).all(dim=1).cpu()] = 0

    def lift(self, H: torch.Tensor) -> torch.Tensor:
        """Components [C, p] of the long rows from components [C, rows] of the short ones."""
        weights = torch.linalg.solve_triangular(self._factor, H.to(self._factor), upper=False, left=False)
        return weights.float() @ self._rows

    @staticmethod
    def pays(source: RowSource, memory_bytes: float) -> bool:
        """True if the rows are few enough and fit in memory."""
        rows = int(np.sum(source.ranks))
        return 0 < rows <= min(MOST_ROWS, source.dim // 2) and 4.0 * rows * source.dim <= memory_bytes
