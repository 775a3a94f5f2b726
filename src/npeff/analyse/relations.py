"""How the decompositions of a run relate: which components two of them share, and which split into which.

Two decompositions cost one product of their coefficients, so what is found is kept in RUN/relations and computed anew
only for those that changed. Tensors are read in chunks: two large decompositions need not fit into memory together.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from npeff.analyse import matching
from npeff.analyse.records import KINDS, ComponentAnalysis
from npeff.decompose.methods import kind_of
from npeff.store.layout import RELATIONS, decomposition_folder
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, sha256, write_json
from npeff.utils.text import cut, rounded
from npeff.utils.types import Array

FORMAT = 2
NEAREST = 12
"""Other decompositions that each one is related with."""
_ROWS = 8192
_COLUMNS = 2048
_PREVIEW = 100


@dataclass(frozen=True)
class Member:
    """A decomposition, as far as its config tells."""

    name: str
    method: str
    components: int
    seed: int
    sha256: str
    tensors: Path


def read_members(run: Run, names: Sequence[str]) -> list[Member]:
    """The run's decompositions `names`."""
    found = []
    for name in names:
        folder = decomposition_folder(run.path, name)
        values = read_object(folder / "config.json")
        method, digest, (components, _) = values["method"], values["sha256"], values["components"]
        seed = values["config"].get("seed", 0)
        found.append(Member(name, method, components, seed, digest, folder / "tensors.safetensors"))
    return found


# --- which pairs --------------------------------------------------------------------------------------------------


def chains(members: Sequence[Member]) -> list[list[int]]:
    """Numbers of members of one method with more and more components, coarse to fine, for a tree of splits.

    A chain is of one seed; where no seed has two numbers of components, it is of all seeds of the method.
    """
    found = []
    for method in dict.fromkeys(member.method for member in members):
        mine = [number for number, member in enumerate(members) if member.method == method]
        seeds = dict.fromkeys(members[number].seed for number in mine)
        by_seed = [_chain(members, [n for n in mine if members[n].seed == seed]) for seed in seeds]
        long = [chain for chain in by_seed if len(chain) > 1] or [_chain(members, mine)]
        found += [chain for chain in long if len(chain) > 1]
    return found


def _chain(members: Sequence[Member], numbers: Sequence[int]) -> list[int]:
    """The first of `numbers` for each count of components, ascending."""
    first: dict[int, int] = {}
    for number in numbers:
        first.setdefault(members[number].components, number)
    return [first[count] for count in sorted(first)]


def choose_pairs(members: Sequence[Member], nearest: int = NEAREST) -> list[tuple[int, int]]:
    """Pairs of members to relate, the one with fewer components first.

    Each takes its nearest others: neighbours in a chain, other seeds, other counts of the same seed, the same count by
    other methods, the rest.
    """
    links = {frozenset(link) for chain in chains(members) for link in pairwise(chain)}

    def distance(a: int, b: int) -> tuple[int, float]:
        one, other = members[a], members[b]
        same_method, same_count = one.method == other.method, one.components == other.components
        rules = [
            frozenset((a, b)) in links,
            same_method and same_count,
            same_method and one.seed == other.seed,
            same_count and one.seed == other.seed,
            same_count,
            True,
        ]
        return rules.index(True), abs(math.log(one.components / other.components))

    chosen = set()
    for a in range(len(members)):
        others = sorted((b for b in range(len(members)) if b != a), key=lambda b: (*distance(a, b), b))
        chosen |= {(a, b) for b in others[:nearest]}
    return sorted({(a, b) if (members[a].components, a) < (members[b].components, b) else (b, a) for a, b in chosen})


# --- one pair -----------------------------------------------------------------------------------------------------


def relate(run: Run, first: Member, second: Member) -> dict[str, Any]:
    """What `compare_tensors` finds for two decompositions, from RUN/relations if it is there."""
    names = hashlib.sha256(f"{first.name}\0{second.name}".encode()).hexdigest()[:16]
    path = run.path / RELATIONS / f"{names}.json"
    inputs = [FORMAT, first.sha256, second.sha256]
    with contextlib.suppress(UserError):  # one that is damaged is made anew
        saved = read_object(path) if path.is_file() else {}
        if saved.get("inputs") == inputs:
            return saved["found"]
    for member in (first, second):
        if sha256(member.tensors) != member.sha256:
            raise UserError(f"{member.tensors} is damaged; run `npeff decompose` again.")
    found = compare_tensors(first, second)
    with contextlib.suppress(UserError):  # a run that may only be read can be exported as well
        write_json(path, {"inputs": inputs, "first": first.name, "second": second.name, "found": found}, sealed=True)
    return found


def compare_tensors(first: Member, second: Member) -> dict[str, Any]:
    """Match the components of two decompositions one to one, and find the parents of the finer one's.

    Similarities are |cos| of coefficients over examples and, where both live in the same space, of the components.
    """
    with safe_open(first.tensors, "pt") as a, safe_open(second.tensors, "pt") as b:
        by_coefficients = torch.nan_to_num(matching.column_similarity(_rows(a, b)))
        by_components = None
        if _same_space(first, second, a, b):
            by_components = torch.nan_to_num(matching.column_similarity(_columns(a, b)))
    rows, columns = _best_first(by_coefficients, *matching.match(by_coefficients))
    found: dict[str, Any] = {
        "matched": _pairs(rows, columns, by_coefficients, by_components),
        "coefficients": _mean(by_coefficients, rows, columns),
        "best": matching.mean_best_similarity(by_coefficients),
        "components": None,
        "by_components": None,
        "parents": None,
    }
    if by_components is not None:
        rows, columns = _best_first(by_components, *matching.match(by_components))
        found["components"] = _mean(by_components, rows, columns)
        found["by_components"] = _pairs(rows, columns, by_coefficients, by_components)
    if first.components < second.components:
        parents = matching.parents(by_coefficients)
        found["parents"] = _pairs(parents, np.arange(second.components), by_coefficients, by_components)
    return found


def _rows(a: Any, b: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of the coefficients [m, C] and [m, D]."""
    first, second = a.get_slice("coefficients"), b.get_slice("coefficients")
    for start in range(0, first.get_shape()[0], _ROWS):
        yield first[start : start + _ROWS], second[start : start + _ROWS]


def _columns(a: Any, b: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of the components [C, p] and [D, p], transposed."""
    first, second = a.get_slice("components"), b.get_slice("components")
    for start in range(0, first.get_shape()[1], _COLUMNS):
        yield first[:, start : start + _COLUMNS].T, second[:, start : start + _COLUMNS].T


def _same_space(first: Member, second: Member, a: Any, b: Any) -> bool:
    """Whether components are vectors of the same space: sketched parameters, or activations."""
    kinds = {kind_of(member.method) == "activation" for member in (first, second)}
    return len(kinds) == 1 and len({file.get_slice("components").get_shape()[1] for file in (a, b)}) == 1


def _best_first(similarity: torch.Tensor, rows: Array, columns: Array) -> tuple[Array, Array]:
    order = (-similarity.numpy()[rows, columns]).argsort(kind="stable")
    return rows[order], columns[order]


def _pairs(
    rows: Array, columns: Array, by_coefficients: torch.Tensor, by_components: torch.Tensor | None
) -> dict[str, Any]:
    """Pairs of components as columns of a table, with both similarities."""
    return {
        "first": rows.tolist(),
        "second": columns.tolist(),
        "coefficients": rounded(by_coefficients.numpy()[rows, columns].tolist()),
        "components": None if by_components is None else rounded(by_components.numpy()[rows, columns].tolist()),
    }


def _mean(similarity: torch.Tensor, rows: Array, columns: Array) -> float:
    return float(similarity.numpy()[rows, columns].mean()) if len(rows) else 0.0


# --- what pages show ----------------------------------------------------------------------------------------------

Item = tuple[int, float, float | None]
"""Another decomposition's component, with the similarity of coefficients and of components."""


def brief(component: ComponentAnalysis, texts: Sequence[str]) -> list[Any]:
    """A component in a few words, from its analysis: tunings, most frequent prediction, first example."""
    first = component.orderings[0]
    prediction = next(iter(first.predictions), "")
    text = cut(texts[first.top[0]], _PREVIEW) if first.top else ""
    return [*(component.tuned(kind) for kind in KINDS), prediction, text]


class Relations:
    """All that is known about how a run's decompositions relate. Members go by their number in `members`."""

    def __init__(
        self,
        members: Sequence[Member],
        found: dict[tuple[int, int], dict[str, Any]],
        briefs: Sequence[Sequence[list[Any]]],
    ) -> None:
        self.members, self.pairs, self._briefs = members, found, briefs
        self.chains = chains(members)
        # member → other member → component → its items there
        self._items: dict[int, dict[int, list[list[Item]]]] = defaultdict(dict)
        self._by_components: dict[int, dict[int, list[Item | None]]] = defaultdict(dict)
        for (a, b), relation in found.items():
            sizes = members[a].components, members[b].components
            self._items[a][b], self._items[b][a] = _both_sides(relation["parents"] or relation["matched"], *sizes)
            if relation["by_components"] and sizes[0] == sizes[1]:
                sides = _both_sides(relation["by_components"], *sizes, by="components")
                for one, other, lists in ((a, b, sides[0]), (b, a, sides[1])):
                    self._by_components[one][other] = [items[0] if items else None for items in lists]

    @classmethod
    def of(cls, run: Run, names: Sequence[str], briefs: Sequence[Sequence[list[Any]]]) -> Relations:
        """Relate the decompositions `names` of a run, as far as that is not done; `briefs` are of their components."""
        members = read_members(run, names)
        pairs = choose_pairs(members)
        bar = tqdm(pairs, desc="Relating decompositions", unit="pair", disable=not pairs)
        found = {(a, b): relate(run, members[a], members[b]) for a, b in bar}
        return cls(members, found, briefs)

    def others(self, member: int) -> list[int]:
        """Members that `member` was related with: same count first, then coarser to finer; seeds before methods."""
        mine = self.members[member]

        def order(other: int) -> tuple[bool, int, bool, int]:
            its = self.members[other]
            return its.components != mine.components, its.components, its.method != mine.method, other

        return sorted(self._items[member], key=order)

    def of_component(self, member: int, component: int, most: int = 24) -> list[dict[str, Any]]:
        """What a component is in each other decomposition: its match, its parent, or its splits (at most `most`)."""
        found = []
        for other in self.others(member):
            items = sorted(self._items[member][other][component], key=lambda item: (-item[1], item[0]))
            counts = self.members[member].components, self.members[other].components
            kind = "match" if counts[0] == counts[1] else "parent" if counts[0] > counts[1] else "splits"
            by_components = self._by_components[member].get(other)
            found.append(
                {
                    "other": other,
                    "kind": kind,
                    "count": len(items),
                    "items": [[*item, *self._briefs[other][item[0]]] for item in items[:most]],
                    "by_components": by_components and by_components[component],
                }
            )
        return found

    def stability(self, member: int) -> list[float] | None:
        """For each component the mean similarity of its matches in other seeds of the same method and count."""
        mine = self.members[member]
        seeds = [
            other
            for other in self._items[member]
            if (self.members[other].method, self.members[other].components) == (mine.method, mine.components)
        ]
        if not seeds:
            return None
        totals = [
            sum(item[1] for other in seeds for item in self._items[member][other][j]) for j in range(mine.components)
        ]
        return rounded([total / len(seeds) for total in totals])

    def lines(self, tuned: Sequence[Sequence[str | None]]) -> list[dict[str, Any]]:
        """Every pair in a line; `tuned` says of each member's components to which prediction they are tuned."""
        lines = []
        for (a, b), relation in self.pairs.items():
            line = {"first": a, "second": b, **{key: relation[key] for key in ("coefficients", "components", "best")}}
            if relation["parents"]:
                parent = np.array(relation["parents"]["first"])
                line["kept"], line["splits"] = matching.preserved(parent, tuned[a], tuned[b])
            lines.append(line)
        return lines


def _both_sides(
    pairs: dict[str, Any], first: int, second: int, by: str = "coefficients"
) -> tuple[list[list[Item]], list[list[Item]]]:
    """Items of each component of the first, and of the second; without pairs that have nothing in common."""
    left: list[list[Item]] = [[] for _ in range(first)]
    right: list[list[Item]] = [[] for _ in range(second)]
    components = pairs["components"] or [None] * len(pairs["first"])
    table = zip(pairs["first"], pairs["second"], pairs["coefficients"], components, pairs[by], strict=True)
    for a, b, of_coefficients, of_components, similarity in table:
        if similarity > 0 and a != matching.NOBODY:
            left[a].append((b, of_coefficients, of_components))
            right[b].append((a, of_coefficients, of_components))
    return left, right
