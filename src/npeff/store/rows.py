"""What a decomposition reads: rows of examples, from memory or from a store larger than memory, or some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class SubsetRows:
    """The examples `chosen` (ascending) of a source; reads no more rows at a time than it is asked for."""

    def __init__(self, source: RowSource, chosen: np.ndarray) -> None:
        self._source, self._chosen = source, np.asarray(chosen, dtype=np.int64)
        self._all_ranks = np.asarray(source.ranks, dtype=np.int64)
        self.ranks = self._all_ranks[self._chosen]
        self.dim = source.dim

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of some examples of the subset.

        Args:
            start: Place of the first of them in the subset.
            stop: Place behind the last one.

        Returns:
            Their rows one after another, float32, [sum of ranks, p].
        """
        wanted = self._chosen[start:stop]
        parts = []
        for first, last in self._stretches(wanted):
            inside = wanted[(wanted >= first) & (wanted < last)] - first
            ranks = self._all_ranks[first:last]
            keep = np.zeros(len(ranks), dtype=bool)
            keep[inside] = True
            parts.append(self._source.read(first, last)[torch.from_numpy(np.repeat(keep, ranks))])
        return torch.cat(parts) if parts else torch.empty(0, self.dim)

    def _stretches(self, wanted: np.ndarray) -> Iterator[tuple[int, int]]:
        """Ranges of the source that hold the wanted examples, none longer than the number wanted."""
        position = 0
        while position < len(wanted):
            first = int(wanted[position])
            beyond = int(np.searchsorted(wanted, first + len(wanted), side="left"))
            yield first, int(wanted[beyond - 1]) + 1
            position = beyond


def hold_out(examples: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the held-in and of the held-out examples, drawn with `seed`, each ascending."""
    shuffled = np.random.default_rng([seed, 1]).permutation(examples)
    count = round(share * examples)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
