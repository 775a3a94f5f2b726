"""Shards: what was collected about a block of examples, in one safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from npeff.store.layout import SHARDS
from npeff.utils.errors import UserError, out_of_memory
from npeff.utils.types import Array


@dataclass(frozen=True)
class Shard:
    """A block of examples start..stop-1."""

    number: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return f"{SHARDS}/{self.number:05d}.safetensors"

    @property
    def record(self) -> str:
        return f"{SHARDS}/{self.number:05d}.json"


class StoredRows:
    """A RowSource over a run's shards; nothing is held in memory."""

    def __init__(self, shards: Sequence[Shard], whole: Callable[[Shard], Path], tensor: str, ranks: Array) -> None:
        """Rows of all shards.

        Args:
            shards: All of them, equally long but for the last.
            whole: Gives the file of a shard, after a check that it is what was written.
            tensor: Name of the tensor that holds the rows.
            ranks: Rows per example, int64 [m].
        """
        self.shards, self.tensor, self.ranks = shards, tensor, ranks
        self._whole = whole
        self._size = shards[0].stop - shards[0].start if shards else 1
        self._fitting: set[int] = set()
        self.dim = int(self._shape(shards[0])[1]) if len(ranks) else 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of some examples.

        Args:
            start: Number of the first example.
            stop: Number behind the last one.

        Returns:
            Their rows one after another, float32, [sum of ranks, p].
        """
        parts = []
        for shard in self.shards[start // self._size : -(-stop // self._size)]:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if self.tensor == "rows":
                ends = np.concatenate([[0], np.cumsum(self.ranks[shard.start : last])])
                parts.append(self._read(shard, int(ends[first - shard.start]), int(ends[-1])).float())
            else:  # one for every example, also for those set aside
                every = self._read(shard, first - shard.start, last - shard.start).float()
                parts.append(every[torch.from_numpy(self.ranks[first:last] > 0)])
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.dim)

    def _read(self, shard: Shard, first: int, last: int) -> torch.Tensor:
        path = self._whole(shard)
        if shard.number not in self._fitting:
            self._check_shape(shard, path)
        with _shard_errors(path), safe_open(path, framework="pt") as handle:
            return handle.get_slice(self.tensor)[first:last]

    def _shape(self, shard: Shard) -> list[int]:
        path = self._whole(shard)
        with _shard_errors(path), safe_open(path, framework="pt") as handle:
            shape: list[int] = handle.get_slice(self.tensor).get_shape()
        if len(shape) != 2:
            raise UserError(f"{path} is not a shard of this run: {self.tensor} has shape {shape}.")
        return shape

    def _check_shape(self, shard: Shard, path: Path) -> None:
        """Refuse a shard, of a run from elsewhere, that does not have the rows which the example table promises."""
        ranks = self.ranks[shard.start : shard.stop]
        expected = [int(ranks.sum()) if self.tensor == "rows" else len(ranks), self.dim]
        shape = self._shape(shard)
        if shape != expected:
            raise UserError(f"{path} is not a shard of this run: {self.tensor} has shape {shape}, not {expected}.")
        self._fitting.add(shard.number)


def read_tensors(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Named tensors of a shard."""
    with _shard_errors(path), safe_open(path, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in names}


def tensor_names(path: Path) -> list[str]:
    """Names of a shard's tensors."""
    with _shard_errors(path), safe_open(path, framework="pt") as handle:
        return list(handle.keys())


class _shard_errors:  # noqa: N801 - reads as a block
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SafetensorError | OSError) and not out_of_memory(error):
            raise UserError(f"Cannot read {self.path}: {error}. `npeff verify` repairs damaged shards.") from error
