"""How sure a ratio is: intervals by bootstrap, what chance gives, and comparisons of two sets of ratios.

All of it works on divergences that were measured: KL of top examples and of random ones, a list for each component.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from npeff.utils import Array, Record

DRAWS = 2000
"""Resamples of a bootstrap or a permutation."""
LEVEL = 0.95
"""Of all intervals."""
SMALLEST = 1e-12
"""Smaller divergences count as this; it keeps ratios finite."""
FEW = 6
"""Pairs from which a difference can be told at all: with five, the smallest two-sided p is above 0.05."""

Interval = tuple[float, float]


def ratio(above: float, below: float) -> float:
    """Above / below, positive also where nothing happens or one of them is infinite."""
    return 1.0 if above == below else max(SMALLEST, max(above, SMALLEST) / max(below, SMALLEST))


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _quantiles(values: Array) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_and_interval(values: Array) -> tuple[float | None, Interval | None]:
    """Mean of values of which there are few different ones, and its 95% interval by bootstrap.

    Args:
        values: One for each example, such as whether it is right, [n].

    Returns:
        Both; None without values.
    """
    if not len(values):
        return None, None
    different, counts = np.unique(values.astype(float), return_counts=True)
    # how often each value is drawn is all that a resample has of its examples
    means = np.random.default_rng(0).multinomial(len(values), counts / len(values), DRAWS) @ different / len(values)
    return float(values.mean()), _quantiles(means)


def _resampled_means(values: Array, picks: Array) -> Array:
    """Mean of the values at every line of `picks` [draws, n]; NaN, a value that does not count, is left out."""
    chosen = values[picks]
    counts = (~np.isnan(chosen)).sum(1)
    return np.maximum(np.nansum(chosen, 1) / np.maximum(counts, 1), SMALLEST)


def mean_interval(
    tops: Sequence[Array], randoms: Sequence[Array], components: bool = True, seed: int = 0
) -> Interval | None:
    """Interval of the geometric mean over components of mean KL of top ÷ mean KL of random examples.

    Resampled are the components (if asked for), the top examples of each and the random examples, which all components
    share.

    Args:
        tops: For each component, divergences of its top examples.
        randoms: For each component, divergences of the random examples, [n] in the same order for all; NaN for one that
            is a top example of the component.
        components: Whether the components are a sample too; then there must be two at least.
        seed: Seed of the draws.

    Returns:
        The interval; None if there are too few to resample.
    """
    if components and len(tops) < 2:
        return None
    generator = np.random.default_rng([seed, 5])
    shared = generator.integers(0, len(randoms[0]), (DRAWS, len(randoms[0])))
    logs = np.empty((DRAWS, len(tops)))
    for place, (top, random) in enumerate(zip(tops, randoms, strict=True)):
        own = generator.integers(0, len(top), (DRAWS, len(top)))
        logs[:, place] = np.log(_resampled_means(top, own)) - np.log(_resampled_means(random, shared))
    if components:
        logs = np.take_along_axis(logs, generator.integers(0, len(tops), logs.shape), 1)
    low, high = _quantiles(logs.mean(1))
    return math.exp(low), math.exp(high)


class Permuted(Record):
    """What the ratio of a component is when its coefficients are permuted over the measured examples."""

    low: float
    """Lower end of the interval that holds 95% of the permutations."""
    high: float
    """Upper end."""
    p: float
    """Share of permutations with a ratio at least as large as the one that was measured."""


def permute(top: Array, random: Array, seed: int = 0) -> Permuted:
    """Permute which of the measured examples are the top ones.

    If coefficients had nothing to do with what a change does, every choice of as many examples would be as likely.

    Args:
        top: Divergences of the top examples.
        random: Divergences of the random examples, NaN for those that do not count.
        seed: Seed of the permutations.

    Returns:
        The ratios that come out.
    """
    values = np.concatenate([top, random[~np.isnan(random)]])
    generator = np.random.default_rng([seed, 6])
    places = generator.permuted(np.tile(np.arange(len(values)), (DRAWS, 1)), axis=1)
    inside, outside = values[places[:, : len(top)]].mean(1), values[places[:, len(top) :]].mean(1)
    ratios = np.maximum(inside, SMALLEST) / np.maximum(outside, SMALLEST)
    measured = ratio(float(top.mean()), float(values[len(top) :].mean()))
    return Permuted(*_quantiles(ratios), p=float((1 + (ratios >= measured).sum()) / (1 + DRAWS)))


def next_interval(ratios: Sequence[float]) -> Interval | None:
    """Where one more such ratio would lie with 95%, if their logarithms are normal; None for fewer than 3."""
    return _normal_interval(ratios, math.sqrt(1 + 1 / max(len(ratios), 1)))


def average_interval(ratios: Sequence[float]) -> Interval | None:
    """Interval of the geometric mean of ratios, if their logarithms are normal; None for fewer than 3."""
    return _normal_interval(ratios, math.sqrt(1 / max(len(ratios), 1)))


def _normal_interval(ratios: Sequence[float], spread: float) -> Interval | None:
    if len(ratios) < 3:
        return None
    logs = np.log(ratios)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) * spread)
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


class Comparison(Record):
    """One set of ratios against another."""

    factor: float
    """Geometric mean of the first ÷ geometric mean of the second."""
    interval: Interval
    """Of the factor, by bootstrap over components."""
    p: float
    """Two-sided: Wilcoxon's signed ranks for the same components, Mann and Whitney's test for others."""
    paired: bool
    """Whether they are of the same components."""
    enough: bool
    """Whether there are enough components to tell."""

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.enough:
            return "too few to tell"
        if self.p >= 1 - LEVEL or self.interval[0] <= 1 <= self.interval[1]:
            return "not told apart"
        return "larger" if self.factor > 1 else "smaller"


def compare_ratios(first: Sequence[float], second: Sequence[float], paired: bool, seed: int = 0) -> Comparison:
    """Whether the ratios of one method are larger than those of another.

    Args:
        first: Ratios of one method, at least one.
        second: Ratios of the other; of the same components in the same order if paired.
        paired: Whether they are of the same components.
        seed: Seed of the bootstrap.

    Returns:
        The comparison.
    """
    one, other = np.log(first), np.log(second)
    generator = np.random.default_rng([seed, 7])
    picks = generator.integers(0, len(one), (DRAWS, len(one)))
    beside = picks if paired else generator.integers(0, len(other), (DRAWS, len(other)))
    differences = one[picks].mean(1) - other[beside].mean(1)
    low, high = _quantiles(differences)
    same = paired and bool((one == other).all())
    p = 1.0 if same else float((stats.wilcoxon(one - other) if paired else stats.mannwhitneyu(one, other)).pvalue)
    enough = min(len(one), len(other)) >= FEW
    factor = math.exp(one.mean() - other.mean())
    return Comparison(factor, (math.exp(low), math.exp(high)), p, paired, enough)
