import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import Npeff
from npeff.decompose.solver import example_losses, fit_coefficients
from tests.decompose.reference import losses, pefs, ragged


def systems(seed=0, components=11, examples=30, dim=9):
    rng = np.random.default_rng(seed)
    H = rng.standard_normal((components, dim))
    G = rng.standard_normal((examples, dim))
    Q = (H @ H.T) ** 2
    N = (H @ G.T) ** 2
    return H, G, torch.from_numpy(Q), torch.from_numpy(N)


def test_agrees_with_nnls_on_the_dense_matrices():
    H, G, Q, N = systems()
    W = fit_coefficients(torch.zeros_like(N), N, Q, 5000).T.numpy()
    design = np.stack([np.outer(h, h).ravel() for h in H], axis=1)
    exact = np.array([nnls(design, np.outer(g, g).ravel())[0] for g in G])
    F = np.einsum("ip,iq->ipq", G, G)
    np.testing.assert_allclose(losses(F, W, H), losses(F, exact, H), rtol=1e-6)
    assert (W == 0).any()


def test_a_coefficient_at_zero_recovers():
    _, _, Q, N = systems()
    from_zero = fit_coefficients(torch.zeros_like(N), N, Q, 3000)
    from_one = fit_coefficients(torch.ones_like(N), N, Q, 3000)
    torch.testing.assert_close(from_zero, from_one, rtol=1e-4, atol=1e-6)


def test_every_sweep_lowers_the_loss():
    _, _, Q, N = systems(components=20)
    W, norms = torch.rand_like(N), torch.zeros(N.shape[1])
    before = example_losses(W, N, Q, norms)
    for _ in range(10):
        after = example_losses(fit_coefficients(W, N, Q, 1), N, Q, norms)
        assert (after <= before + 1e-9).all()
        before = after


def test_a_zero_component_gets_zero():
    _, _, Q, N = systems()
    Q[3], Q[:, 3], N[3] = 0, 0, 0
    W = fit_coefficients(torch.ones_like(N), N, Q, 5)
    assert (W[3] == 0).all()
    assert torch.isfinite(W).all()


def test_example_losses_are_those_of_the_dense_matrices():
    source = ragged()
    fitted = Npeff(FitConfig(components=5, max_passes=3)).fit(source)
    dense = losses(pefs(source), fitted.coefficients.double().numpy(), fitted.components.double().numpy())
    np.testing.assert_allclose(fitted.residuals, dense, atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_left_as_they_were(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, _, Q, N = systems()
        fit_coefficients(torch.zeros_like(N), N, Q, 1)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
