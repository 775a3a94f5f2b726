"""Correlations and maps against dense NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.analyse import matrix


@pytest.mark.parametrize(("rows", "block"), [(8192, 2048), (7, 4)])
def test_correlations_equal_numpys(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
    monkeypatch.setattr(matrix, "_ROWS", rows)
    monkeypatch.setattr(matrix, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    W = torch.rand(50, 9, generator=generator) + 100 * torch.rand(9, generator=generator)
    W[:, 3] = W[:, 1] * -2 + 7
    dense = np.corrcoef(W.double().numpy().T)
    numbers, values = matrix.strongest_correlations(W, 4)
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
    numbers, values = matrix.strongest_correlations(W, 8)
    assert numbers.shape == (3, 2)
    assert values[1].tolist() == [0, 0]


def test_one_component_has_no_relatives() -> None:
    assert matrix.strongest_correlations(torch.rand(5, 1), 8)[0].shape == (1, 0)


def test_alike_components_are_near_on_the_map() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = torch.rand(200, 3, generator=generator)
    W = kinds.repeat(1, 4) + 0.01 * torch.rand(200, 12, generator=generator)  # component j is of kind j mod 3
    places = matrix.embed(W)
    distances = torch.cdist(places, places)
    same = (torch.arange(12)[:, None] - torch.arange(12)) % 3 == 0
    assert distances[same].max() < 0.2 * distances[~same].min()
    assert matrix.embed(W[:, :0]).shape == (0, 2)
    assert matrix.embed(W[:, :2]).shape == (2, 2)
    assert torch.isfinite(matrix.embed(torch.zeros(5, 4))).all()


def test_distances_on_the_map_are_those_of_classical_scaling() -> None:
    W = torch.rand(40, 3, dtype=torch.float64)  # three points always fit into a plane
    unit = W / W.norm(dim=0)
    places = matrix.embed(W.float())
    assert torch.cdist(places, places).numpy() == pytest.approx(torch.cdist(unit.T, unit.T).numpy(), abs=1e-3)
