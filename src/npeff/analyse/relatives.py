"""What pages show of how a run's decompositions relate: matches, parents and splits of each component."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from npeff.analyse import matching
from npeff.analyse.records import KINDS, ComponentAnalysis
from npeff.analyse.relations import ComponentPairs, Member, Relation, chains, choose_pairs, read_members, relate
from npeff.store.run import Run
from npeff.utils.text import cut, rounded

_PREVIEW = 100

Item = tuple[int, float, float | None]
"""Another decomposition's component, with the similarity of coefficients and of components."""
Items = dict[int, list[Item]]
"""Component → what it is in another decomposition; those that are nothing there may be missing."""


def brief(component: ComponentAnalysis, texts: Sequence[str]) -> list[Any]:
    """A component in a few words, from its analysis: tunings, most frequent prediction, first example."""
    first = component.orderings[0]
    prediction = next(iter(first.predictions), "")
    text = cut(texts[first.top[0]], _PREVIEW) if first.top else ""
    return [*(component.tuned(kind) for kind in KINDS), prediction, text]


@dataclass(frozen=True)
class Relatives:
    """What a component is in another decomposition."""

    other: int
    """Number of the other decomposition."""
    kind: Literal["match", "parent", "splits"]
    """Whether the other one has as many components, fewer, or more."""
    count: int
    """Components that belong to it there."""
    items: list[list[Any]]
    """The most similar of them: number, both similarities, and what `brief` says of it."""
    by_components: Item | None
    """The component that it is matched with by vectors, if both have as many and live in the same space."""


@dataclass(frozen=True)
class RelatedPair:
    """Two decompositions in a line of the overview."""

    first: int
    """Number of the decomposition with fewer components."""
    second: int
    """Number of the other one."""
    coefficients: float
    """As in `Relation`."""
    components: float | None
    """As in `Relation`."""
    best: float
    """As in `Relation`."""
    kept: int | None = None
    """Splits of prediction-tuned components that keep the prediction; None if both have as many components."""
    splits: int | None = None
    """Splits of prediction-tuned components; None if both have as many components."""


class Relations:
    """All that is known about how a run's decompositions relate. Members go by their number in `members`."""

    def __init__(
        self,
        members: Sequence[Member],
        pairs: dict[tuple[int, int], Relation],
        briefs: Sequence[Sequence[list[Any]]],
    ) -> None:
        self.members, self.pairs, self._briefs = members, pairs, briefs
        self.chains = chains(members)
        self._items: dict[int, dict[int, Items]] = defaultdict(dict)
        self._by_components: dict[int, dict[int, Items]] = defaultdict(dict)
        for (a, b), relation in pairs.items():
            self._items[a][b], self._items[b][a] = _both_sides(relation.parents or relation.matched)
            if relation.by_components and members[a].components == members[b].components:
                sides = _both_sides(relation.by_components, by="components")
                self._by_components[a][b], self._by_components[b][a] = sides

    @classmethod
    def of(cls, run: Run, names: Sequence[str], briefs: Sequence[Sequence[list[Any]]]) -> Relations:
        """Relate the decompositions `names` of a run, as far as that is not done; `briefs` are of their components."""
        members = read_members(run, names)
        pairs = choose_pairs(members)
        bar = tqdm(pairs, desc="Relating decompositions", unit="pair", disable=None if pairs else True)
        return cls(members, {(a, b): relate(run, members[a], members[b]) for a, b in bar}, briefs)

    def others(self, member: int) -> list[int]:
        """Members that one was related with.

        Args:
            member: Its number.

        Returns:
            Their numbers: same count first, then coarser to finer; seeds before methods.
        """
        mine = self.members[member]

        def order(other: int) -> tuple[bool, int, bool, int]:
            its = self.members[other]
            return its.components != mine.components, its.components, its.method != mine.method, other

        return sorted(self._items[member], key=order)

    def of_component(self, member: int, component: int, most: int = 24) -> list[Relatives]:
        """What a component is in each other decomposition: its match, its parent, or its splits.

        Args:
            member: Number of the decomposition.
            component: Number of the component in it.
            most: Items to list at most for each other decomposition.

        Returns:
            One entry for each decomposition that it was related with.
        """
        entries = []
        for other in self.others(member):
            items = sorted(self._items[member][other].get(component, []), key=lambda item: (-item[1], item[0]))
            here, there = self.members[member].components, self.members[other].components
            matches = self._by_components[member].get(other, {}).get(component)
            entries.append(
                Relatives(
                    other=other,
                    kind="match" if here == there else "parent" if here > there else "splits",
                    count=len(items),
                    items=[[*item, *self._briefs[other][item[0]]] for item in items[:most]],
                    by_components=matches[0] if matches else None,
                )
            )
        return entries

    def stability(self, member: int) -> list[float] | None:
        """How well other seeds find each component again.

        Args:
            member: Number of the decomposition.

        Returns:
            For each component the mean similarity of its matches in other seeds of the same method and count, [C]; None
            if there are no other seeds.
        """
        mine = self.members[member]
        seeds = [
            other
            for other in self._items[member]
            if (self.members[other].method, self.members[other].components) == (mine.method, mine.components)
        ]
        if not seeds:
            return None
        found_again = [self._items[member][other] for other in seeds]
        totals = [sum(item[1] for items in found_again for item in items.get(j, [])) for j in range(mine.components)]
        return rounded([total / len(seeds) for total in totals])

    def lines(self, tuned: Sequence[Sequence[str | None]]) -> list[RelatedPair]:
        """Every pair in a line.

        Args:
            tuned: For each member, to which prediction each component is tuned, if it is.

        Returns:
            One for each pair.
        """
        lines = []
        for (a, b), relation in self.pairs.items():
            line = RelatedPair(a, b, relation.coefficients, relation.components, relation.best)
            if relation.parents:
                kept, splits = matching.preserved(np.array(relation.parents.first), tuned[a], tuned[b])
                line = replace(line, kept=kept, splits=splits)
            lines.append(line)
        return lines


def _both_sides(
    pairs: ComponentPairs, by: Literal["coefficients", "components"] = "coefficients"
) -> tuple[Items, Items]:
    """Items of the components of the first, and of the second; without pairs that have nothing in common."""
    left: Items = defaultdict(list)
    right: Items = defaultdict(list)
    components: Sequence[float | None] = pairs.components or [None] * len(pairs.first)
    for a, b, *both in zip(pairs.first, pairs.second, pairs.coefficients, components, strict=True):
        by_coefficients, by_components = both
        if both[by == "components"] and a != matching.NOBODY:
            left[a].append((b, by_coefficients or 0.0, by_components))
            right[b].append((a, by_coefficients or 0.0, by_components))
    return left, right
