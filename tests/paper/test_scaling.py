"""How experiments shrink, and what they roughly cost."""

from __future__ import annotations

import pytest

from npeff.models.config import EMBEDDED
from npeff.paper.recipe import load_recipe
from npeff.paper.scaling import Scale, collections, estimate


def test_rules_of_scaling() -> None:
    paper = load_recipe("tunings").setups["sst2"]
    assert Scale(1).setup(paper) == paper
    assert Scale(1).settle(paper, paper, 60_000) == paper
    half = Scale(0.5).setup(paper)
    assert (half.examples, half.model, half.sketch, half.solver) == (30_000, paper.model, "sparse", "paper")
    small = Scale(0.04).setup(paper)
    assert (small.examples, small.model, small.sketch, small.solver) == (2400, EMBEDDED, "kron", "als")
    settled = Scale(0.04).settle(paper, small, 2400)
    assert settled.components == 102
    assert settled.joint_rate == pytest.approx(3e-4 * 25)
    assert Scale(0.04).settle(paper, small, 800).components == 50, "no more than one per 16 examples"
    assert Scale(1e-9).setup(paper).examples == 64
    assert Scale(0.04, solver="paper").setup(paper).solver == "paper"
    assert Scale(0.04, solver="als").setup(paper, keep_solver=True).solver == "paper"
    own = Scale(1, model="mine", examples={"sst2": 2400})
    assert own.setup(paper).examples == 2400
    assert own.setup(paper).model == "mine"
    assert own.settle(paper, own.setup(paper), 2400).components == 102
    assert Scale(0.04).count(paper, 50, 50) == 10
    assert [Scale(scale).sae_steps(paper, 51_200) for scale in (1, 0.1, 1e-4)] == [51_200, 5120, 2000]
    assert Scale(0.25).perturbed(paper, 128, 512) == 32
    assert Scale(0.01).perturbed(paper, 128, 512) == 4
    assert Scale(0.01).perturbed(paper, 128, 3) == 3


def test_estimates() -> None:
    recipe = load_recipe("expectation-projections")
    assert [setup.directions for setup in collections(recipe, Scale(1))] == [
        f"projection:{count}" for count in (1, 4, 16, 64)
    ]
    assert len(collections(load_recipe("seeds"), Scale(1))) == 2, "seeds share a collection"
    assert 0 < estimate(recipe, Scale(0.01)) < estimate(recipe, Scale(1))
    assert estimate(load_recipe("human-evaluation"), Scale(1)) == 0
