"""Texts that a reader of the page types, through the run's own model.

The model is loaded at first use, in the background, and stays. One text is computed at a time: the hooks that capture
gradients belong to one pass.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from npeff.analyse.probe import explain_texts
from npeff.collect.session import Prepared, prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explore.pages import LISTED
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.utils.errors import UserError
from npeff.utils.text import rounded

State = Literal["not loaded", "loading", "ready", "failed"]
ANSWERS = 8
"""Most likely answers of each text that are listed."""


class Tryout:
    """A run's model, and what it makes of new texts."""

    def __init__(self, run: Run, device: str | None = None) -> None:
        self._run, self._device = run, device
        self._state: State = "not loaded"
        self._message = ""
        self._prepared: Prepared | None = None
        self._open: tuple[str, Decomposition] | None = None
        self._loading, self._computing = threading.Lock(), threading.Lock()

    @property
    def fields(self) -> list[str]:
        """Other columns that the run's prompt names."""
        return [name.removeprefix(FIELD) for name in self._run.table.column_names if name.startswith(FIELD)]

    def status(self) -> dict[str, str]:
        """Whether the model is there: `state`, and a `message` if it could not be loaded."""
        return {"state": self._state, "message": self._message}

    def is_ready(self) -> bool:
        """Whether the model is there; if not, begin to load it, also after it has failed."""
        with self._loading:
            if self._state in ("not loaded", "failed"):
                self._state, self._message = "loading", ""
                threading.Thread(target=self._load, daemon=True).start()
            return self._state == "ready"

    def _load(self) -> None:
        try:
            self._prepared = prepare_run(self._run, self._device)
        except UserError as error:
            self._state, self._message = "failed", str(error)
        except Exception as error:  # a thread has nobody else to tell
            self._state, self._message = "failed", f"The model could not be loaded: {type(error).__name__}: {error}"
        else:
            self._state = "ready"

    def explain(self, name: str, texts: Sequence[str], fields: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
        """Coefficients, shares, what is left over and the model's answers for each text, as JSON values."""
        assert self._prepared is not None
        with self._computing:
            decomposition = self._decomposition(name)
            try:
                explained = explain_texts(self._run, decomposition, texts, self._prepared, fields)
            except torch.OutOfMemoryError as error:
                raise UserError("Out of memory. Try fewer or shorter texts.") from error
        return {
            **answers_side_by_side(self._prepared, explained.collected),
            **side_by_side(explained.coefficients, explained.shares),
            "residual": rounded(explained.residuals.tolist()),
            "set_aside": explained.collected["set_aside"].bool().tolist(),
        }

    def _decomposition(self, name: str) -> Decomposition:
        """The decomposition `name`; the last one stays in memory."""
        if self._open is None or self._open[0] != name:
            self._open = None
            self._open = (name, open_decomposition(self._run, name))
        return self._open[1]


def side_by_side(coefficients: torch.Tensor, shares: torch.Tensor | None) -> dict[str, Any]:
    """The components that matter to any of the texts, the strongest first; `coefficients` and `shares` are [n, C]."""
    weight = coefficients.abs() if shares is None else shares
    top = weight.topk(min(LISTED, weight.shape[1]), dim=1).indices
    chosen = {j for i, best in enumerate(top.tolist()) for j in best if coefficients[i, j] != 0}
    listed = sorted(chosen, key=lambda j: (-float(weight[:, j].max()), j))
    return {
        "components": listed,
        "coefficients": [rounded(row) for row in coefficients[:, listed].tolist()],
        "shares": None if shares is None else [rounded(row) for row in shares[:, listed].tolist()],
    }


def answers_side_by_side(prepared: Prepared, found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The most likely answers of any of the texts and their probabilities; None where one is too small to be known."""
    names = prepared.answers.names
    if names:
        top = found["probabilities"].topk(min(ANSWERS, len(names)), dim=1)
        tokens, values = top.indices, found["probabilities"]
        known = [dict(enumerate(row)) for row in values.tolist()]
    else:
        tokens, values = found["top_tokens"][:, :ANSWERS], found["top_probabilities"]
        known = [
            dict(zip(*row, strict=True)) for row in zip(found["top_tokens"].tolist(), values.tolist(), strict=True)
        ]
    largest: dict[int, float] = {}
    for row, probabilities in zip(tokens.tolist(), known, strict=True):
        for answer in row:
            largest[answer] = max(largest.get(answer, 0.0), probabilities[answer])
    listed = sorted(largest, key=lambda answer: (-largest[answer], answer))
    say = names.__getitem__ if names else lambda token: prepared.model.tokenizer.decode([token])
    return {
        "answers": [say(answer) for answer in listed],
        "probabilities": [
            [None if answer not in row else float(f"{row[answer]:.5g}") for answer in listed] for row in known
        ],
    }
