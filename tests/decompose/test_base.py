"""Energy, overlap and shares against dense products."""

from __future__ import annotations

import pytest
import torch

from npeff.decompose import base
from npeff.decompose.base import Decomposition
from npeff.decompose.config import FitConfig, Method
from npeff.decompose.methods import create
from npeff.decompose.npeff import Npeff
from npeff.store.rows import ArrayRows


def with_coefficients(method: Method, coefficients: torch.Tensor, components: torch.Tensor) -> Decomposition:
    made = create(FitConfig(method=method, components=len(components)))
    made.coefficients, made.components = coefficients, components
    return made


@pytest.mark.parametrize("examples", [8192, 2])
def test_energy_and_examples_that_use_a_component(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    monkeypatch.setattr(base, "_EXAMPLES", examples)
    made = with_coefficients("sae", torch.tensor([[3.0, 0], [0, 4], [0, -0.0]]), torch.eye(2))
    assert made.energy.tolist() == pytest.approx([9 / 25, 16 / 25])
    assert made.used.tolist() == [1, 1]
    assert with_coefficients("sae", torch.zeros(2, 2), torch.eye(2)).energy.tolist() == [0, 0]


def test_shares_of_npeff_are_inner_products_with_the_fisher_and_add_up_to_what_is_explained() -> None:
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(60, 12, generator=generator)  # 30 examples of rank 2
    made = Npeff(FitConfig(components=5)).fit(ArrayRows(G, [2] * 30))
    shares = made.shares(made.coefficients)
    assert shares is not None
    F = torch.stack([g.T @ g for g in G.view(30, 2, 12).double()])
    F /= F.flatten(1).norm(dim=1)[:, None, None]
    H = made.components.double()
    plain = made.coefficients * torch.einsum("nij,cj,ci->nc", F, H, H)
    assert shares.numpy() == pytest.approx(plain.numpy(), abs=2e-3)
    assert shares.sum(dim=1).numpy() == pytest.approx((1 - made.residuals).numpy(), abs=2e-3)
    assert (shares >= 0).all()
    one = made.shares(made.coefficients[3:9], component=2)
    assert one is not None
    assert one.numpy() == pytest.approx(shares[3:9, 2].numpy(), abs=1e-6)


def test_overlap_follows_the_components() -> None:
    made = with_coefficients("gnpeff", torch.ones(1, 2), torch.tensor([[1.0, 0], [0.6, 0.8]]))
    for expected in ([[1, 0.36], [0.36, 1]], [[1, 0.0], [0, 1]]):
        overlap = made.overlap()
        assert overlap is not None
        assert overlap.numpy() == pytest.approx(torch.tensor(expected).numpy(), abs=1e-6)
        made.components = torch.eye(2)


def test_shares_of_an_svd_are_squared_coefficients() -> None:
    W = torch.randn(4, 3)
    made = with_coefficients("svd-gradients", W, torch.linalg.qr(torch.randn(6, 3))[0].T)
    shares = made.shares(W)
    assert shares is not None
    assert shares.numpy() == pytest.approx(W.square().numpy(), abs=1e-5)


@pytest.mark.parametrize("method", ["clusters", "sae"])
def test_methods_that_do_not_add_up_have_no_shares(method: Method) -> None:
    made = with_coefficients(method, torch.ones(1, 2), torch.eye(2))
    assert made.overlap() is None
    assert made.shares(made.coefficients) is None
