"""Correlations, energies and shares against dense NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.analyse import matrix
from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import Npeff
from npeff.store.rows import ArrayRows


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


def test_energy_and_density() -> None:
    energy, used = matrix.energy_and_density(torch.tensor([[3.0, 0], [0, 4], [0, -0.0]]))
    assert energy.tolist() == pytest.approx([9 / 25, 16 / 25])
    assert used.tolist() == [1, 1]
    assert matrix.energy_and_density(torch.zeros(2, 2))[0].tolist() == [0, 0]


def test_shares_of_npeff_are_inner_products_with_the_fisher_and_add_up_to_what_is_explained() -> None:
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(60, 12, generator=generator)  # 30 examples of rank 2
    model = Npeff(FitConfig(components=5)).fit(ArrayRows(G, [2] * 30))
    overlaps = matrix.overlap(model.components, "npeff")
    assert overlaps is not None
    found = matrix.shares(model.coefficients, overlaps)
    F = torch.stack([g.T @ g for g in G.view(30, 2, 12).double()])
    F /= F.flatten(1).norm(dim=1)[:, None, None]
    H = model.components.double()
    plain = model.coefficients * torch.einsum("nij,cj,ci->nc", F, H, H)
    assert found.numpy() == pytest.approx(plain.numpy(), abs=2e-3)
    assert found.sum(dim=1).numpy() == pytest.approx((1 - model.residuals).numpy(), abs=2e-3)
    assert (found >= 0).all()


def test_shares_of_an_svd_are_squared_coefficients() -> None:
    components = torch.linalg.qr(torch.randn(6, 3))[0].T
    overlaps = matrix.overlap(components, "svd-gradients")
    assert overlaps is not None
    W = torch.randn(4, 3)
    assert matrix.shares(W, overlaps).numpy() == pytest.approx(W.square().numpy(), abs=1e-5)


@pytest.mark.parametrize("method", ["clusters", "sae"])
def test_methods_that_do_not_add_up_have_no_shares(method: str) -> None:
    assert matrix.overlap(torch.eye(2), method) is None
