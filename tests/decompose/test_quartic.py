import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from npeff.decompose.quartic import Quartic, along
from tests.decompose.reference import losses


@pytest.mark.parametrize("seed", range(5))
def test_is_the_loss_along_the_line(seed):
    rng = np.random.default_rng(seed)
    H, D, G = (rng.standard_normal((n, 7)) for n in (4, 4, 15))
    W = rng.random((15, 4))
    F = np.einsum("ip,iq->ipq", G, G)
    S, K = W.T @ W, H @ H.T
    T = np.einsum("ij,ij,ip->jp", W, G @ H.T, G)
    slope = ((T - (S * K) @ H) * D).sum()
    curvature = (W * (G @ D.T) ** 2).sum()
    line = along(*(torch.from_numpy(x) for x in (S, K, H @ D.T, D @ D.T)), slope, curvature)

    def dense(alpha):
        return losses(F, W, H + alpha * D).sum()

    for alpha in (-0.7, 0.1, 1.0, 2.5):
        assert line(alpha) == pytest.approx(dense(alpha) - dense(0), rel=1e-9, abs=1e-8)
    best = line.best_step()
    grid = np.linspace(0, 5, 2001)
    start = grid[np.argmin([dense(alpha) for alpha in grid])]
    found = minimize_scalar(dense, bounds=(max(start - 0.01, 0), start + 0.01), method="bounded")
    assert dense(best) <= found.fun + 1e-8 * abs(found.fun)


def test_never_leaves_for_something_worse():
    assert Quartic(1.0, 1.0, 0.0, 1.0).best_step() == 0.0
    assert Quartic(0.0, 0.0, 0.0, 0.0).best_step() == 0.0
    assert Quartic(float("nan"), 0.0, 0.0, 1.0).best_step() == 0.0
    assert Quartic(-1.0, 1.0, 0.0, 0.0).best_step() == pytest.approx(0.5)
    # two minima: the far one is lower
    assert Quartic(-0.1, 2.0, -3.0, 1.0).best_step() > 1.5
