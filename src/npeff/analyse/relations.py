"""How the decompositions of a run relate: which components two of them share, and which split into which.

`relate` compares two of them; `Relations` is what the page shows of all: matches, parents and splits of each component.
Two decompositions cost one product of their coefficients, so what is found is kept in RUN/relations and computed again
only for those that changed. Tensors are mapped, not read at once: two large decompositions need not fit into memory
together.
"""

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from npeff.analyse import matching
from npeff.analyse.records import KINDS, ComponentAnalysis
from npeff.decompose.methods import kind_of
from npeff.store.layout import RELATIONS, decomposition_folder
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError, cut, read_object, read_record, rounded, sha256, write_record
from npeff.utils.progress import progress

FORMAT = 2
NEAREST = 12
"""Other decompositions that each one is related with."""
_PREVIEW = 100


class Member(Record):
    """A decomposition, as far as its config tells."""

    name: str
    method: str
    components: int
    seed: int
    sha256: str
    tensors: Path


def read_members(run: Run, names: Sequence[str]) -> list[Member]:
    """What the configs of a run's decompositions tell.

    Args:
        run: The run.
        names: Names of decompositions.

    Returns:
        One for each.
    """
    members = []
    for name in names:
        folder = decomposition_folder(run.path, name)
        values = read_object(folder / "config.json")
        method, digest, (components, _) = values["method"], values["sha256"], values["components"]
        seed = values["config"].get("seed", 0)
        members.append(Member(name, method, components, seed, digest, folder / "tensors.safetensors"))
    return members


# --- which pairs --------------------------------------------------------------------------------------------------


def chains(members: Sequence[Member]) -> list[list[int]]:
    """Numbers of members of one method with more and more components, coarse to fine, for a tree of splits.

    A chain is of one seed; where no seed has two numbers of components, it is of all seeds of the method.

    Args:
        members: Decompositions of a run.

    Returns:
        Chains of two members or more.
    """
    methods: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for number, member in enumerate(members):  # the first of each count of components
        methods[member.method][member.seed].setdefault(member.components, number)
    found: list[dict[int, int]] = []
    for seeds in methods.values():
        of_all_seeds = {count: number for seed in reversed(seeds.values()) for count, number in seed.items()}
        found += [seed for seed in seeds.values() if len(seed) > 1] or [of_all_seeds]
    return [[chain[count] for count in sorted(chain)] for chain in found if len(chain) > 1]


def choose_pairs(members: Sequence[Member], nearest: int = NEAREST) -> list[tuple[int, int]]:
    """Pairs of members to relate, the one with fewer components first.

    Each takes its nearest others: neighbours in a chain, other seeds, other counts of the same seed, the same count by
    other methods, the rest.

    Args:
        members: Decompositions of a run.
        nearest: How many others each takes.

    Returns:
        Pairs of numbers, sorted.
    """
    links = {frozenset(link) for chain in chains(members) for link in pairwise(chain)}

    def distance(a: int, b: int) -> tuple[int, float]:
        one, other = members[a], members[b]
        same = {name: getattr(one, name) == getattr(other, name) for name in ("method", "components", "seed")}
        rules = [frozenset((a, b)) in links, same["method"] and same["components"], same["method"] and same["seed"]]
        rules += [same["components"] and same["seed"], same["components"], True]
        return rules.index(True), abs(math.log(one.components / other.components))

    chosen = set()
    for a in range(len(members)):
        others = sorted((b for b in range(len(members)) if b != a), key=lambda b: (*distance(a, b), b))
        chosen |= {(a, b) for b in others[:nearest]}
    return sorted({(a, b) if (members[a].components, a) < (members[b].components, b) else (b, a) for a, b in chosen})


# --- one pair -----------------------------------------------------------------------------------------------------


class ComponentPairs(Record):
    """Pairs of components of two decompositions, as columns of a table of n rows."""

    first: list[int]
    """Components of the first, [n]; -1 where one of the second is like none of them."""
    second: list[int]
    """Components of the second, [n]."""
    coefficients: list[float]
    """|cos| of their coefficients over examples, [n]."""
    components: list[float] | None
    """|cos| of the components themselves, [n]; None if they live in different spaces."""


class Relation(Record):
    """How two decompositions relate; the first has fewer components, or as many."""

    matched: ComponentPairs
    """Matched one to one by coefficients, most similar first."""
    coefficients: float
    """Mean similarity of these pairs."""
    best: float
    """Mean over the components of both of the largest |cos| of coefficients with one of the other."""
    components: float | None = None
    """Mean |cos| of components that are matched by themselves; None if they live in different spaces."""
    by_components: ComponentPairs | None = None
    """Matched one to one by the components themselves."""
    parents: ComponentPairs | None = None
    """Each component of the second with the most similar one of the first; None if they have as many."""


class SavedRelation(Record):
    """A relation as it is kept (relations/*.json)."""

    inputs: list[int | str]
    """Version of the layout, and SHA-256 of the tensors of both."""
    first: str
    """Name of the first decomposition."""
    second: str
    """Name of the second decomposition."""
    found: Relation


def relate(run: Run, first: Member, second: Member) -> Relation:
    """How two decompositions relate, from RUN/relations if it is there.

    Args:
        run: The run.
        first: The decomposition with fewer components, or as many.
        second: The other one.

    Returns:
        What `compare_tensors` finds.

    Raises:
        UserError: The tensors of one are damaged.
    """
    names = hashlib.sha256(f"{first.name}\0{second.name}".encode()).hexdigest()[:16]
    path = run.path / RELATIONS / f"{names}.json"
    inputs: list[int | str] = [FORMAT, first.sha256, second.sha256]
    with contextlib.suppress(UserError):  # one that is missing or damaged is made again
        saved = read_record(SavedRelation, path)
        if saved.inputs == inputs:
            return saved.found
    for member in (first, second):
        if sha256(member.tensors) != member.sha256:
            raise UserError(f"{member.tensors} is damaged; run `npeff decompose` again.")
    relation = compare_tensors(first, second)
    with contextlib.suppress(UserError):  # a run that may only be read can be exported as well
        write_record(path, SavedRelation(inputs, first.name, second.name, relation), sealed=True)
    return relation


def compare_tensors(first: Member, second: Member) -> Relation:
    """Match the components of two decompositions one to one, and find the parents of the finer one's.

    Similarities are |cos| of coefficients over examples and, where both live in the same space, of the components.

    Args:
        first: The decomposition with fewer components, or as many.
        second: The other one, of the same examples.

    Returns:
        The matching and the parents.
    """
    tensors = [load_file(member.tensors) for member in (first, second)]
    similarity = {"coefficients": matching.coefficient_similarity(*(each["coefficients"] for each in tensors))}
    is_activation = {kind_of(member.method) == "activation" for member in (first, second)}
    if len(is_activation) == len({each["components"].shape[1] for each in tensors}) == 1:  # vectors of the same space
        similarity["components"] = matching.component_similarity(*(each["components"] for each in tensors))
    similarity = {name: torch.nan_to_num(values) for name, values in similarity.items()}

    def pairs(rows: Array, columns: Array) -> ComponentPairs:
        found = {name: rounded(values.numpy()[rows, columns].tolist()) for name, values in similarity.items()}
        return ComponentPairs(rows.tolist(), columns.tolist(), found["coefficients"], found.get("components"))

    matched = pairs(*matching.match(similarity["coefficients"]))
    by_components = pairs(*matching.match(similarity["components"])) if "components" in similarity else None
    finer, parents = second.components > first.components, np.array(matching.parents(similarity["coefficients"]))
    return Relation(
        matched=matched,
        coefficients=float(np.mean(matched.coefficients)),
        best=matching.mean_best_similarity(similarity["coefficients"]),
        components=float(np.mean(by_components.components or 0)) if by_components else None,
        by_components=by_components,
        parents=pairs(parents, np.arange(second.components)) if finer else None,
    )


# --- all pairs, for pages -----------------------------------------------------------------------------------------

Item = tuple[int, float, float | None]
"""Another decomposition's component, with the similarity of coefficients and of components."""
Items = dict[int, list[Item]]
Kinship = Literal["match", "parent", "splits"]
"""Component → what it is in another decomposition; those that are nothing there may be missing."""


def brief(component: ComponentAnalysis, texts: Sequence[str]) -> list[Any]:
    """A component in a few words, from its analysis: tunings, most frequent prediction, first example."""
    first = component.orderings[0]
    prediction = next(iter(first.predictions), "")
    text = cut(texts[first.top[0]], _PREVIEW) if first.top else ""
    return [*(component.tuned(kind) for kind in KINDS), prediction, text]


class Relatives(Record):
    """What a component is in another decomposition."""

    other: int
    """Number of the other decomposition."""
    kind: Kinship
    """Whether the other one has as many components, fewer, or more."""
    count: int
    """Components that belong to it there."""
    items: list[list[Any]]
    """The most similar of them: number, both similarities, and what `brief` says of it."""
    by_components: Item | None
    """The component that it is matched with by vectors, if both have as many and live in the same space."""


class RelatedPair(Record):
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

    def __init__(self, run: Run, names: Sequence[str], briefs: Sequence[Sequence[list[Any]]]) -> None:
        """Relate the decompositions `names` of a run, as far as that is not done; `briefs` are of their components."""
        self.members, self._briefs = read_members(run, names), briefs
        self.chains = chains(self.members)
        self.pairs: dict[tuple[int, int], Relation] = {}
        self._items: dict[int, dict[int, Items]] = defaultdict(dict)
        self._by_components: dict[int, dict[int, Items]] = defaultdict(dict)
        pairs = choose_pairs(self.members)
        for a, b in progress(pairs, desc="Relating decompositions", unit="pair", active=bool(pairs)):
            first, second = self.members[a], self.members[b]
            relation = self.pairs[a, b] = relate(run, first, second)
            self._items[a][b], self._items[b][a] = _both_sides(relation.parents or relation.matched)
            if relation.by_components and first.components == second.components:
                sides = _both_sides(relation.by_components, by="components")
                self._by_components[a][b], self._by_components[b][a] = sides

    def of_component(self, member: int, component: int, most: int = 24) -> list[Relatives]:
        """What a component is in each other decomposition: its match, its parent, or its splits.

        Args:
            member: Number of the decomposition.
            component: Number of the component in it.
            most: Items to list at most for each other decomposition.

        Returns:
            One entry for each decomposition that it was related with: same count first, then coarser to finer; seeds
            before methods.
        """
        mine, entries = self.members[member], []

        def order(other: int) -> tuple[bool, int, bool, int]:
            its = self.members[other]
            return its.components != mine.components, its.components, its.method != mine.method, other

        for other in sorted(self._items[member], key=order):
            items = sorted(self._items[member][other].get(component, []), key=lambda item: (-item[1], item[0]))
            here, there = mine.components, self.members[other].components
            matches = self._by_components[member].get(other, {}).get(component)
            kind: Kinship = "match" if here == there else "parent" if here > there else "splits"
            shown = [[*item, *self._briefs[other][item[0]]] for item in items[:most]]
            entries.append(Relatives(other, kind, len(items), shown, matches[0] if matches else None))
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
        same = [n for n, m in enumerate(self.members) if (m.method, m.components) == (mine.method, mine.components)]
        seeds = [items for other, items in self._items[member].items() if other in same]
        if not seeds:
            return None
        totals = [sum(item[1] for items in seeds for item in items.get(j, [])) for j in range(mine.components)]
        return rounded([total / len(seeds) for total in totals])

    def lines(self, tuned: Sequence[Sequence[str | None]]) -> list[RelatedPair]:
        """Every pair in a line.

        Args:
            tuned: For each member, to which prediction each component is tuned, if it is.

        Returns:
            One for each pair.
        """

        def kept(a: int, b: int, parents: ComponentPairs | None) -> tuple[int, int] | tuple[()]:
            return matching.preserved(parents.first, tuned[a], tuned[b]) if parents else ()

        return [
            RelatedPair(a, b, found.coefficients, found.components, found.best, *kept(a, b, found.parents))
            for (a, b), found in self.pairs.items()
        ]


def _both_sides(pairs: ComponentPairs, by: str = "coefficients") -> tuple[Items, Items]:
    """Items of the components of the first, and of the second; without pairs that have nothing in common."""
    left: Items = defaultdict(list)
    right: Items = defaultdict(list)
    components: Sequence[float | None] = pairs.components or [None] * len(pairs.first)
    for a, b, coefficient, component in zip(pairs.first, pairs.second, pairs.coefficients, components, strict=True):
        if a != matching.NOBODY and (component if by == "components" else coefficient):
            left[a].append((b, coefficient, component))
            right[b].append((a, coefficient, component))
    return left, right
