"""What a solver did, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from npeff.utils import distributed
from npeff.utils.progress import progress
from npeff.utils.report import Column, Table, draw_figure

WINDOW = 10
"""Passes over which progress is judged."""


@dataclass(frozen=True)
class Step:
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
