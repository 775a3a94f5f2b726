"""Where a solver stands, on disk. Every rank writes its own coefficients, the first rank seals the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from npeff import distributed
from npeff.files import disk_errors, read_json, remove_partials, whole_file, write_json


@dataclass
class Checkpoint:
    """A directory for checkpoints of one fit; `key` names the fit, another key's checkpoint is not taken up."""

    directory: Path
    key: str

    def save(
        self, number: int, W: Sequence[torch.Tensor], shared: dict[str, torch.Tensor], state: dict[str, Any]
    ) -> None:
        """Keep coefficients of this rank's examples (parts [n, C]), what all ranks share, and plain JSON values."""
        rank, world = distributed.rank(), distributed.world_size()
        tensors = {f"W{i:06d}": part for i, part in enumerate(W)} | (shared if rank == 0 else {})
        with whole_file(self._part(number, rank)) as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        distributed.barrier()  # the seal says that every part is there
        if rank == 0:
            write_json(self.directory / "state.json", {"key": self.key, "number": number, "world": world, **state})
            for old in self.directory.glob("pass-*.safetensors"):
                if not old.name.startswith(f"pass-{number:06d}-"):
                    old.unlink(missing_ok=True)
            remove_partials(self.directory)

    def load(self) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]] | None:
        """W of all examples [m, C], the shared tensors and the state; None if there is nothing to continue."""
        seal = self.directory / "state.json"
        if not seal.exists():
            return None
        state = read_json(seal)
        if state["key"] != self.key:
            return None
        parts = [load_file(self._part(state["number"], rank)) for rank in range(state["world"])]
        blocks = [part.pop(name) for part in parts for name in sorted(part) if name.startswith("W")]
        return torch.cat(blocks) if blocks else torch.empty(0), parts[0], state

    def clear(self) -> None:
        """Remove it; the fit is finished and saved."""
        distributed.barrier()
        if distributed.rank() == 0 and self.directory.exists():
            with disk_errors(self.directory):
                shutil.rmtree(self.directory)

    def _part(self, number: int, rank: int) -> Path:
        return self.directory / f"pass-{number:06d}-{rank}.safetensors"
