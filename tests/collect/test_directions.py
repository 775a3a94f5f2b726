"""Directions against the brute-force Fisher of a tiny model, and against plain linear algebra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from npeff.collect.config import DirectionsConfig, parse_directions
from npeff.collect.directions import (
    DENSE_ANSWERS,
    combine_to_predicted,
    make_directions,
    most_rows,
    predicted,
    projection,
    reduce_rank,
    sampling,
    spectral,
    split_length,
)
from npeff.utils.errors import UserError


def probabilities(batch, answers, spread=2.0, seed=0):
    return (torch.randn(batch, answers, generator=torch.Generator().manual_seed(seed)).double() * spread).softmax(1)


def covariance(p):
    return torch.diag(p) - torch.outer(p, p)


class TinyModel(nn.Module):
    """x → logits of 5 answers, 47 parameters, small enough for Fishers to be written out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 1, bias=False)).double()

    def forward(self, x):
        return self.layers[:3](x)


@pytest.fixture(scope="module")
def brute_force():
    """Per-example Jacobians J, Fishers by their definition E[∇log p ∇log pᵀ], and probabilities."""
    model = TinyModel()
    parameters = list(model.layers[:3].parameters())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2)).double() * 2
    jacobians, fishers, ps = [], [], []
    for example in x:
        log_p = model(example).log_softmax(0)
        scores = [
            torch.cat([g.flatten() for g in torch.autograd.grad(log_p[y], parameters, retain_graph=True)])
            for y in range(5)
        ]
        fishers.append(sum(log_p[y].exp() * torch.outer(s, s) for y, s in enumerate(scores)).detach())
        z = model(example)
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(v, parameters, retain_graph=True)]) for v in z]
        jacobians.append(torch.stack(rows))
        ps.append(z.softmax(0).detach())
    return torch.stack(jacobians), torch.stack(fishers), torch.stack(ps)


def fishers_of(config, jacobians, p):
    V, kept = make_directions(config, p, list(range(len(p))))
    G = V @ jacobians
    return G.mT @ G, V, kept


def test_exact_is_the_fisher(brute_force):
    jacobians, fishers, p = brute_force
    found, V, kept = fishers_of(DirectionsConfig("exact"), jacobians, p)
    torch.testing.assert_close(found, fishers, rtol=1e-9, atol=1e-12)
    assert V.shape[1] == 4
    torch.testing.assert_close(kept, torch.ones(4, dtype=torch.float64))


def test_auto_is_exact_for_few_answers(brute_force):
    jacobians, fishers, p = brute_force
    found, _, _ = fishers_of(DirectionsConfig(), jacobians, p)
    torch.testing.assert_close(found, fishers, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_spectral_is_the_best_part_of_s(brute_force, count):
    jacobians, _, p = brute_force
    found, V, kept = fishers_of(DirectionsConfig(f"spectral:{count}"), jacobians, p)
    for i in range(len(p)):
        values, vectors = np.linalg.eigh(covariance(p[i]).numpy())
        best = (vectors[:, -count:] * values[-count:]) @ vectors[:, -count:].T
        np.testing.assert_allclose((V[i].T @ V[i]).numpy(), best, atol=1e-12)
        np.testing.assert_allclose(found[i], jacobians[i].numpy().T @ best @ jacobians[i].numpy(), atol=1e-10)
        assert float(kept[i]) == pytest.approx(values[-count:].sum() / values.sum())


@pytest.mark.parametrize("kind", ["projection", "sampling"])
def test_random_directions_are_right_on_average(brute_force, kind):
    """The mean over many seeds lies within five standard errors of the Fisher."""
    jacobians, fishers, p = brute_force
    samples = torch.stack(
        [fishers_of(DirectionsConfig(f"{kind}:4", directions_seed=s), jacobians, p)[0] for s in range(600)]
    )
    error = (samples.mean(0) - fishers).abs()
    standard = samples.std(0) / 600**0.5
    assert bool((error <= 5 * standard + 1e-12).all())


def test_projection_is_the_papers_formula():
    """A diag(√p) (I − 1 pᵀ) with entries of A ±1/√k: so ∇ A q, q_i = sg(√p_i) log p_i."""
    p, count = probabilities(1, 7), 3
    V = projection(p, count, [11], seed=4)[0].numpy()
    root = np.sqrt(p[0].numpy())
    centring = np.eye(7) - np.outer(np.ones(7), p[0].numpy())
    signs = np.array(np.meshgrid(*[[-1, 1]] * 7)).reshape(7, -1).T / np.sqrt(count)
    for row in V:  # brute force: one of the 128 sign patterns, and its negative has to differ, gives the row
        distances = np.abs(signs @ np.diag(root) @ centring - row).max(1)
        assert (distances < 1e-12).sum() == 1


def test_sampling_rows_are_score_directions():
    p = probabilities(2, 6)
    V = sampling(p, 8, [0, 1], seed=0) * 8**0.5
    drawn = V + p[:, None]
    assert torch.equal(drawn.round().sum(2), torch.ones(2, 8).double())
    torch.testing.assert_close(drawn, drawn.round(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("directions", ["projection:5", "sampling:5"])
def test_random_directions_do_not_depend_on_the_batch(directions):
    p = probabilities(6, 9)
    config = DirectionsConfig(directions)
    whole, _ = make_directions(config, p, [10, 11, 12, 13, 14, 15])
    alone, _ = make_directions(config, p[3:4], [13])
    torch.testing.assert_close(whole[3:4], alone, rtol=1e-12, atol=1e-15)
    other, _ = make_directions(config, p[3:4], [14])
    assert not torch.allclose(other, alone)


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("answers", [DENSE_ANSWERS + 1, 1500])
def test_spectral_of_many_answers_equals_a_whole_eigenproblem(answers, spread):
    p = probabilities(3, answers, spread)
    V = spectral(p, 8)
    for i in range(3):
        values, vectors = np.linalg.eigh(covariance(p[i]).numpy())
        best = (vectors[:, -8:] * values[-8:]) @ vectors[:, -8:].T
        error = np.linalg.norm((V[i].T @ V[i]).numpy() - best) / np.linalg.norm(best)
        assert error < 1e-3
        assert float(V[i].square().sum()) == pytest.approx(values[-8:].sum(), rel=1e-5)


def test_adaptive_share_takes_as_few_rows_as_it_may():
    p = torch.cat([probabilities(3, 40, 3.0), probabilities(3, 40, 0.3, seed=1)])
    V, kept = make_directions(DirectionsConfig("spectral:0.9"), p, list(range(6)))
    ranks = (V.abs().amax(2) > 0).sum(1)
    assert len(set(ranks.tolist())) > 1
    for i in range(6):
        values = np.linalg.eigvalsh(covariance(p[i]).numpy())[::-1]
        shares = values.cumsum() / values.sum()
        assert int(ranks[i]) == int((shares < 0.9).sum()) + 1
        assert float(kept[i]) >= 0.9
    capped, _ = make_directions(DirectionsConfig("spectral:0.9", max_rows=2), p, list(range(6)))
    assert capped.shape[1] <= 2


@given(st.integers(2, 12), st.floats(0.1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_exact_rows_hold_the_predicted_gradient(answers, spread, seed):
    p = probabilities(3, answers, spread, seed)
    V, _ = make_directions(DirectionsConfig("exact"), p, [0, 1, 2])
    mix = combine_to_predicted(V, p)
    if mix is not None:
        target = predicted(p)
        error = ((mix[:, None] @ V)[:, 0] - target).norm(dim=1)
        assert bool((error <= 1e-5 * target.norm(dim=1) + 1e-300).all())
        assert bool((mix.norm(dim=1) <= 1.01 * p.amax(1).rsqrt()).all())


def test_predicted_is_not_made_of_too_few_rows():
    p = probabilities(2, 6)
    V, _ = make_directions(DirectionsConfig("spectral:2"), p, [0, 1])
    assert combine_to_predicted(V, p) is None


def test_rank_reduction_is_the_svd():
    rows = torch.randn(3, 6, 50, generator=torch.Generator().manual_seed(0))
    reduced, kept, mix = reduce_rank(rows, 2)
    torch.testing.assert_close(mix @ rows, reduced)
    for i in range(3):
        _, s, Vt = np.linalg.svd(rows[i].numpy(), full_matrices=False)
        best = Vt[:2].T @ np.diag(s[:2] ** 2) @ Vt[:2]
        np.testing.assert_allclose((reduced[i].T @ reduced[i]).numpy(), best, atol=1e-3)
        assert float(kept[i]) == pytest.approx((s[:2] ** 2).sum() / (s**2).sum(), rel=1e-4)
    turned, share, _ = reduce_rank(rows, 9)
    torch.testing.assert_close(turned.mT @ turned, rows.mT @ rows, rtol=1e-4, atol=1e-3)
    assert bool((share - 1).abs().max() < 1e-6)


def test_rank_reduction_does_not_depend_on_the_batch():
    """Neither on rows of zeros, which others of a batch need, nor on the signs that a solver happens to choose."""
    rows = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    alone, _, _ = reduce_rank(rows, 4)
    padded, _, _ = reduce_rank(torch.cat([rows, torch.zeros(3, 5, 50)], 1), 4)
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=1e-4)
    turned, _, _ = reduce_rank(rows[:1] + 1e-7, 4)
    torch.testing.assert_close(turned, alone[:1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["auto", "exact", "spectral:3", "spectral:0.7", "projection:40", "sampling:3"])
@pytest.mark.parametrize("answers", [2, 10, 40])
def test_most_rows(text, answers):
    config = DirectionsConfig(text, max_rows=5)
    V, _ = make_directions(config, probabilities(2, answers), [0, 1])
    assert V.shape[1] <= most_rows(config, answers) <= max(answers, 40)
    if text != "spectral:0.7":
        assert V.shape[1] == most_rows(config, answers)


def test_certain_answers_give_nothing_and_no_nan():
    p = torch.tensor([[1.0, 0.0, 0.0]]).double()
    for directions in ("exact", "spectral:2", "projection:4", "sampling:4", "spectral:0.9"):
        V, kept = make_directions(DirectionsConfig(directions), p, [0])
        assert bool(V.isfinite().all())
        assert bool(kept.isfinite().all())
        assert float(V.abs().max()) == 0


@pytest.mark.parametrize("text", ["", "exact:3", "spectral", "spectral:0", "spectral:1.5", "projection:0.5", "magic:3"])
def test_unknown_directions_are_errors(text):
    with pytest.raises(UserError, match="Unknown directions"):
        parse_directions(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_are_split_off_as_powers_of_two(dtype):
    V = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    V *= 10.0 ** torch.linspace(-30, 3, 7).to(dtype)[:, None, None]
    V[2, 1] = 0
    unit, power = split_length(V)
    assert unit.dtype == power.dtype == dtype
    assert torch.equal(unit * power[:, :, None], V)
    assert (power.log2() == power.log2().round()).all()
    length = unit.norm(dim=2)
    assert length[2, 1] == 0
    assert power[2, 1] == 1
    length[2, 1] = 0.5
    assert length.min() >= 0.5
    assert length.max() <= 1
