"""Some of the examples of a source, as a source: for held-out examples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from npeff.store.rows import RowSource


class SubsetRows:
    """The examples `chosen` (ascending) of a source; reads no more rows at a time than it is asked for."""

    def __init__(self, source: RowSource, chosen: np.ndarray) -> None:
        self._source, self._chosen = source, np.asarray(chosen, dtype=np.int64)
        self._all_ranks = np.asarray(source.ranks, dtype=np.int64)
        self.ranks = self._all_ranks[self._chosen]
        self.dim = source.dim

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the examples start..stop-1 of the subset, float32, [sum of ranks, p]."""
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
