"""Intervals against simulation, permutations against enumeration, comparisons on cases that are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from npeff.perturb import statistics
from npeff.perturb.statistics import (
    average_interval,
    compare_ratios,
    geometric_mean,
    mean_interval,
    next_interval,
    permute,
    ratio,
)


def test_ratio_is_finite_and_positive():
    assert ratio(2.0, 1.0) == 2.0
    assert ratio(0.0, 0.0) == 1.0
    assert 0 < ratio(0.0, 1.0) < 1e-9
    assert math.isfinite(ratio(1.0, 0.0))
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))


def test_the_interval_of_a_mean_covers_it(monkeypatch):
    """Components with log-normal ratios around 5: nominal 95% intervals hold the true mean in nearly 95% of cases."""
    monkeypatch.setattr(statistics, "DRAWS", 300)
    generator, hits, times = np.random.default_rng(0), 0, 150
    for number in range(times):
        shared = generator.exponential(size=60)
        effects = 5 * np.exp(generator.normal(scale=0.5, size=24))
        tops = [effect * generator.exponential(size=16) for effect in effects]
        low, high = mean_interval(tops, [shared] * 24, seed=number)
        assert low < high
        hits += low <= 5 <= high
    assert 0.88 <= hits / times <= 0.995


def test_random_examples_that_are_top_ones_do_not_count():
    top, random = np.ones(8), np.full(20, 2.0)
    with_nan = np.concatenate([random, np.full(5, np.nan)])
    low, high = mean_interval([top], [with_nan], components=False)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert permute(top, with_nan) == permute(top, random)
    assert mean_interval([top], [random]) is None  # one component is no sample of components


def test_permutations_are_those_of_an_enumeration():
    generator = np.random.default_rng(4)
    top, random = 1.5 * generator.exponential(size=5), generator.exponential(size=9)
    values = np.concatenate([top, random])
    every = []
    for chosen in itertools.combinations(range(14), 5):
        inside = np.isin(np.arange(14), chosen)
        every.append(values[inside].mean() / values[~inside].mean())
    measured = top.mean() / random.mean()
    found = permute(top, random)
    assert found.p == pytest.approx(np.mean(np.array(every) >= measured - 1e-12), abs=0.03)
    assert found.low == pytest.approx(np.quantile(every, 0.025), rel=0.1)
    assert found.high == pytest.approx(np.quantile(every, 0.975), rel=0.1)


def test_an_effect_that_is_there_has_a_small_p():
    generator = np.random.default_rng(1)
    assert permute(10 * generator.exponential(size=16), generator.exponential(size=100)).p < 0.01
    ps = [permute(generator.exponential(size=8), generator.exponential(size=40)).p for _ in range(40)]
    assert 0.3 < np.mean(ps) < 0.7  # uniform where there is none


def test_the_next_ratio_lies_in_its_interval():
    generator, hits, covered = np.random.default_rng(2), 0, 0
    for _ in range(300):
        ratios = np.exp(generator.normal(0.1, 0.4, size=9))
        low, high = next_interval(ratios[:8])
        hits += low <= ratios[8] <= high
        low, high = average_interval(ratios[:8])
        covered += low <= math.exp(0.1) <= high
    assert 0.91 <= hits / 300 <= 0.985
    assert 0.91 <= covered / 300 <= 0.985
    assert next_interval([1.0, 2.0]) is None


def test_comparisons():
    generator = np.random.default_rng(3)
    one = np.exp(generator.normal(size=12))
    paired = compare_ratios(2 * one, one * np.exp(0.1 * generator.normal(size=12)), True)
    assert paired.factor == pytest.approx(2, rel=0.15)
    assert paired.interval[0] > 1.5
    assert paired.verdict == "larger"
    assert compare_ratios(one, 2 * one * np.exp(0.1 * generator.normal(size=12)), True).verdict == "smaller"
    # the spread between components hides the same factor where they are not the same components
    assert compare_ratios(1.3 * one, one[::-1], False).verdict == "not told apart"
    assert compare_ratios(one, one, True).verdict == "not told apart"
    assert compare_ratios(9 * one[:4], one[:4], True).verdict == "too few to tell"
