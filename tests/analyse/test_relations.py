"""How decompositions relate: the values behind the page, against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npeff.analyse import matching
from npeff.analyse import relations as module
from npeff.analyse.relations import Member, Relations, chains, choose_pairs, read_members, relate
from npeff.decompose.config import FitConfig
from npeff.decompose.methods import create
from npeff.decompose.run import open_decomposition
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.explore.test_export import data
from tests.synthetic import make_run

EXAMPLES = 40


def put(run: Run, name: str, components: int, seed: int, method: str = "npeff", dead: bool = True) -> None:
    """Save a decomposition with random tensors; the last component is in no example, if it is to be dead."""
    generator = torch.Generator().manual_seed(1000 * components + seed)
    made = create(FitConfig(method=method, components=components, seed=seed))  # type: ignore[arg-type]
    made.components = torch.randn(components, 16, generator=generator)
    made.coefficients = torch.rand(EXAMPLES, components, generator=generator).square()
    made.coefficients[:, -1] *= not dead
    made.residuals = torch.rand(EXAMPLES, generator=generator)
    made.notes.run = run.fingerprint
    made.save(run.path / "decompositions" / name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("relations") / "run", [f"text {i}" for i in range(EXAMPLES)])
    for name, components, seed in (("a", 4, 0), ("b", 4, 1), ("c", 7, 0)):
        put(run, name, components, seed)
    put(run, "svd", 4, 0, "svd-gradients")
    put(run, "acts", 4, 0, "svd-activations")
    return run


@pytest.fixture(scope="module")
def site(run: Run) -> Path:
    return export(ExportConfig(str(run.path), str(run.path / "site"))).parent


def cosines(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """|cos| of all columns with all columns, one by one."""
    found = np.zeros((first.shape[1], second.shape[1]))
    for i, j in np.ndindex(*found.shape):
        lengths = np.linalg.norm(first[:, i]) * np.linalg.norm(second[:, j])
        found[i, j] = abs(first[:, i] @ second[:, j]) / lengths if lengths else 0
    return found


def best_matching(similarity: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Columns of the rows in the best of all one-to-one matchings."""
    rows, columns = similarity.shape
    return max(
        itertools.permutations(range(columns), rows),
        key=lambda order: sum(similarity[i, j] for i, j in enumerate(order)),
    )


@pytest.mark.parametrize(
    ("one", "other", "vectors"), [("a", "b", True), ("a", "c", True), ("a", "svd", True), ("a", "acts", False)]
)
def test_a_pair_equals_brute_force(
    run: Run, monkeypatch: pytest.MonkeyPatch, one: str, other: str, vectors: bool
) -> None:
    monkeypatch.setattr(matching, "_ROWS", 7)  # several chunks
    monkeypatch.setattr(matching, "_COLUMNS", 5)
    found = module.compare_tensors(*read_members(run, [one, other]))
    first, second = (open_decomposition(run, name) for name in (one, other))
    W = cosines(first.coefficients.numpy(), second.coefficients.numpy())
    H = cosines(first.components.T.numpy(), second.components.T.numpy())
    pairs = found.matched
    total = sum(W[i, j] for i, j in enumerate(best_matching(W)))
    assert sorted(pairs.first) == list(range(4))
    assert len(set(pairs.second)) == 4
    assert sum(pairs.coefficients) == pytest.approx(total, abs=1e-3)
    assert pairs.coefficients == sorted(pairs.coefficients, reverse=True)
    assert pairs.coefficients == pytest.approx(W[pairs.first, pairs.second].tolist(), abs=1e-4)
    assert found.coefficients == pytest.approx(total / 4, abs=1e-3)
    assert found.best == pytest.approx(np.concatenate([W.max(axis=1), W.max(axis=0)]).mean(), abs=1e-4)
    if not vectors:
        assert (found.components, found.by_components, pairs.components) == (None, None, None)
    else:
        by_vectors = best_matching(H)
        assert dict(zip(found.by_components.first, found.by_components.second, strict=True)) == dict(
            enumerate(by_vectors)
        )
        assert found.components == pytest.approx(np.mean([H[i, j] for i, j in enumerate(by_vectors)]), abs=1e-4)
        assert pairs.components == pytest.approx(H[pairs.first, pairs.second].tolist(), abs=1e-4)
    if other != "c":
        assert found.parents is None
    else:
        assert found.parents.first == [*W[:, :-1].argmax(axis=0).tolist(), matching.NOBODY]  # the last is dead
        assert found.parents.coefficients == pytest.approx(W.max(axis=0).tolist(), abs=1e-4)


def members(*described: tuple[str, int, int]) -> list[Member]:
    return [
        Member(f"{method}-{components}-{seed}", method, components, seed, "", Path())
        for method, components, seed in described
    ]


def test_chains_are_of_one_method_and_if_possible_one_seed() -> None:
    assert chains(members(("npeff", 64, 0), ("npeff", 32, 0), ("npeff", 32, 1), ("sae", 32, 0))) == [[1, 0]]
    assert chains(members(("npeff", 64, 0), ("npeff", 32, 1), ("npeff", 64, 2))) == [[1, 0]]
    grid = members(*(("npeff", count, seed) for count in (8, 16, 32) for seed in (0, 1)))
    assert chains(grid) == [[0, 2, 4], [1, 3, 5]]
    assert chains(members(("npeff", 8, 0), ("npeff", 8, 1))) == []


def test_the_nearest_are_related_and_never_too_many() -> None:
    few = members(("npeff", 16, 0), ("npeff", 8, 0), ("sae", 8, 0))
    assert choose_pairs(few) == [(1, 0), (1, 2), (2, 0)]  # fewer components first
    grid = members(*(("npeff", count, seed) for count in (8, 16, 32, 64, 128) for seed in range(5)))
    chosen = choose_pairs(grid, nearest=8)
    related = {frozenset(pair) for pair in chosen}
    for a, b in itertools.combinations(range(25), 2):
        same_count, same_seed = grid[a].components == grid[b].components, grid[a].seed == grid[b].seed
        assert (frozenset((a, b)) in related) == (same_count or same_seed)
    assert all(grid[a].components <= grid[b].components for a, b in chosen)
    many = members(*(("npeff", 8, seed) for seed in range(60)))
    assert len(choose_pairs(many, nearest=6)) <= 60 * 6
    assert choose_pairs(members(("npeff", 8, 0))) == []


def test_component_pages_have_matches_parents_and_splits(run: Run, site: Path) -> None:
    names = [d["analysis"]["name"] for d in data(site, "run")["decompositions"]]
    numbers = {name: names.index(name) for name in names}
    W = {name: open_decomposition(run, name).coefficients.numpy() for name in names}
    texts = [f"text {i}" for i in range(EXAMPLES)]

    def entries(name: str, j: int) -> dict[str, Any]:
        return {names[entry["other"]]: entry for entry in data(site, f"{numbers[name]}/component/{j}")["relations"]}

    between = cosines(W["a"], W["c"])
    parent = between.argmax(axis=0)
    for j in range(3):  # the last is in no example
        splits = entries("a", j)["c"]
        assert splits["kind"] == "splits"
        expected = sorted((k for k in range(6) if parent[k] == j), key=lambda k: -between[j, k])
        assert [item[0] for item in splits["items"]] == expected
        assert splits["count"] == len(expected)
        assert [item[1] for item in splits["items"]] == pytest.approx([between[j, k] for k in expected], abs=1e-4)
    for k in range(6):
        entry = entries("c", k)["a"]
        assert (entry["kind"], [item[0] for item in entry["items"]]) == ("parent", [parent[k]])
        # the component's tunings, most frequent prediction and first example come along
        top = int(np.argmax(W["a"][:, parent[k]]))
        assert entry["items"][0][7] == texts[top]
        assert entry["items"][0][6] in ("Negative", "Positive")
    assert entries("c", 6)["a"]["items"] == []
    matched = best_matching(cosines(W["a"], W["b"])[:3, :3])
    for j in range(3):
        entry = entries("a", j)["b"]
        assert (entry["kind"], entry["items"][0][0]) == ("match", matched[j])
        assert entries("b", matched[j])["a"]["items"][0][0] == j
    assert "components" not in entries("a", 0)["acts"]
    assert entries("a", 0)["acts"]["items"][0][2] is None


def test_the_overview_has_stability_and_pairs(run: Run, site: Path) -> None:
    about = data(site, "run")
    names = [d["analysis"]["name"] for d in about["decompositions"]]
    assert [[names[n] for n in chain] for chain in about["chains"]] == [["a", "c"]]
    assert [d["seed"] for d in about["decompositions"]][names.index("b")] == 1
    assert len(about["pairs"]) == 10
    W = {name: open_decomposition(run, name).coefficients.numpy() for name in ("a", "b")}
    between = cosines(W["a"], W["b"])
    matched = best_matching(between)
    stability = data(site, f"{names.index('a')}/components")["stability"]
    assert stability == pytest.approx([between[i, j] for i, j in enumerate(matched)], abs=1e-4)
    assert data(site, f"{names.index('svd')}/components")["stability"] is None  # no other seed
    pair = next(p for p in about["pairs"] if {names[p["first"]], names[p["second"]]} == {"a", "b"})
    assert data(site, f"pair/{pair['first']}-{pair['second']}")["coefficients"] == pytest.approx(pair["coefficients"])
    split = next(p for p in about["pairs"] if (names[p["first"]], names[p["second"]]) == ("a", "c"))
    assert 0 <= split["kept"] <= split["splits"] <= 7


def test_what_was_found_is_kept_until_a_decomposition_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(EXAMPLES)])
    put(run, "a", 4, 0)
    put(run, "b", 4, 1)
    calls: list[Sequence[str]] = []
    plain = module.compare_tensors
    monkeypatch.setattr(module, "compare_tensors", lambda *both: calls.append([m.name for m in both]) or plain(*both))
    first = relate(run, *read_members(run, ["a", "b"]))
    assert relate(run, *read_members(run, ["a", "b"])) == first
    assert calls == [["a", "b"]]
    (saved,) = (run.path / "relations").iterdir()
    saved.write_text(saved.read_text().replace('"best": 0', '"best": 1'))
    assert relate(run, *read_members(run, ["a", "b"])) == first
    assert len(calls) == 2
    put(run, "b", 4, 2)
    assert relate(run, *read_members(run, ["a", "b"])) != first
    assert len(calls) == 3
    put(run, "b", 4, 3)
    tensors = run.path / "decompositions/b/tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        relate(run, *read_members(run, ["a", "b"]))


def test_one_decomposition_has_no_relatives(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(EXAMPLES)])
    put(run, "a", 4, 0)
    found = Relations(run, ["a"], [[[]] * 4])
    assert (found.pairs, found.of_component(0, 2), found.stability(0), found.chains) == ({}, [], None, [])
