from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from npeff.decompose.blocks import Blocks, Rotation, ShortRows, start_components
from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import Als, Npeff, best_step, least_replaceable, loss_along, thinned_start
from npeff.decompose.solver import inverse
from npeff.store.rows import ArrayRows
from tests.decompose.reference import losses, pefs, planted, ragged


def dense_loss(fitted, source):
    F = pefs(source)
    nonzero = (np.linalg.norm(F, axis=(1, 2)) > 0).sum()
    return losses(F, fitted.coefficients.double().numpy(), fitted.components.double().numpy()).sum() / nonzero


@pytest.mark.parametrize("memory_gb", [0.0, 1.0])
@pytest.mark.parametrize("init", ["kmeans++", "random"])
def test_loss_falls_and_is_that_of_the_dense_matrices(memory_gb, init):
    source = ragged(examples=60)
    fitted = Npeff(FitConfig(components=6, max_passes=40, memory_gb=memory_gb, init=init, chunk=13)).fit(source)
    steps = [step.loss for step in fitted.history.steps]
    assert all(after <= before + 1e-6 for before, after in pairwise(steps))
    assert steps[-1] < steps[0]
    assert fitted.history.loss == pytest.approx(dense_loss(fitted, source), abs=1e-6)
    torch.testing.assert_close(fitted.components.norm(dim=1), torch.ones(6))
    assert (fitted.coefficients >= 0).all()


def test_ends_in_a_minimum():
    source = ragged(examples=40, dim=6)
    fitted = Npeff(FitConfig(components=3, tolerance=0, max_passes=400)).fit(source)
    F, W = pefs(source), fitted.coefficients.double().numpy()
    H = fitted.components.double().numpy()
    better = minimize(lambda h: losses(F, W, h.reshape(H.shape)).sum(), H.ravel(), method="BFGS")
    assert losses(F, W, H).sum() <= better.fun * (1 + 1e-4)


def test_keeping_recomputing_and_rotating_give_the_same():
    _, source = planted(0, examples=40, dim=200)
    assert Rotation.pays(source, 1e9)
    config = FitConfig(components=8, max_passes=12, tolerance=0, chunk=11)
    rotated = Npeff(config).fit(source)
    blocks = Blocks(source, 11, torch.device("cpu"))
    for keep in (True, False):
        solver = Als(blocks, thinned_start(blocks, config, keep), config, keep)
        solver.run(quiet=True)
        H = torch.nn.functional.normalize(solver.H, dim=1)
        assert ((H * rotated.components).sum(dim=1).abs() > 0.999).all()
        assert solver.state.history.loss == pytest.approx(rotated.history.steps[12].loss, abs=5e-6)


def test_short_rows_are_signed_sums_of_entries():
    """Of unit vectors they are the map itself: a place and a sign for every entry, as many entries for every place."""
    S = ShortRows(ArrayRows(torch.eye(83)), chunk=20).rows
    assert S.shape == (83, 10)
    assert ((S != 0).sum(0) == 8).all()
    assert ((S != 0).sum(1) <= 1).all()
    assert set(S.unique().tolist()) == {-1.0, 0.0, 1.0}
    source = ragged(examples=30, dim=83)
    short = ShortRows(source, chunk=7)
    torch.testing.assert_close(short.read(3, 19), source.read(3, 19) @ S)
    assert (short.ranks == source.ranks).all()


@pytest.fixture
def short_rows(monkeypatch):
    """Fits of more than 100 rows with at least 256 entries begin with shorter ones."""
    monkeypatch.setattr("npeff.decompose.blocks.MOST_ROWS", 100)
    monkeypatch.setattr("npeff.decompose.blocks.SHORTEST", 32)


@pytest.mark.parametrize("memory_gb", [0.00008, 1.0])
def test_a_fit_that_begins_with_short_rows_ends_as_low(memory_gb, short_rows, monkeypatch):
    """Also where there is memory for short rows, but not for products with the components."""
    U, source = planted(0, examples=300, dim=256, factors=12)
    config = FitConfig(components=12, chunk=50, memory_gb=memory_gb)
    fitted = Npeff(config).fit(source)
    stages = [step.stage for step in fitted.history.steps]
    assert stages == sorted(stages, reverse=True)
    assert stages.count("short") > 5
    assert 3 <= stages.count("") <= 15
    fine = [step.loss for step in fitted.history.steps if not step.stage]
    assert all(after <= before + 1e-6 for before, after in pairwise(fine))
    assert fitted.history.loss == pytest.approx(dense_loss(fitted, source), abs=1e-6)
    assert ((U @ fitted.components.T).abs().amax(1) > 0.99).all()
    monkeypatch.setattr(ShortRows, "pays", lambda *_: False)
    plain = Npeff(config).fit(source)
    assert "short" not in {step.stage for step in plain.history.steps}
    assert fitted.history.loss <= plain.history.loss * 1.001


def test_what_is_taken_over_from_short_rows_is_the_same_sum_of_rows(short_rows):
    """Where the short rows are the rows themselves, a settled fit's components do not move."""
    _, source = planted(1, examples=120, dim=40)
    config = FitConfig(components=8, chunk=50, tolerance=0, max_passes=200)
    blocks = Blocks(source, 50, torch.device("cpu"))
    first = Als(blocks, thinned_start(blocks, config, True), config, True)
    first.run(quiet=True)
    second = Als(blocks, torch.zeros_like(first.H), config, True)
    second.take_over(first)
    torch.testing.assert_close(second.H, first.H, atol=2e-3, rtol=0)
    assert second.state.history.steps == first.state.history.steps


@pytest.mark.parametrize("seed", range(3))
def test_finds_planted_components(seed):
    U, source = planted(seed)
    fitted = Npeff(FitConfig(components=8, seed=seed)).fit(source)
    assert ((U @ fitted.components.T).abs().amax(dim=1) > 0.95).float().mean() >= 7 / 8
    assert fitted.history.ending == "converged"


def superposed(seed, features=40, hidden=10, examples=1000, density=0.05):
    """The direction of each column of W, and rows ∂x̂/∂W of x̂ = WᵀWx at features of sparse x ≥ 0, by autograd."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.nn.functional.normalize(torch.randn(hidden, features, generator=generator), dim=0)
    x = torch.rand(examples, features, generator=generator) * (
        torch.rand(examples, features, generator=generator) < density
    )

    def used(W, x):
        return (x @ W.T @ W) * (x > 0)

    jacobians = torch.func.vmap(torch.func.jacrev(used), (None, 0))(W, x).flatten(2)
    columns = torch.zeros(features, hidden, features)
    columns[torch.arange(features), :, torch.arange(features)] = W.T
    kept = x > 0
    return columns.flatten(1), ArrayRows(jacobians[kept], kept.sum(dim=1).numpy())


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_no_mechanism_is_shared_while_another_has_none(seed):
    U, source = superposed(seed)
    usual = Als(Blocks(source, 4096, torch.device("cpu"), 1e9), start_components(source, 40, "kmeans++", seed),
                FitConfig(components=40), True)  # fmt: skip
    usual.run(quiet=True)
    fitted = Npeff(FitConfig(components=40, seed=seed)).fit(source)
    assert fitted.history.loss < usual.state.history.loss
    assert (U @ fitted.components.T).abs().amax(dim=1).min() > 0.98
    H = torch.nn.functional.normalize(usual.H, dim=1)
    assert (U @ H.T).abs().amax(dim=1).min() < 0.5


def test_the_start_looks_at_some_of_many_examples(monkeypatch):
    U, source = planted(0)
    config = FitConfig(components=8, chunk=50)
    blocks = Blocks(source, 50, torch.device("cpu"))
    whole = thinned_start(blocks, config, keep=False)
    monkeypatch.setattr("npeff.decompose.npeff.START_EXAMPLES", 10)
    assert len(source.ranks) > 80
    few = thinned_start(blocks, config, keep=True)
    assert few.shape == whole.shape
    assert not torch.equal(few, whole)
    found = (U @ torch.nn.functional.normalize(few, dim=1).T).abs().amax(dim=1)
    assert (found > 0.9).float().mean() >= 7 / 8


def test_those_that_a_twin_can_stand_in_for_go_first():
    rng = np.random.default_rng(0)
    H = np.eye(6)[[0, 0, 1, 2, 3]] + 0.01 * rng.standard_normal((5, 6))
    W = rng.random((50, 5)) * [1, 2, 1, 0.01, 1]
    S, K = torch.from_numpy(W.T @ W), torch.from_numpy(H @ H.T)
    assert least_replaceable(S, K, 4) == [0, 1, 2, 4]  # hardly used
    assert least_replaceable(S, K, 3) == [1, 2, 4]  # the weaker twin
    # brute force: what is lost when the best other one takes over, for the first that goes
    F = np.einsum("ij,jp,jq->jipq", W, H, H)
    lost = [
        min(
            np.square(F[j] - np.einsum("ipq,p,q->i", F[j], u, u)[:, None, None] * np.outer(u, u)).sum()
            for u in (H[k] / np.linalg.norm(H[k]) for k in range(5) if k != j)
        )
        for j in range(5)
    ]
    assert {*range(5)} - {*least_replaceable(S, K, 4)} == {int(np.argmin(lost))}


def test_same_seed_same_bits_and_other_seed_other_start():
    _, source = planted(1)
    one, two, other = (Npeff(FitConfig(components=8, seed=s, max_passes=5)).fit(source) for s in (0, 0, 1))
    assert torch.equal(one.components, two.components)
    assert not torch.equal(one.components, other.components)


def test_a_zero_pef_gets_no_coefficients_and_no_loss():
    _, source = planted(2, examples=50)
    rows = source.rows.clone()
    rows[:4] = 0  # two examples of rank 2
    fitted = Npeff(FitConfig(components=8)).fit(ArrayRows(rows, source.ranks))
    assert (fitted.coefficients[:2] == 0).all()
    assert (fitted.residuals[:2] == 0).all()
    assert fitted.history.loss == pytest.approx(float(fitted.residuals[2:].mean()), rel=1e-5)


def test_dead_components_start_again():
    _, source = planted(3)
    config = FitConfig(components=8, checkpoint_passes=3, tolerance=0, max_passes=30)
    start = start_components(source, 8, "kmeans++", 0)
    start[5:] = 0
    solver = Als(Blocks(source, 64, torch.device("cpu"), 1e9), start, config, True)
    solver.run(quiet=True)
    assert solver.state.history.reseeded >= 3
    assert (solver.S.diagonal() > 0).all()
    alive = Npeff(config).fit(source)
    assert solver.state.history.loss < 1.5 * alive.history.loss + 0.05


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-35, 1e-12, 1.0, 1e18, 1e37]), st.booleans())
def test_never_nan_on_finite_rows(seed, size, copies):
    rng = np.random.default_rng(seed)
    ranks = rng.integers(0, 3, size=12)
    ranks[0] = 1
    ranks[1:5] = np.maximum(ranks[1:5], 1)
    rows = rng.standard_normal((int(ranks.sum()), 4)) * size ** rng.random((int(ranks.sum()), 1))
    if copies:
        rows[:] = rows[0]
    fitted = Npeff(FitConfig(components=4, max_passes=25, chunk=5)).fit(
        ArrayRows(torch.from_numpy(rows).float(), ranks)
    )
    for values in (fitted.components, fitted.coefficients, fitted.residuals):
        assert torch.isfinite(values).all()
    assert all(np.isfinite(step.loss) for step in fitted.history.steps)


def test_transform_gives_back_the_coefficients_of_the_fit():
    _, source = planted(4)
    fitted = Npeff(FitConfig(components=8)).fit(source)
    torch.testing.assert_close(fitted.transform(source), fitted.coefficients, atol=2e-3, rtol=0)


def test_inverse_survives_dead_and_equal_components():
    M = torch.tensor([[2.0, 2, 0], [2, 2, 0], [0, 0, 0]], dtype=torch.float64)
    assert torch.isfinite(inverse(M)).all()
    assert (inverse(M)[2] == 0).all()
    A = torch.rand(5, 5, dtype=torch.float64)
    M = A @ A.T + torch.eye(5)
    torch.testing.assert_close(inverse(M) @ M, torch.eye(5, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_quartic_is_the_loss_along_the_line(seed):
    rng = np.random.default_rng(seed)
    H, D, G = (rng.standard_normal((n, 7)) for n in (4, 4, 15))
    W = rng.random((15, 4))
    F = np.einsum("ip,iq->ipq", G, G)
    S, K = W.T @ W, H @ H.T
    T = np.einsum("ij,ij,ip->jp", W, G @ H.T, G)
    slope = ((T - (S * K) @ H) * D).sum()
    curvature = (W * (G @ D.T) ** 2).sum()
    line = loss_along(*(torch.from_numpy(x) for x in (S, K, H @ D.T, D @ D.T)), slope, curvature)

    def dense(alpha):
        return losses(F, W, H + alpha * D).sum()

    for alpha in (-0.7, 0.1, 1.0, 2.5):
        assert np.polyval([*reversed(line), 0], alpha) == pytest.approx(dense(alpha) - dense(0), rel=1e-9, abs=1e-8)
    best = best_step(*line)
    grid = np.linspace(0, 5, 2001)
    start = grid[np.argmin([dense(alpha) for alpha in grid])]
    nearby = minimize_scalar(dense, bounds=(max(start - 0.01, 0), start + 0.01), method="bounded")
    assert dense(best) <= nearby.fun + 1e-8 * abs(nearby.fun)


def test_a_step_never_leaves_for_something_worse():
    assert best_step(1.0, 1.0, 0.0, 1.0) == 0.0
    assert best_step(0.0, 0.0, 0.0, 0.0) == 0.0
    assert best_step(float("nan"), 0.0, 0.0, 1.0) == 0.0
    assert best_step(-1.0, 1.0, 0.0, 0.0) == pytest.approx(0.5)
    # two minima: the far one is lower
    assert best_step(-0.1, 2.0, -3.0, 1.0) > 1.5
