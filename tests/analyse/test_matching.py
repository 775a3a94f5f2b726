"""Matching, splits and similarity against brute force; correlations and maps against dense NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from npeff.analyse import matching


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
    rows, columns = matching.match(similarity.T)
    assert columns[rows.argsort()].tolist() == order.tolist()


def test_splits_by_hand() -> None:
    coarse = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]])
    fine = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.2], [0, 0, 0, 1]])
    parent = matching.parents(matching.coefficient_similarity(coarse, fine))
    assert parent == [0, 0, 1, 2]
    assert matching.preserved(parent, ["yes", None, "no"], ["yes", "no", "no", "no"]) == (2, 3)
    assert matching.preserved(parent, [None] * 3, ["yes"] * 4) == (0, 0)


def test_a_component_that_shares_no_example_has_no_parent() -> None:
    coarse = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 0]])
    fine = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1]])  # the third is dead
    parent = matching.parents(matching.coefficient_similarity(coarse, fine))
    assert parent == [0, 1, matching.NOBODY, matching.NOBODY]
    # without a parent there is no tuning to keep or to lose
    assert matching.preserved(parent, ["yes", "no"], ["yes", None, None, "no"]) == (1, 2)


def test_means_and_deviations() -> None:
    assert matching.mean_and_deviation([1, 2, 3]) == (2, 1)
    assert matching.mean_and_deviation([5]) == (5, 0)


@pytest.mark.parametrize("rows", [8192, 7])
def test_correlations_equal_numpys(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(matching, "_ROWS", rows)
    generator = torch.Generator().manual_seed(0)
    W = torch.rand(50, 9, generator=generator) + 100 * torch.rand(9, generator=generator)
    W[:, 3] = W[:, 1] * -2 + 7
    dense = np.corrcoef(W.double().numpy().T)
    numbers, values = matching.strongest_correlations(W, 4)
    for j in range(9):
        # components 1 and 3 correlate equally with all others, so only sizes have a definite order
        best = sorted((abs(dense[j, k]) for k in range(9) if k != j), reverse=True)[:4]
        assert values[j].abs().tolist() == pytest.approx(best, abs=1e-4)
        assert values[j].tolist() == pytest.approx([dense[j, k] for k in numbers[j]], abs=1e-4)
    assert numbers[3, 0] == 1
    assert values[3, 0] == pytest.approx(-1, abs=1e-4)


def test_a_constant_component_correlates_with_nothing() -> None:
    W = torch.rand(300, 3)
    W[:, 1] = 0.1
    numbers, values = matching.strongest_correlations(W, 8)
    assert numbers.shape == (3, 2)
    assert values[1].tolist() == [0, 0]


def test_one_component_has_no_relatives() -> None:
    assert matching.strongest_correlations(torch.rand(5, 1), 8)[0].shape == (1, 0)


def test_alike_components_are_near_on_the_map() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = torch.rand(200, 3, generator=generator)
    W = kinds.repeat(1, 4) + 0.01 * torch.rand(200, 12, generator=generator)  # component j is of kind j mod 3
    places = matching.embed(W)
    distances = torch.cdist(places, places)
    same = (torch.arange(12)[:, None] - torch.arange(12)) % 3 == 0
    assert distances[same].max() < 0.2 * distances[~same].min()
    assert matching.embed(W[:, :0]).shape == (0, 2)
    assert matching.embed(W[:, :2]).shape == (2, 2)
    assert torch.isfinite(matching.embed(torch.zeros(5, 4))).all()


def test_distances_on_the_map_are_those_of_classical_scaling() -> None:
    W = torch.rand(40, 3, dtype=torch.float64)  # three points always fit into a plane
    unit = W / W.norm(dim=0)
    places = matching.embed(W.float())
    assert torch.cdist(places, places).numpy() == pytest.approx(torch.cdist(unit.T, unit.T).numpy(), abs=1e-3)
