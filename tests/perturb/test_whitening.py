"""Rejection and whitening against dense linear algebra; second-order effects against measured divergences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.decompose.run import open_decomposition
from npeff.perturb.evaluate import Divergence
from npeff.perturb.lift import RowSums, component_sums, group_sum, scale_to_unit
from npeff.perturb.weights import EditedWeights
from npeff.perturb.whitening import (
    GOOD,
    RIDGES,
    Background,
    FisherRows,
    carry,
    choose_ridge,
    read_fishers,
    rejection_mix,
    whiten,
    whiten_sums,
    whiten_within,
)


def effects(fishers, vectors):
    """Second-order KL ½‖G_i v‖² of each example for vectors [J, p] of the sketch: [J, n]."""
    squares = (vectors.to(fishers.rows) @ fishers.rows.T).double().square() / 2
    result = torch.zeros(len(vectors), len(fishers.examples), dtype=torch.float64)
    return result.index_add_(1, torch.from_numpy(fishers.owner), squares)


def paper_rejection(H, j, threshold):
    """As the paper prints it, on the vectors themselves."""
    h = H[j].copy()
    for i in range(len(H)):
        unit = H[i] / np.linalg.norm(H[i])
        if i != j and abs(h @ unit) / np.linalg.norm(h) < threshold:
            h = h - (h @ unit) * unit
    return h


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_rejection_is_the_papers(threshold):
    random = np.random.default_rng(0)
    H = random.normal(size=(7, 30)) + 2 * random.normal(size=30)
    H[4] = 0.9 * H[1] + 0.1 * H[4]
    mix = rejection_mix(torch.from_numpy(H @ H.T), [0, 4, 6], threshold)
    for row, j in zip(mix.numpy(), [0, 4, 6], strict=True):
        np.testing.assert_allclose(row @ H, paper_rejection(H, j, threshold), atol=1e-9)


def test_rejection_leaves_nothing_of_the_others_where_they_are_orthogonal():
    H = torch.linalg.qr(torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0].T
    target = H[0] + 0.2 * H[1] - 0.1 * H[3]
    H = torch.cat([target[None], H[1:]])
    left = rejection_mix(H @ H.T, [0], 0.5)[0] @ H
    assert (H[1:] @ left).abs().max() < 1e-12


def test_rejection_ignores_zero_components():
    H = torch.eye(3, dtype=torch.float64)
    H[2] = 0
    assert rejection_mix(H @ H.T, [0], 0.5).isfinite().all()


def test_woodbury_is_the_direct_inverse():
    random = np.random.default_rng(1)
    G, H = random.normal(size=(12, 40)), random.normal(size=(3, 40))
    ridge, examples = 0.3, 5
    direct = np.linalg.solve(G.T @ G / examples + ridge * np.eye(40), H.T).T
    a = whiten(torch.from_numpy(G @ G.T), torch.from_numpy(G @ H.T), examples, ridge).numpy()
    np.testing.assert_allclose((H - a.T @ G) / ridge, direct, atol=1e-10)


def test_whitening_within_a_span_is_the_best_that_it_holds():
    random = np.random.default_rng(2)
    G, S, h = random.normal(size=(12, 40)), random.normal(size=(5, 40)), random.normal(size=40)
    F = G.T @ G / 6 + 0.3 * np.eye(40)
    tensors = [torch.from_numpy(array) for array in (S, G, h)]
    c = whiten_within(*tensors, examples=6, ridge=0.3).numpy()
    np.testing.assert_allclose(c, np.linalg.solve(S @ F @ S.T, S @ h), rtol=1e-6)
    # with a span that holds it, it is the whole inverse
    target = np.linalg.solve(F, h)
    span = torch.from_numpy(np.vstack([S, target]))
    c = whiten_within(span, tensors[1], tensors[2], examples=6, ridge=0.3)
    np.testing.assert_allclose((c @ span).numpy(), target, rtol=1e-4, atol=1e-6)


def test_fisher_rows_have_their_own_length(run):
    rows = read_fishers(run, np.array([7, 3, 21]))
    assert rows.examples.tolist() == [3, 7, 21]
    norms = run.table["pef_norm"].to_numpy()[rows.examples]
    for position, length in enumerate(norms):
        G = rows.rows[rows.owner == position]
        assert float((G @ G.T).norm()) == pytest.approx(length, rel=1e-4)
    stored = run.source("fisher").read(0, 40)[rows.places]
    torch.testing.assert_close(stored * rows.scales[:, None].float(), rows.rows)


def test_whitening_wins_where_the_background_is_shared():
    """Top examples share a direction u and, with all others, a loud one: whitening takes the loud one out."""
    generator = torch.Generator().manual_seed(0)
    loud, u = torch.linalg.qr(torch.randn(60, 2, generator=generator))[0].T
    noise = 0.05 * torch.randn(50, 60, generator=generator)
    rows = 3 * loud * torch.randn(50, 1, generator=generator) + noise
    rows[:6] += u
    places = np.arange(50)
    everything = FisherRows(places, places, places, torch.ones(50, dtype=torch.float64), rows)
    top = FisherRows(np.arange(6), np.arange(6), np.arange(6), everything.scales[:6], rows[:6])
    h = (u + loud)[None]
    ridge, trials = choose_ridge(Background(everything, rows[:0]), [np.arange(6)], h, [top], everything)
    best = max(trial.ratio for trial in trials)
    assert ridge == max(trial.ridge for trial in trials if trial.ratio >= GOOD * best)
    background = rows[6:]
    a = whiten((background @ background.T).double(), (background @ h.T).double(), 44, ridge)
    white = h - a.T.float() @ background
    found = effects(everything, torch.cat([h, white]))
    ratios = found[:, :6].mean(1) / found[:, 6:].mean(1)
    assert ratios[1] > 20 * ratios[0]


@pytest.mark.parametrize("positions", [0, 4])
def test_a_ridge_is_the_best_on_examples_that_carry_nothing(positions):
    """Every ridge against a dense inverse: ratios of mean effects on other examples, top ones not counted twice."""
    generator = torch.Generator().manual_seed(1)
    fitted, chosen = torch.randn(30, 12, generator=generator), torch.randn(20, 12, generator=generator)
    h = torch.randn(2, 12, generator=generator)
    rows = [
        FisherRows(np.arange(n), np.arange(n), np.arange(n), torch.ones(n).double(), part)
        for n, part in ((30, fitted), (20, chosen))
    ]
    top = FisherRows(np.array([3, 5]), np.arange(2), np.array([3, 5]), torch.ones(2).double(), chosen[[3, 5]])
    outside = [np.array([0, 1]), np.array([7])]
    text = torch.randn(positions, 12, generator=generator) / 12
    _, trials = choose_ridge(Background(rows[0], text), outside, h, [top, top], rows[1])
    beside = (text.T @ text).double().numpy()
    largest = np.linalg.eigvalsh((fitted @ fitted.T).double().numpy())[-1] / 30
    for share, trial in zip(RIDGES, trials, strict=True):
        logs = []
        for without, vector in zip(outside, h.double().numpy(), strict=True):
            G = np.delete(fitted.double().numpy(), without, 0)
            v = np.linalg.solve(G.T @ G / len(G) + beside + share * largest * np.eye(12), vector)
            effects = (chosen.double().numpy() @ v) ** 2
            logs.append(np.log(effects[[3, 5]].mean() / np.delete(effects, [3, 5]).mean()))
        assert trial.ridge == pytest.approx(share * largest)
        assert trial.ratio == pytest.approx(np.exp(np.mean(logs)), rel=1e-2)


def test_the_direction_of_a_group_is_its_leading_singular_vector(run):
    source, group = run.source("fisher"), np.array([2, 9, 30])
    vector, weights = group_sum(source, group)
    rows = source.read(0, 40)
    _, _, right = np.linalg.svd(rows[group].numpy(), full_matrices=False)
    assert abs(float(vector @ torch.from_numpy(right[0]))) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(weights @ rows, vector, rtol=1e-4, atol=1e-5)
    assert weights.nonzero().view(-1).tolist() == group.tolist()


def test_second_order_prediction_is_measured_at_small_magnitude(run, prepared, prompts, lifter):
    decomposition = open_decomposition(run, "npeff")
    sums = component_sums(decomposition, run.source("fisher"), torch.eye(6)[:2])
    examples = np.arange(40)
    rows = read_fishers(run, examples)
    divergence = Divergence(prepared, prompts, examples.tolist())
    for vector in lifter.lift(sums):
        scale_to_unit(vector)
        predicted = effects(rows, prepared.collector.sketch.matvec(vector)[None])[0].numpy() * 1e-3**2
        with EditedWeights(prepared.selection.modules) as weights:
            weights.add(vector, 1e-3)
            measured, _ = divergence.measure()
        strong = predicted > 0.2 * predicted.max()
        predicted_ratio = predicted[strong].mean() / predicted.mean()
        assert measured[strong].mean() / measured.mean() == pytest.approx(predicted_ratio, rel=0.1)
        # without the sketch in between: an example's own unprojected row
        for i in np.flatnonzero(strong)[:4]:
            weights_of_row = torch.zeros(1, 40)
            weights_of_row[0, i] = float(run.table["pef_norm"][int(i)].as_py()) ** 0.5
            (row,) = lifter.lift(RowSums(rows.rows[i : i + 1], {"fisher": weights_of_row}))
            inner = sum(float((row[name] * part).sum()) for name, part in vector.items())
            assert measured[i] == pytest.approx((1e-3 * inner) ** 2 / 2, rel=0.02)


@pytest.mark.parametrize("carriers", [0.4, 1.0])
def test_directions_leave_running_text_alone(run, carriers):
    """Against a dense solve over the rows that may carry a direction: rows of text count, and carry nothing."""
    examples = np.arange(20)
    task = read_fishers(run, examples)
    text = 3 * torch.randn(6, task.rows.shape[1], generator=torch.Generator().manual_seed(0))
    h = torch.randn(1, task.rows.shape[1], generator=torch.Generator().manual_seed(1)) + task.rows[:1]
    sums = RowSums(h, {"fisher": torch.zeros(1, int(run.source("fisher").ranks.sum()))})
    outside = [np.array([2, 5])]
    made = whiten_sums(run, sums, Background(task, text), outside, 0.01, carriers)
    plain = whiten_sums(run, sums, Background(task, text[:0]), outside, 0.01, 0.4)
    weights = made.weights["fisher"][0].numpy()
    stored = run.source("fisher").read(0, len(run.table)).numpy()
    np.testing.assert_allclose(weights @ stored, made.vectors[0].numpy(), atol=1e-4)
    S = stored[np.flatnonzero(weights)].astype(np.float64)
    assert len(S) == round(carriers * len(task.rows))
    G = task.rows[~np.isin(task.owner, [2, 5])].double().numpy()
    F = G.T @ G / 18 + (text.T @ text).double().numpy() + 0.01 * np.eye(G.shape[1])
    best = np.linalg.solve(S @ F @ S.T, S @ h[0].double().numpy()) @ S
    found = made.vectors[0].double().numpy()
    assert best @ found > 0.999 * np.linalg.norm(best) * np.linalg.norm(found)
    unit = [torch.nn.functional.normalize(found.vectors[0], dim=0) for found in (made, plain)]
    assert (text @ unit[0]).norm() < 0.7 * (text @ unit[1]).norm()


def test_carriers_come_as_close_as_they_can(run):
    """Against least squares over the rows of the examples that weigh most."""
    source = run.source("fisher")
    rows = source.read(0, len(run.table))
    weights = torch.randn(2, len(rows), generator=torch.Generator().manual_seed(0))
    weights[1, 10:] = 0
    found = carry(source, RowSums(weights @ rows, {"fisher": weights}), 0.5)
    owners = np.repeat(np.arange(len(run.table)), source.ranks)
    for j in range(2):
        sizes = np.bincount(owners, (weights[j].numpy() ** 2) * rows.square().sum(1).numpy())
        used = found.weights["fisher"][j].numpy() != 0
        assert len(set(owners[used])) == round(0.5 * (sizes > 0).sum())
        span = rows[used].double().numpy()
        best = np.linalg.lstsq(span.T, (weights[j] @ rows).double().numpy(), rcond=None)[0] @ span
        np.testing.assert_allclose(found.vectors[j].numpy(), best, atol=1e-3 * np.linalg.norm(best))
