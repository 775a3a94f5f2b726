"""What a decomposition reads: rows of examples, from memory or from a store larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class RowSource(Protocol):
    """m examples, example i with ranks[i] rows (0 for one set aside) of `dim` numbers."""

    @property
    def dim(self) -> int:
        """Length p of a row."""

    @property
    def ranks(self) -> np.ndarray:
        """Rows per example, int64, shape [m]."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the examples start..stop-1 one after another, float32 on the CPU, shape [sum of ranks, p]."""


class ArrayRows:
    """Rows held in memory."""

    def __init__(self, rows: torch.Tensor, ranks: Sequence[int] | np.ndarray | None = None) -> None:
        """`rows` has shape [sum of ranks, p]; without `ranks` every example has one row."""
        self.rows = rows
        self.ranks = np.ones(len(rows), dtype=np.int64) if ranks is None else np.asarray(ranks, dtype=np.int64)
        self._ends = np.concatenate([[0], np.cumsum(self.ranks)])
        if self._ends[-1] != len(rows):
            raise ValueError(f"ranks sum to {self._ends[-1]} but there are {len(rows)} rows")

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[self._ends[start] : self._ends[stop]].float()
