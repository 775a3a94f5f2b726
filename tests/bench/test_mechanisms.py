"""Scores of the planted mechanisms against brute force, and erasing on a model whose effects are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from bench.mechanisms import Eraser, align, best_thresholds, chance, interval, odds, score, text_kl


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


@pytest.fixture
def weight():
    module = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    module.weight.zero_()
    return module


def eraser_of(module, effects=Known):
    asked = type("Model", (), {"network": torch.nn.ModuleDict({"a": module})})
    return Eraser(asked, effects(module.weight), effects(module.weight))


def test_erasing_stops_where_others_suffer(weight):
    eraser = eraser_of(weight)
    found = eraser.erase([{"a": torch.ones(1, 1)}], 0)
    (length,) = found.lengths
    assert length == pytest.approx(2, rel=0.1)  # there the other one has 95% left
    assert length <= 2
    assert found.removed == pytest.approx(length / 4)
    assert found.kept[0] >= 0.95
    assert found.plain == 0
    assert float(weight.weight) == 0
    assert eraser.erase([{"a": -torch.ones(1, 1)}], 0).lengths == [pytest.approx(-length)]


def test_a_second_direction_goes_on_where_the_first_had_to_stop():
    """Along the second direction nothing else suffers: what the first leaves is removed, and the weights come back."""
    module = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)
    module.weight.zero_()

    class Two(Known):
        def __call__(self):
            first, second = self.weight[0].tolist()
            return np.array([4 - first - second, 4 - 0.1 * first]), np.log(np.full((3, 4), 0.25))

    found = eraser_of(module, Two).erase([{"a": torch.tensor([[1.0, 0]])}, {"a": torch.tensor([[0, -1.0]])}], 0)
    assert found.lengths[0] == pytest.approx(2, rel=0.1)
    assert found.lengths[1] < 0
    assert found.removed == pytest.approx((found.lengths[0] - found.lengths[1]) / 4)
    assert found.removed > 0.9
    assert found.kept[0] >= 0.95
    assert module.weight.abs().sum() == 0


def test_damage_to_running_text():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    expected = (0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)) / 2
    assert text_kl([p.log()], [q.log()]) == pytest.approx(expected, rel=1e-5)
    assert text_kl([p.log()], [p.log()]) == 0


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
