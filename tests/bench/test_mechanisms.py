"""Scores of the planted mechanisms against brute force, and erasing on a model whose effects are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from bench.mechanisms import Eraser, align, best_thresholds, chance, interval, odds, score


@pytest.fixture
def truth():
    return np.random.default_rng(0).random((80, 3)) < 0.3


def test_thresholds_are_the_best_of_all(truth):
    values = np.random.default_rng(1).integers(-2, 6, size=(80, 4)).astype(float) + truth[:, :1] * [2, 0, 1, 0]
    best, limits = best_thresholds(values, truth)
    for k in range(3):
        for j in range(4):
            tried = [f1_score(truth[:, k], values[:, j] > limit) for limit in np.arange(0, 9, 0.5)]
            assert best[k, j] == pytest.approx(max(tried))
            assert f1_score(truth[:, k], values[:, j] > limits[k, j]) == pytest.approx(best[k, j])


def test_columns_that_are_the_triggers_have_a_full_score(truth):
    noise = np.random.default_rng(2).random((80, 2))
    values = np.concatenate([noise, truth[:, ::-1] * 1.0], axis=1)
    fit = np.arange(80) % 2 == 0
    found = score(values, truth, fit, ~fit)
    assert found.matched == (4, 3, 2)
    assert found.f1 == found.matthews == found.precision == found.single == found.several == 1
    assert max(each.f1 for each in chance(values, truth, fit, ~fit)) < 0.6


def test_one_column_stands_for_one_trigger(truth):
    """A column that goes with two triggers counts for one of them."""
    values = np.stack([(truth[:, 0] | truth[:, 1]) * 1.0, truth[:, 2] * 1.0, np.zeros(80)], axis=1)
    fit = np.arange(80) % 2 == 0
    assert score(values, truth, fit, ~fit).f1 < 0.75


def test_directions_are_in_the_planted_modules():
    generator = torch.Generator().manual_seed(0)
    changes = [
        {name: torch.randn(6, 1, generator=generator) @ torch.randn(1, 5, generator=generator)} for name in ("a", "b")
    ]
    vector = {"a": 2 * changes[0]["a"], "b": torch.randn(6, 5, generator=generator), "c": torch.ones(6, 5)}
    found = align(vector, changes)
    total = sum(float(part.square().sum()) for part in vector.values())
    assert found.energy[0] == pytest.approx(float(vector["a"].square().sum()) / total)
    assert found.inside[0] == pytest.approx(1, abs=1e-5)
    reads = torch.nn.functional.normalize(changes[1]["b"][0], dim=0)
    expected = float((vector["b"] @ reads).square().sum() / vector["b"].square().sum())
    assert found.inside[1] == pytest.approx(expected, rel=1e-4)


class Known:
    """Effects that fall with a weight: the first by all of it, the second by a tenth."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self):
        moved = float(self.weight[0, 0])
        return np.array([4 - moved, 4 - 0.1 * moved]), np.log(np.full((3, 4), 0.25))


def test_erasing_stops_where_others_suffer():
    module = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    module.weight.zero_()
    asked = type("Model", (), {"network": torch.nn.ModuleDict({"a": module})})
    eraser = Eraser(asked, Known(module.weight), Known(module.weight))
    found = eraser.erase({"a": torch.ones(1, 1)}, 0)
    assert found.length == pytest.approx(2, rel=0.1)  # there the other one has 95% left
    assert found.length <= 2
    assert found.removed == pytest.approx(found.length / 4)
    assert found.kept[0] >= 0.95
    assert found.plain == 0
    assert float(module.weight) == 0
    assert eraser.erase({"a": -torch.ones(1, 1)}, 0).length == pytest.approx(-found.length)


def test_odds():
    p = torch.tensor([0.2, 0.5, 0.9])
    torch.testing.assert_close(odds(p.log()), torch.logit(p))


def test_intervals_are_those_of_drawn_examples(truth):
    """Against scikit-learn's F1 of the same draws; a perfect column has no width."""
    predicted = truth ^ (np.random.default_rng(3).random(truth.shape) < 0.1)
    among = np.arange(80) % 2 == 1
    drawn = np.random.default_rng(0).integers(40, size=(200, 40))
    p, t = predicted[among], truth[among]
    means = [np.mean([f1_score(t[rows, k], p[rows, k]) for k in range(3)]) for rows in drawn]
    assert interval(predicted, truth, among, draws=200) == pytest.approx(np.quantile(means, [0.025, 0.975]))
    assert interval(truth, truth, among) == (1, 1)
