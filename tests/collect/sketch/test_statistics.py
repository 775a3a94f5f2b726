"""What the maps keep on average, and that their picks are random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.make import make_sketch
from npeff.utils.random import random_bits
from tests.collect.sketch.layers import every_config, linear, random_gradient, slots


def relative_variance(config: SketchConfig, gradient: torch.Tensor) -> float:
    """An upper bound of Var(‖y‖²) / ‖g‖⁴ over random draws of the map.

    dense   y_j are independent sums of signs: E y_j⁴ ≤ 3 E²(y_j²), so the variance is at most 2/p.
    sparse  y_j as well, and E y_j⁴ has a term of single regions more: Σ_r E z_r⁴ / 32² ≤ s Σ_i g_i⁴ / p².
    kron    each side is a dense map to m = `side` numbers for every row or column, so E‖y‖⁴ grows by 1 + 2/m twice;
            in the folding each pair of cells meets with probability ≤ 1/p under a random sign: by 1 + 2/p. The terms
            between independent copies are at most 2/m², less than what averaging the copies saves.
    blocks  in the worst case one block holds all of a side: as kron, with m = `side` / 8.
    """
    if config.sketch in ("blocks", "kron"):
        side = config.side or 2 * math.ceil(math.sqrt(config.dim))
        side /= 8 if config.sketch == "blocks" else 1
        return (1 + 2 / side) ** 2 * (1 + 2 / config.dim) - 1
    fourth = float((gradient**4).sum() / gradient.norm() ** 4) if config.sketch == "sparse" else 0.0
    return (2 + config.dim / 32 * fourth) / config.dim


@every_config
@pytest.mark.parametrize("shape", [(6, 7), (1, 1), (2, 1), (11, 16)])
def test_norm_is_kept_on_average(config: SketchConfig, shape: tuple[int, int]) -> None:
    """The mean over 300 seeds lies within five standard errors; (1, 1) is a region shorter than the others alone."""
    module, draws = linear("layer", *shape), 300
    gradient = random_gradient([module], 5)["layer"]
    norms = []
    for seed in range(draws):
        drawn = SketchConfig(config.sketch, config.dim, config.copies, config.side, sketch_seed=seed)
        norms.append(float(make_sketch(drawn, [module]).matvec({"layer": gradient}).square().sum()))
    mean = np.mean(norms) / float(gradient.square().sum())
    assert abs(mean - 1) <= 5 * math.sqrt(relative_variance(config, gradient) / draws) + 1e-6


def assert_uniform(values: torch.Tensor, cells: int) -> None:
    """Pearson's χ² has mean df and variance 2 df; five deviations on both sides, as too even is not random either."""
    counts = torch.bincount(values.reshape(-1), minlength=cells).double()
    assert len(counts) == cells
    expected = counts.sum() / cells
    assert expected > 20
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), cells - 1
    assert abs(statistic - freedom) <= 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("length", "bins"), [(1, 2), (3, 6), (50, 10), (64, 8)])
def test_picks_are_uniform_and_independent(length: int, bins: int) -> None:
    """Sign and index are jointly uniform, alone and in pairs of near coordinates and of near regions."""
    dim, regions = 4096, 64
    words = random_bits(8 * regions, "a test of picks").view("<i4").astype(np.int32).reshape(2, regions)
    drawn = slots(torch.from_numpy(words), length, dim) + length
    assert_uniform(drawn, 2 * length)
    coarse = drawn * bins // (2 * length)
    for lag in (1, 2, 3, 16, 256, 2048):
        assert_uniform(coarse[lag:] * bins + coarse[:-lag], bins**2)
    for lag in (1, 2, 3, 32):
        assert_uniform(coarse[:, lag:] * bins + coarse[:, :-lag], bins**2)
