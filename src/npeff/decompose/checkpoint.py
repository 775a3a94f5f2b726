"""Where a solver stands, on disk. Every rank writes its own coefficients, the first rank seals the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from npeff.utils import distributed
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import (
    SEAL,
    disk_errors,
    parse_json,
    remove_partials,
    sha256,
    whole_file,
    without_seal,
    write_json,
)

State = TypeVar("State")


@dataclass
class Checkpoint:
    """A directory for checkpoints of one fit."""

    directory: Path
    key: str
    """Names the fit: a checkpoint with another key is not continued."""

    def save(self, number: int, W: Sequence[torch.Tensor], shared: dict[str, torch.Tensor], state: Any) -> None:
        """Write a checkpoint, and remove older ones.

        Args:
            number: Pass that it was made after.
            W: Coefficients of this rank's examples, in parts [n, C].
            shared: Tensors that are the same on all ranks.
            state: A dataclass with all else, written as JSON.
        """
        rank = distributed.rank()
        tensors = {f"W{i:06d}": part for i, part in enumerate(W)} | (shared if rank == 0 else {})
        with whole_file(self._part(number, rank)) as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        hashes = distributed.everyone_has(sha256(self._part(number, rank)))  # the seal says that every part is there
        if rank == 0:
            seal = {"key": self.key, "number": number, "parts": hashes, **to_dict(state)}
            write_json(self.directory / "state.json", seal, sealed=True)
            self._remove_others(number)

    def load(self, kind: type[State]) -> tuple[torch.Tensor, dict[str, torch.Tensor], State] | None:
        """Read the last checkpoint. A damaged one is named and not used: the fit begins again.

        Args:
            kind: Class of the state that was saved.

        Returns:
            W of all examples [m, C], the shared tensors and the state; None if there is nothing to continue.
        """
        if not (self.directory / "state.json").exists():
            return None
        try:
            values = self._unsealed()
            key, number, hashes = (values.pop(name) for name in ("key", "number", "parts"))
            if key != self.key:
                return None
            parts = [self._read(number, rank, digest) for rank, digest in enumerate(hashes)]
            first, state = parts[0], from_dict(kind, values)
        except (UserError, SafetensorError, KeyError, TypeError, IndexError, ValueError) as error:
            if distributed.rank() == 0:
                print(f"The checkpoint in {self.directory} is damaged, so the fit begins again ({error})")
            return None
        if distributed.rank() == 0:  # a writer may have been killed before it came to this
            self._remove_others(number)
        blocks = [part.pop(name) for part in parts for name in sorted(part) if name.startswith("W")]
        return torch.cat(blocks) if blocks else torch.empty(0), first, state

    def _unsealed(self) -> dict[str, Any]:
        values = parse_json(self.directory / "state.json")
        if SEAL not in values:
            raise UserError(f"{self.directory / 'state.json'} has no seal.")
        return dict(without_seal(self.directory / "state.json", values))

    def _read(self, number: int, rank: int, digest: str) -> dict[str, torch.Tensor]:
        path = self._part(number, rank)
        if not path.is_file() or sha256(path) != digest:
            raise UserError(f"{path} is missing or has changed.")
        return load_file(path)

    def _remove_others(self, number: int) -> None:
        """Remove the parts of other passes."""
        for old in self.directory.glob("pass-*.safetensors"):
            if not old.name.startswith(f"pass-{number:06d}-"):
                old.unlink(missing_ok=True)
        remove_partials(self.directory)

    def clear(self) -> None:
        """Remove it; the fit is finished and saved."""
        distributed.barrier()
        if distributed.rank() == 0 and self.directory.exists():
            with disk_errors(self.directory):
                shutil.rmtree(self.directory)

    def _part(self, number: int, rank: int) -> Path:
        return self.directory / f"pass-{number:06d}-{rank}.safetensors"
