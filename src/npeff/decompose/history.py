"""What a solver did, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from npeff.utils import distributed
from npeff.utils.files import whole_file, write_csv

WINDOW = 10
"""Passes over which progress is judged."""


@dataclass(frozen=True)
class Step:
    """One pass."""

    number: int
    loss: float
    """Mean loss per example that is not zero."""
    improvement: float
    """Share by which this pass lowered the loss."""
    step: float = 1.0
    """Step length."""
    stage: str = ""
    seconds: float = 0.0
    """Time since the solver started."""


@dataclass
class History:
    """The passes of a fit, and how it ended."""

    steps: list[Step] = field(default_factory=list)
    ending: str = "unfinished"
    """"converged", "out of passes", "all steps taken", "exact" or "unfinished"."""
    reseeded: int = 0
    """Components that died and were started again."""
    started: float = field(default_factory=time.perf_counter, repr=False)

    def add(self, loss: float, step: float = 1.0, stage: str = "") -> Step:
        before = self.steps[-1].loss if self.steps else loss
        improvement = (before - loss) / before if before > 0 else 0.0
        seconds = time.perf_counter() - self.started
        self.steps.append(Step(len(self.steps), loss, improvement, step, stage, seconds))
        return self.steps[-1]

    def settled(self, tolerance: float, since: int = 0) -> bool:
        """True if the last ten passes, all after pass `since`, lowered the loss by less than `tolerance` of it."""
        if len(self.steps) - since <= WINDOW:
            return False
        before, now = self.steps[-1 - WINDOW].loss, self.steps[-1].loss
        return before - now <= tolerance * before

    @property
    def loss(self) -> float:
        return self.steps[-1].loss if self.steps else float("nan")

    def verdict(self, tolerance: float) -> str:
        """The end of the fit in words."""
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

    def to_dict(self) -> dict[str, Any]:
        return {"steps": [asdict(step) for step in self.steps], "ending": self.ending, "reseeded": self.reseeded}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        steps = [Step(**step) for step in values["steps"]]
        spent = steps[-1].seconds if steps else 0.0
        return cls(steps, values["ending"], values["reseeded"], time.perf_counter() - spent)

    def write_csv(self, path: Path) -> None:
        names = [item.name for item in fields(Step)]
        write_csv(path, [names, *([getattr(step, name) for name in names] for step in self.steps)])

    def plot(self, path: Path) -> None:
        """Loss over passes, as a PNG (or what the name says)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        for stage in dict.fromkeys(step.stage for step in self.steps):
            part = [step for step in self.steps if step.stage == stage]
            axes.plot([step.number for step in part], [step.loss for step in part], label=stage or None)
        axes.set(xlabel="pass", ylabel="loss per example")
        if len({step.stage for step in self.steps}) > 1:
            axes.legend()
        with whole_file(path) as temporary:
            figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150)


class Progress:
    """A progress bar on the first rank; `quiet` ones do nothing."""

    def __init__(self, title: str, total: int, done: int = 0, quiet: bool = False) -> None:
        hidden = quiet or distributed.rank() > 0
        self._bar = tqdm(total=total, initial=done, desc=title, unit="pass", disable=hidden, leave=True)

    def show(self, step: Step) -> None:
        self._bar.set_postfix_str(f"loss {step.loss:.5f}, improved {step.improvement:.1e}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: Iterable[object]) -> None:
        self.close()
