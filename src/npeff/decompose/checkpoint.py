"""What a solver did, pass by pass, and where it stands, on disk.

Every rank writes its own coefficients, the first rank seals the checkpoint.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from npeff.utils import Record, UserError, distributed, from_dict, to_dict
from npeff.utils.files import disk_errors, read_object, remove_partials, sha256, whole_file, write_json
from npeff.utils.progress import progress
from npeff.utils.report import Column, Table, draw_figure

WINDOW = 10
"""Passes over which progress is judged."""


class Step(Record):
    """One pass."""

    number: int
    """Which pass, counted from 0: the start."""
    loss: float
    """Mean loss per example that is not zero."""
    improvement: float
    """Share by which this pass lowered the loss."""
    step: float = 1.0
    """Step length."""
    stage: str = ""
    """Stage of the solver `paper`, "frozen" or "joint"; empty for others."""
    seconds: float = 0.0
    """Time since the solver started."""


@dataclass
class History:
    """The passes of a fit, and how it ended. Checkpoints hold it as JSON."""

    steps: list[Step] = field(default_factory=list)
    """All passes so far."""
    ending: str = "unfinished"
    """"converged", "out of passes", "all steps taken", "exact" or "unfinished"."""
    reseeded: int = 0
    """Components that died and were started again."""

    def __post_init__(self) -> None:
        self._started = time.perf_counter() - (self.steps[-1].seconds if self.steps else 0.0)
        self._bar: tqdm[Any] | None = None

    def add(self, loss: float, step: float = 1.0, stage: str = "") -> None:
        """Add a pass, and show it if a progress bar is open.

        Args:
            loss: Mean loss per example after the pass.
            step: Length of the step that it took.
            stage: Stage of the solver that it belongs to.
        """
        before = self.steps[-1].loss if self.steps else loss
        improvement = (before - loss) / before if before > 0 else 0.0
        seconds = time.perf_counter() - self._started
        self.steps.append(Step(len(self.steps), loss, improvement, step, stage, seconds))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.5f}, improved {improvement:.1e}", refresh=False)
            self._bar.update()

    @contextmanager
    def shown(self, title: str, total: int, done: int, quiet: bool) -> Iterator[None]:
        """Show the passes that are added inside as a progress bar, on the first rank.

        Args:
            title: What the bar is called.
            total: Number of passes if it does not end early.
            done: How many of them are done already.
            quiet: Show nothing.

        Yields:
            Nothing.
        """
        active = not quiet and distributed.rank() == 0
        with progress(desc=title, unit="pass", total=total, initial=done, active=active) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def settled(self, tolerance: float, since: int = 0) -> bool:
        """True if the last ten passes, all after pass `since`, lowered the loss by less than `tolerance` of it."""
        if len(self.steps) - since <= WINDOW:
            return False
        before, now = self.steps[-1 - WINDOW].loss, self.steps[-1].loss
        return before - now <= tolerance * before

    @property
    def loss(self) -> float:
        """The last loss; NaN if there is none."""
        return self.steps[-1].loss if self.steps else float("nan")

    def verdict(self, tolerance: float) -> str:
        """How the fit ended.

        Args:
            tolerance: The tolerance of the fit.

        Returns:
            Sentences for the user.
        """
        if not self.steps:
            return "Nothing was fitted."
        first, last, passes = self.steps[0], self.steps[-1], len(self.steps) - 1
        if self.ending == "exact":
            return f"The loss per example is {last.loss:.4f}. The solution is exact."
        text = f"The loss per example went from {first.loss:.4f} to {last.loss:.4f} in {passes} passes. "
        if self.ending == "all steps taken":
            text += "All steps were taken."
        elif self.ending == "converged" and passes < WINDOW:
            text += "Converged: another pass would change nothing."
        elif self.ending == "converged":
            text += f"Converged: the last {WINDOW} passes improved it by at most {tolerance:.2g} of its value."
        else:
            recent = self.steps[max(0, passes - WINDOW)].loss
            share = (recent - last.loss) / recent if recent > 0 else 0.0
            text += f"Not converged: the last passes still improved it by {share:.2g}; allow more passes."
        if self.reseeded:
            text += f" {self.reseeded} components had died and were started again from badly explained examples."
        return text

    def write_csv(self, path: Path) -> None:
        """Write a table with a row for each pass."""
        columns = [Column(item.name) for item in fields(Step)]
        Table("Passes of a fit", columns, [astuple(step) for step in self.steps]).write_csv(path)

    def plot(self, path: Path) -> None:
        """Draw the loss over the passes, as `path`.png and `path`.svg."""
        draw_figure(path, _draw, self.steps)


def _draw(axes: Any, steps: list[Step]) -> None:
    for stage in dict.fromkeys(step.stage for step in steps):
        part = [step for step in steps if step.stage == stage]
        axes.plot([step.number for step in part], [step.loss for step in part], label=stage or None)
    axes.set(xlabel="pass", ylabel="loss per example")
    if len({step.stage for step in steps}) > 1:
        axes.legend()


@dataclass
class State:
    """What a checkpoint holds besides tensors; solvers add what they need."""

    history: History = field(default_factory=History)


Kind = TypeVar("Kind")


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

    def load(self, kind: type[Kind]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Kind] | None:
        """Read the last checkpoint. A damaged one is named and not used: the fit begins again.

        Args:
            kind: Class of the state that was saved.

        Returns:
            W of all examples [m, C], the shared tensors and the state; None if there is nothing to continue.
        """
        if not (self.directory / "state.json").exists():
            return None
        try:
            values = read_object(self.directory / "state.json", sealed=True)
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
