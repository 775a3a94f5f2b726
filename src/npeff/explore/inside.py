"""What `npeff explain` and `npeff casestudy` found, as the page shows it."""

import re

import torch

from npeff.analyse.answers import Answers
from npeff.decompose.base import Decomposition
from npeff.explain import records
from npeff.explain.names import Name
from npeff.explain.parts import Parts
from npeff.explain.records import Case, Judged, Trace, WordEffects
from npeff.store.run import Run
from npeff.utils import Record, rounded

NEAR = 6
"""Nearest components that are listed."""


class Near(Record):
    """A component like another one."""

    component: int
    """Its number."""
    direction: float
    """|cos| of the two components."""
    parts: float | None
    """Cosine of their energies by head; None where one of them is not known."""


class Inside(Record):
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
    judged: Judged | None
    """What a language model tells by its theme and words."""


class InsideColumns(Record):
    """Columns of the overview table, each [C]."""

    names: list[str]
    """The clearest words of each component."""
    argues_for: list[str | None]
    """The answer that rises along it."""
    terms: list[str]
    """What a component is found by beside its words: `argues:` the answer, `head:` 11.3 for each of the leading heads,
    `like:` 17 for each component that it is one of the nearest to."""


def is_found(query: str, haystack: str) -> bool:
    """Whether a component is what the filter of the overview looks for.

    Args:
        query: Words, parts of words, and terms, in any order; a term that ends in a digit is meant as a whole.
        haystack: What is known of the component.

    Returns:
        Whether all of the query is in it.
    """
    known = f"{haystack.lower()} "
    return all(f"{part} " in known if re.search(r":.*\d$", part) else part in known for part in query.lower().split())


class Insides:
    """The inside of all components of a decomposition."""

    def __init__(self, run: Run, name: str, decomposition: Decomposition) -> None:
        self._names = records.read_names(run, name)
        self._known, self._studies = records.read_explanations(run, name), records.read_case_studies(run, name)
        self._judged = records.read_judged(run, name)
        directions = torch.nn.functional.normalize(decomposition.components.float(), dim=1)
        self._cosines = (directions @ directions.T).abs().fill_diagonal_(-1)
        self._nearest = self._cosines.topk(min(NEAR, len(directions) - 1)).indices.tolist()
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
        answers = [each.argues_for if each else None for each in self._names.answers]
        terms = [self._terms(j) for j in range(len(answers))]
        return InsideColumns([name.text for name in self._names.names], answers, terms)

    def _terms(self, component: int) -> str:
        known, answers = self._known.get(component), self._names and self._names.answers[component]
        heads = known.parts.leading_heads[:4] if known and known.parts else []
        terms = [f"argues:{answers.argues_for}"] if answers else []
        terms += [f"head:{head.layer}.{head.number}" for head in heads]
        return " ".join([*terms, *(f"like:{j}" for j, near in enumerate(self._nearest) if component in near)])

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
            judged=self._judged.get(component),
        )

    def _near(self, component: int) -> list[Near]:
        own = self._heads.get(component)
        best = self._nearest[component]
        alike = {j: float(own @ self._heads[j]) for j in best if own is not None and j in self._heads}
        return [Near(j, rounded([float(self._cosines[component, j])])[0], alike.get(j)) for j in best]
