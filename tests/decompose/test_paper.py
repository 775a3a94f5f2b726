import numpy as np
import pytest
import torch

from npeff.decompose.blocks import Blocks
from npeff.decompose.config import FitConfig, PaperConfig
from npeff.decompose.npeff import Npeff
from npeff.decompose.solver import Paper, start
from npeff.store.rows import ArrayRows
from npeff.utils.errors import UserError
from tests.decompose.reference import ragged


def algorithm_1(G, H, W, frozen_rate, joint_rate, N1, N2):
    """The paper's listing, line by line; G [m, r, n] is padded with zero rows."""
    H, W, losses = H.copy(), W.copy(), []
    for t in range(1, N1 + N2 + 1):
        B = np.einsum("ijl,kl->ijk", G, H)
        if t >= N1:
            N = (B**2).sum(axis=1)
            D = W @ ((H @ H.T) * (H @ H.T))
            W = W * N / D
        T1 = 4 * ((W.T @ W) * (H @ H.T)) @ H
        T2 = -4 * np.einsum("ji,jki,jkl->il", W, B, G)
        recon = np.einsum("ij,jp,jq->ipq", W, H, H)
        losses.append(((np.einsum("ijp,ijq->ipq", G, G) - recon) ** 2).sum())
        H = H - (joint_rate if t >= N1 else frozen_rate) * (T1 + T2)
    return H, W, losses


def padded(source):
    G = np.zeros((len(source.ranks), max(source.ranks), source.dim))
    for i, rank in enumerate(source.ranks):
        rows = source.read(i, i + 1).double().numpy()
        G[i, :rank] = rows / np.sqrt(np.linalg.norm(rows.T @ rows))
    return G


@pytest.mark.parametrize("chunk", [4, 1000])
def test_is_algorithm_1(chunk):
    source = ragged(examples=25, ranks=(1, 2, 3))
    options = PaperConfig(frozen_steps=12, joint_steps=20, frozen_rate=2e-3, joint_rate=5e-3)
    blocks = Blocks(source, chunk, torch.device("cpu"))
    H, W = start(blocks, 4, seed=0)
    solver = Paper(blocks, H, W, FitConfig(components=4, paper=options))
    solver.run(quiet=True)
    expected = algorithm_1(padded(source), H.double().numpy(), W.double().numpy(), 2e-3, 5e-3, 12, 20)
    np.testing.assert_allclose(solver.H, expected[0], atol=2e-5)
    np.testing.assert_allclose(torch.cat(solver.coefficient_parts()), expected[1], rtol=2e-3, atol=2e-5)
    np.testing.assert_allclose([step.loss * 25 for step in solver.state.history.steps], expected[2], rtol=1e-5)


def test_starts_as_the_appendix_says():
    blocks = Blocks(ArrayRows(torch.randn(4000, 50)), 1000, torch.device("cpu"))
    H, W = start(blocks, 40, seed=1)
    assert float(H.std()) == pytest.approx(np.sqrt(2) / np.sqrt(40 * 50), rel=0.05)
    assert float(H.mean()) == pytest.approx(0, abs=1e-3)
    assert float(W.min()) >= 0
    assert float(W.max()) <= 1
    assert float(W.mean()) == pytest.approx(0.5, abs=0.01)


def test_tau_ends_both_stages_early():
    source = ragged(examples=30, ranks=(1, 2))
    slow = PaperConfig(frozen_steps=200, joint_steps=300, frozen_rate=1e-2, joint_rate=1e-2)
    quick = PaperConfig(frozen_steps=200, joint_steps=300, frozen_rate=1e-2, joint_rate=1e-2, tau=0.05)
    full = Npeff(FitConfig(components=3, solver="paper", paper=slow)).fit(source)
    early = Npeff(FitConfig(components=3, solver="paper", paper=quick)).fit(source)
    stages = [[step.stage for step in run.history.steps[:-1]] for run in (full, early)]
    assert (stages[0].count("frozen"), stages[0].count("joint")) == (199, 301)
    assert 0 < stages[1].count("frozen") < 199
    assert 0 < stages[1].count("joint") < 301
    for stage in ("frozen", "joint"):
        assert stages[1].count(stage) % 10 == 0
    assert (full.history.ending, early.history.ending) == ("all steps taken", "converged")


def test_a_rate_that_is_too_high_is_explained():
    options = PaperConfig(frozen_steps=10, joint_steps=100, frozen_rate=10.0, joint_rate=10.0)
    with pytest.raises(UserError, match=r"not finite any more.*joint_rate.*als"):
        Npeff(FitConfig(components=3, solver="paper", paper=options)).fit(ragged())


def test_coefficients_are_left_as_the_algorithm_leaves_them():
    source = ragged(examples=25, ranks=(1, 2))
    options = PaperConfig(frozen_steps=5, joint_steps=5, frozen_rate=2e-3, joint_rate=5e-3)
    config = FitConfig(components=4, solver="paper", paper=options)
    solver = Paper(blocks := Blocks(source, 1024, torch.device("cpu")), *start(blocks, 4, 0), config)
    solver.run(quiet=True)
    fitted = Npeff(config).fit(source)
    norms = solver.H.norm(dim=1)
    torch.testing.assert_close(fitted.components, solver.H / norms[:, None])
    torch.testing.assert_close(fitted.coefficients, torch.cat(solver.coefficient_parts()) * norms.square())
