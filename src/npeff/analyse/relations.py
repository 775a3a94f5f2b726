"""How the decompositions of a run relate: which components two of them share, and which split into which.

Two decompositions cost one product of their coefficients, so what is found is kept in RUN/relations and computed again
only for those that changed. Tensors are read in chunks: two large decompositions need not fit into memory together.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from npeff.analyse import matching
from npeff.decompose.methods import kind_of
from npeff.store.layout import RELATIONS, decomposition_folder
from npeff.store.run import Run
from npeff.utils.configs import read_record, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, sha256
from npeff.utils.text import rounded
from npeff.utils.types import Array

FORMAT = 2
NEAREST = 12
"""Other decompositions that each one is related with."""
_ROWS = 8192
_COLUMNS = 2048


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
    long: list[list[int]] = []
    for method in dict.fromkeys(member.method for member in members):
        mine = [number for number, member in enumerate(members) if member.method == method]
        seeds = dict.fromkeys(members[number].seed for number in mine)
        by_seed = [_chain(members, [n for n in mine if members[n].seed == seed]) for seed in seeds]
        of_one_seed = [chain for chain in by_seed if len(chain) > 1]
        long += of_one_seed or [chain for chain in [_chain(members, mine)] if len(chain) > 1]
    return long


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

    Args:
        members: Decompositions of a run.
        nearest: How many others each takes.

    Returns:
        Pairs of numbers, sorted.
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


@dataclass(frozen=True)
class ComponentPairs:
    """Pairs of components of two decompositions, as columns of a table of n rows."""

    first: list[int]
    """Components of the first, [n]; -1 where one of the second is like none of them."""
    second: list[int]
    """Components of the second, [n]."""
    coefficients: list[float]
    """|cos| of their coefficients over examples, [n]."""
    components: list[float] | None
    """|cos| of the components themselves, [n]; None if they live in different spaces."""


@dataclass(frozen=True)
class Relation:
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


@dataclass(frozen=True)
class SavedRelation:
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
    with safe_open(first.tensors, "pt") as a, safe_open(second.tensors, "pt") as b:
        by_coefficients = torch.nan_to_num(matching.column_similarity(_rows(a, b)))
        by_components = None
        if _same_space(first, second, a, b):
            by_components = torch.nan_to_num(matching.column_similarity(_columns(a, b)))
    matched = _pairs(*_best_first(by_coefficients), by_coefficients, by_components)
    relation = Relation(matched, _mean(matched.coefficients), matching.mean_best_similarity(by_coefficients))
    if by_components is not None:
        pairs = _pairs(*_best_first(by_components), by_coefficients, by_components)
        relation = replace(relation, components=_mean(pairs.components or []), by_components=pairs)
    if first.components < second.components:
        every = np.arange(second.components)
        parents = _pairs(matching.parents(by_coefficients), every, by_coefficients, by_components)
        relation = replace(relation, parents=parents)
    return relation


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


def _best_first(similarity: torch.Tensor) -> tuple[Array, Array]:
    """Matched rows and columns, most similar first."""
    rows, columns = matching.match(similarity)
    order = (-similarity.numpy()[rows, columns]).argsort(kind="stable")
    return rows[order], columns[order]


def _pairs(
    rows: Array, columns: Array, by_coefficients: torch.Tensor, by_components: torch.Tensor | None
) -> ComponentPairs:
    """Pairs of components, with both similarities."""
    return ComponentPairs(
        first=rows.tolist(),
        second=columns.tolist(),
        coefficients=rounded(by_coefficients.numpy()[rows, columns].tolist()),
        components=None if by_components is None else rounded(by_components.numpy()[rows, columns].tolist()),
    )


def _mean(similarities: list[float]) -> float:
    return float(np.mean(similarities)) if similarities else 0.0
