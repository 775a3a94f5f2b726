"""Which groups a kit shows: tops of components drawn at random, and as controls texts drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from npeff.analyse.ranking import distinct, top_examples
from npeff.utils.errors import UserError
from npeff.utils.types import Array


@dataclass(frozen=True)
class Picked:
    """A group before it has a number: the examples, and the component they are the top of (None: random)."""

    examples: tuple[int, ...]
    decomposition: str | None = None
    component: int | None = None


@dataclass(frozen=True)
class Ranking:
    """How a decomposition ranks examples."""

    name: str
    components: int
    scores: Callable[[int], Array]
    """Component → float32 [m]; an example at 0 or below does not belong to it."""


class Pool:
    """The examples that may be shown.

    `texts` int64 [m] has the same number for the same shown text, `usable` bool [m] is false for what was set aside.
    """

    def __init__(self, texts: Array, usable: Array) -> None:
        self.texts, self.usable = texts, usable

    def top(self, scores: Array, size: int) -> tuple[int, ...]:
        """The `size` best examples with distinct texts; fewer if there are not so many above zero."""
        order = top_examples(scores.astype(np.float32), self.usable)
        return tuple(distinct(order, self.texts, size).tolist())

    def random(
        self, random: np.random.Generator, count: int, size: int, without: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """`count` groups of random examples; no text occurs twice in them, nor is it one of the examples `without`."""
        free = np.flatnonzero(self.usable & ~np.isin(self.texts, self.texts[list(without)]))
        free = distinct(random.permutation(free), self.texts)
        if len(free) < count * size:
            raise UserError(
                f"{count} control groups need {count * size} distinct texts beside those of the components; the run "
                f"has {len(free)}. Ask for fewer --groups or --forms, or a smaller --size."
            )
        return [tuple(free[start : start + size].tolist()) for start in range(0, count * size, size)]


def pick_components(
    random: np.random.Generator, ranking: Ranking, pool: Pool, count: int, size: int, without: Sequence[int] = ()
) -> list[Picked]:
    """`count` components at random, none of `without`, among those with `size` distinct texts."""
    found: list[Picked] = []
    for component in random.permutation(ranking.components).tolist():
        if len(found) == count:
            break
        if component in without:
            continue
        top = pool.top(ranking.scores(component), size)
        if len(top) == size:
            found.append(Picked(top, ranking.name, component))
    if len(found) < count:
        raise UserError(
            f"{ranking.name} has {len(found)} components with {size} distinct active texts to choose from; {count} are "
            "needed. Ask for fewer --groups or --forms, or a smaller --size."
        )
    return found


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` numbers as equal as can be."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def deal(
    random: np.random.Generator, tops: list[Picked], controls: list[Picked], forms: int
) -> list[tuple[int, Picked]]:
    """All groups as (form, group), every form with as many tops and controls, in random order.

    The examples of a group are shuffled too: the best of a component shall not always come first.
    """
    dealt: list[tuple[int, Picked]] = []
    tops = [tops[i] for i in random.permutation(len(tops))]
    for form in range(forms):
        groups = tops[form::forms] + controls[form::forms]
        for i in random.permutation(len(groups)):
            group = groups[i]
            shuffled = tuple(random.permutation(np.array(group.examples)).tolist())
            dealt.append((form + 1, Picked(shuffled, group.decomposition, group.component)))
    return dealt
