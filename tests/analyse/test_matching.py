"""Matching, splits and similarity against brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from npeff.analyse import matching
from npeff.analyse.stability import StabilityConfig, stability
from npeff.errors import UserError
from npeff.files import read_json
from tests.synthetic import make_run


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return abs(float(a @ b)) / norms if norms else 0.0


@pytest.mark.parametrize("rows", [3, 8192])
def test_similarities_equal_plain_cosines(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(matching, "_ROWS", rows)
    A, B = torch.randn(10, 4), torch.randn(10, 5)
    A[:, 2] = 0
    plain = [[cosine(A[:, i], B[:, j]) for j in range(5)] for i in range(4)]
    assert matching.coefficient_similarity(A, B).numpy() == pytest.approx(np.array(plain), abs=1e-6)
    assert matching.component_similarity(A.T, B.T).numpy() == pytest.approx(np.array(plain), abs=1e-6)
    with pytest.raises(ValueError, match="examples"):
        matching.coefficient_similarity(A, B[:9])


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3)])
def test_matching_is_the_best_of_all(shape: tuple[int, int]) -> None:
    similarity = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))
    small, wide = (similarity, shape[1]) if shape[0] <= shape[1] else (similarity.T, shape[0])
    best = max(
        sum(float(small[i, j]) for i, j in enumerate(order))
        for order in itertools.permutations(range(wide), len(small))
    )
    assert matching.matched_similarity(similarity) == pytest.approx(best / min(shape), rel=1e-6)
    plain = np.mean([max(row) for row in [*similarity.tolist(), *similarity.T.tolist()]])
    assert matching.mean_best_similarity(similarity) == pytest.approx(plain, rel=1e-6)


def test_the_same_components_in_another_order_and_sign_are_the_same() -> None:
    W = torch.randn(20, 6)
    order = torch.randperm(6)
    similarity = matching.coefficient_similarity(W, -2 * W[:, order])
    assert matching.matched_similarity(similarity) == pytest.approx(1)
    assert matching.match(similarity.T)[1].tolist() == order.tolist()


def test_splits_by_hand() -> None:
    coarse = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]])
    fine = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.2], [0, 0, 0, 1]])
    parent = matching.parents(coarse, fine)
    assert parent.tolist() == [0, 0, 1, 2]
    assert matching.preserved(parent, ["yes", None, "no"], ["yes", "no", "no", "no"]) == (2, 3)
    assert matching.preserved(parent, [None] * 3, ["yes"] * 4) == (0, 0)


def test_means_and_deviations() -> None:
    assert matching.mean_and_deviation([1, 2, 3]) == (2, 1)
    assert matching.mean_and_deviation([5]) == (5, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(80)])
    config = StabilityConfig(str(run.path), components=(8, 4), seeds=(0, 1), top=6)
    directory = stability(config)
    found = read_json(directory / "stability.json")
    assert [row["components"] for row in found["seeds"]] == [4, 8]
    assert all(row["pairs"] == 1 for row in found["seeds"])
    assert all(0 < row["coefficients"] <= 1 and 0 < row["pseudo_fishers"] <= 1 for row in found["seeds"])
    assert found["seeds"][0]["pseudo_fishers"] > 0.7  # four components were planted
    (split,) = found["splits"]
    assert (split["coarse"], split["fine"]) == (4, 8)
    assert sorted(j for children in split["children"] for j in children) == list(range(8))
    assert (directory / "stability.md").read_text() in capsys.readouterr().out
    before = (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns
    stability(config)
    assert (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns == before


def test_options() -> None:
    for options in ({"seeds": ()}, {"seeds": (1, 1)}, {"seeds": (1,), "components": (5,)}):
        with pytest.raises(UserError):
            StabilityConfig("run", **options)  # type: ignore[arg-type]
