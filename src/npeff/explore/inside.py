"""What `npeff explain` and `npeff casestudy` found, as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npeff.decompose.base import Decomposition
from npeff.explain.answers import Answers
from npeff.explain.names import Name
from npeff.explain.parts import Parts
from npeff.explain.records import (
    Case,
    Trace,
    WordEffects,
    read_case_studies,
    read_explanations,
    read_names,
)
from npeff.store.layout import EXPLANATIONS
from npeff.store.run import Run
from npeff.utils.files import sha256
from npeff.utils.text import rounded

NEAR = 6
"""Nearest components that are listed."""


@dataclass(frozen=True)
class Near:
    """A component like another one."""

    component: int
    """Its number."""
    direction: float
    """|cos| of the two components."""
    parts: float | None
    """Cosine of their energies by head; None where one of them is not known."""


@dataclass(frozen=True)
class Inside:
    """What is inside a component."""

    name: Name | None
    """Its words."""
    answers: Answers | None
    """What it does to answers."""
    words: dict[int, WordEffects]
    """Example → what its words carry."""
    parts: Parts | None
    """Heads and neurons."""
    trace: Trace | None
    """How a change travels."""
    cases: list[Case]
    """Its case study."""
    near: list[Near]
    """The nearest components by direction."""


@dataclass(frozen=True)
class InsideColumns:
    """Columns of the overview table, each [C]."""

    names: list[str]
    """The clearest words of each component."""
    argues_for: list[str | None]
    """The answer that rises along it."""
    heads: list[str]
    """Its leading heads, as 11.3 for head 3 of layer 11; empty where they are not known."""


class Insides:
    """The inside of all components of a decomposition."""

    def __init__(self, run: Run, name: str, decomposition: Decomposition) -> None:
        self._names = read_names(run, name)
        self._known, self._studies = read_explanations(run, name), read_case_studies(run, name)
        self._directions = torch.nn.functional.normalize(decomposition.components.float(), dim=1)
        heads = {j: torch.tensor(each.parts.heads).flatten() for j, each in self._known.items() if each.parts}
        self._heads = {j: values / values.norm().clamp_min(1e-30) for j, values in heads.items()}

    @property
    def columns(self) -> InsideColumns | None:
        """What the overview says.

        Returns:
            Its columns; None if nothing is known.
        """
        if self._names is None:
            return None
        parts = [each.parts if (each := self._known.get(j)) else None for j in range(len(self._names.names))]
        return InsideColumns(
            names=[name.text for name in self._names.names],
            argues_for=[each.argues_for if each else None for each in self._names.answers],
            heads=[
                " ".join(f"{head.layer}.{head.number}" for head in each.leading_heads[:4]) if each else ""
                for each in parts
            ],
        )

    def of(self, component: int) -> Inside | None:
        """The inside of a component.

        Args:
            component: Its number.

        Returns:
            All that is known; None if nothing is.
        """
        known, study = self._known.get(component), self._studies.get(component)
        if self._names is None:
            return None
        return Inside(
            name=self._names.names[component],
            answers=known.answers if known else self._names.answers[component],
            words={each.example: each for each in (known and known.words) or [] if each.example is not None},
            parts=known.parts if known else None,
            trace=known.trace if known else None,
            cases=study.cases if study else [],
            near=self._near(component),
        )

    def _near(self, component: int) -> list[Near]:
        cosines = (self._directions @ self._directions[component]).abs()
        cosines[component] = -1
        best = cosines.topk(min(NEAR, len(cosines) - 1)).indices.tolist()
        own = self._heads.get(component)
        alike = {j: float(own @ self._heads[j]) for j in best if own is not None and j in self._heads}
        return [Near(j, rounded([float(cosines[j])])[0], alike.get(j)) for j in best]


def digests(run: Run) -> dict[str, str]:
    """What explanations are read from: file → its SHA-256."""
    folder = run.path / EXPLANATIONS
    return {file.relative_to(folder).as_posix(): sha256(file) for file in sorted(folder.rglob("[!.]*.json"))}
