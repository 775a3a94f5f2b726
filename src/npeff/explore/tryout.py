"""Texts that a reader of the page types, through the run's own model.

The model is loaded at first use, in the background, and stays. One text is computed at a time: the hooks that capture
gradients belong to one pass.
"""

import heapq
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from npeff.analyse.probe import explain_texts
from npeff.collect.session import Prepared, prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.records import WeighedText
from npeff.explain.run import weigh_text
from npeff.explain.words import LeaveOut
from npeff.explore.pages import strongest
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.utils import Record, UserError, rounded

ANSWERS = 8
"""Most likely answers of each text that are listed."""


class ModelState(Record):
    """Whether the model is there."""

    state: Literal["not loaded", "loading", "ready", "failed"]
    """How far its loading has come."""
    message: str
    """Why it could not be loaded, if it failed."""


class Tried(Record):
    """What the model and the components make of n texts, side by side."""

    answers: list[str]
    """The most likely answers of any of the texts, the most likely first."""
    probabilities: list[list[float | None]]
    """Probability of each of them for each text; None where it is too small to be known."""
    components: list[int]
    """The components that matter to any of the texts, the strongest first."""
    coefficients: list[list[float]]
    """Coefficient of each of them in each text."""
    shares: list[list[float]] | None
    """How much of each text each of them explains; None for methods without such shares."""
    residual: list[float]
    """How much of each text no component explains."""
    set_aside: list[bool]
    """Whether a value of the text was not finite."""


class Tryout:
    """A run's model, and what it makes of new texts."""

    def __init__(self, run: Run, device: str | None = None) -> None:
        self.status = ModelState("not loaded", "")
        """Whether the model is there."""
        self.fields = [name.removeprefix(FIELD) for name in run.table.column_names if name.startswith(FIELD)]
        """Other columns that the run's prompt names."""
        self._run, self._device = run, device
        self._prepared: Prepared | None = None
        self._open: tuple[str, Decomposition] | None = None
        self._loading, self._computing = threading.Lock(), threading.Lock()

    def is_ready(self) -> bool:
        """Whether the model is there; if not, begin to load it, also after it has failed."""
        with self._loading:
            if self.status.state in ("not loaded", "failed"):
                self.status = ModelState("loading", "")
                threading.Thread(target=self._load, daemon=True).start()
            return self.status.state == "ready"

    def _load(self) -> None:
        try:
            self._prepared = prepare_run(self._run, self._device)
            self.status = ModelState("ready", "")
        except UserError as error:
            self.status = ModelState("failed", str(error))
        except Exception as error:  # a thread has nobody else to tell
            self.status = ModelState("failed", f"The model could not be loaded: {type(error).__name__}: {error}")

    def explain(self, name: str, texts: Sequence[str], fields: Sequence[Mapping[str, str]] = ()) -> Tried:
        """What the model and the components of a decomposition make of texts, once the model is there.

        Args:
            name: The decomposition.
            texts: The texts, n of them.
            fields: For each text the other columns that the run's prompt names.

        Returns:
            Answers, coefficients, shares and residuals.

        Raises:
            UserError: There is not enough memory for these texts.
        """
        assert self._prepared is not None
        with self._computing:
            decomposition = self._decomposition(name)
            try:
                explained = explain_texts(self._run, decomposition, texts, self._prepared, fields)
            except torch.OutOfMemoryError as error:
                raise UserError("Out of memory. Try fewer or shorter texts.") from error
        answers, probabilities = _answers(self._prepared, explained.collected)
        coefficients, shares = explained.coefficients, explained.shares
        weight = coefficients.abs() if shares is None else shares
        chosen = {j for row in strongest(coefficients, weight) for j in row}
        listed = sorted(chosen, key=lambda j: (-float(weight[:, j].max()), j))
        return Tried(
            answers=answers,
            probabilities=probabilities,
            components=listed,
            coefficients=[rounded(row) for row in coefficients[:, listed].tolist()],
            shares=None if shares is None else [rounded(row) for row in shares[:, listed].tolist()],
            residual=rounded(explained.residuals.tolist()),
            set_aside=explained.collected["set_aside"].bool().tolist(),
        )

    def weigh(
        self, name: str, texts: Sequence[str], fields: Sequence[Mapping[str, str]], components: Sequence[int]
    ) -> list[WeighedText]:
        """What the words of texts carry of components, once the model is there.

        Args:
            name: The decomposition.
            texts: The texts.
            fields: For each text the other columns that the run's prompt names.
            components: Numbers of components.

        Returns:
            One for each text.
        """
        assert self._prepared is not None
        with self._computing:
            leave_out = LeaveOut(self._run, self._decomposition(name), self._prepared)
            given = fields or [{}] * len(texts)
            return [weigh_text(leave_out, text, own, components) for text, own in zip(texts, given, strict=True)]

    def _decomposition(self, name: str) -> Decomposition:
        """The decomposition `name`; the last one stays in memory."""
        if self._open is None or self._open[0] != name:
            self._open = None
            self._open = (name, open_decomposition(self._run, name))
        return self._open[1]


def _answers(prepared: Prepared, collected: Mapping[str, torch.Tensor]) -> tuple[list[str], list[list[float | None]]]:
    """The most likely answers of any of the texts, and the probabilities of each text."""
    names = prepared.answers.names
    if "probabilities" in collected:
        known = [dict(enumerate(row)) for row in collected["probabilities"].tolist()]
    else:
        pairs = zip(collected["top_tokens"].tolist(), collected["top_probabilities"].tolist(), strict=True)
        known = [{token: value for token, value in zip(*pair, strict=True) if token >= 0} for pair in pairs]
    chosen = {answer for row in known for answer in heapq.nlargest(ANSWERS, row, key=row.__getitem__)}
    listed = sorted(chosen, key=lambda answer: (-max(row.get(answer, 0.0) for row in known), answer))
    texts = [names[answer] if names else prepared.model.tokenizer.decode([answer]) for answer in listed]
    return texts, [[float(f"{row[answer]:.5g}") if answer in row else None for answer in listed] for row in known]
