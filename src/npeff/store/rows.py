"""What a decomposition reads: rows of examples, from memory or from the shards of a run, or some of them.

A shard is what was collected about a block of examples, in one safetensors file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from npeff.store.layout import SHARDS
from npeff.utils import Array, Record, UserError, out_of_memory


class RowSource(Protocol):
    """m examples, example i with ranks[i] rows (0 for one set aside) of `dim` numbers."""

    @property
    def dim(self) -> int:
        """Length p of a row."""

    @property
    def ranks(self) -> Array:
        """Rows per example, int64, shape [m]."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the examples start..stop-1 one after another, float32 on the CPU, shape [sum of ranks, p]."""


class ArrayRows:
    """Rows held in memory."""

    def __init__(self, rows: torch.Tensor, ranks: Sequence[int] | Array | None = None) -> None:
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

    def __init__(self, source: RowSource, chosen: Array) -> None:
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
        parts = [torch.empty(0, self.dim)]
        while len(wanted):  # a stretch of the source that is no longer than the number of examples asked for
            stretch, wanted = np.split(wanted, np.searchsorted(wanted, [wanted[0] + stop - start]))
            first, last = int(stretch[0]), int(stretch[-1]) + 1
            keep = np.isin(np.arange(first, last), stretch).repeat(self._all_ranks[first:last])
            parts.append(self._source.read(first, last)[torch.from_numpy(keep)])
        return torch.cat(parts)


def hold_out(examples: int, share: float) -> tuple[Array, Array]:
    """Numbers of the held-in and of the held-out examples, each ascending; the same for every seed and method."""
    shuffled = np.random.default_rng([0, 1]).permutation(examples)
    count = round(share * examples)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


class Shard(Record):
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
        self.dim = 0
        if len(ranks):
            with _opened(whole(shards[0])) as handle:
                self.dim = (handle.get_slice(tensor).get_shape() or [0])[-1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows of some examples.

        Args:
            start: Number of the first example.
            stop: Number behind the last one.

        Returns:
            Their rows one after another, float32, [sum of ranks, p].
        """
        shards = self.shards[start // self._size : -(-stop // self._size)]
        parts = [self._read(shard, max(start, shard.start), min(stop, shard.stop)) for shard in shards]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.dim)

    def _read(self, shard: Shard, start: int, stop: int) -> torch.Tensor:
        """Rows of some examples of a shard; refused if it does not have the rows which the example table promises."""
        ranks = self.ranks[shard.start : shard.stop]
        every = self.tensor != "rows"  # one for every example, also for those set aside
        ends = np.concatenate([[0], np.cumsum(np.ones_like(ranks) if every else ranks)]).tolist()
        path = self._whole(shard)
        with _opened(path) as handle:
            stored = handle.get_slice(self.tensor)
            shape, expected = stored.get_shape(), [ends[-1], self.dim]
            if shape != expected:
                raise UserError(f"{path} is not a shard of this run: {self.tensor} has shape {shape}, not {expected}.")
            rows: torch.Tensor = stored[ends[start - shard.start] : ends[stop - shard.start]].float()
        return rows[torch.from_numpy(self.ranks[start:stop] > 0)] if every else rows


def read_tensors(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Named tensors of a shard."""
    with _opened(path) as handle:
        return {name: handle.get_tensor(name) for name in names}


def tensor_names(path: Path) -> list[str]:
    """Names of a shard's tensors."""
    with _opened(path) as handle:
        return list(handle.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A shard's file; what is wrong with it is a UserError."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        if out_of_memory(error):
            raise
        raise UserError(f"Cannot read {path}: {error}. `npeff verify` repairs damaged shards.") from error
