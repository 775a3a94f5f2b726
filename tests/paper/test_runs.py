"""How experiments shrink, and what they need."""

from __future__ import annotations

from typing import Any

import pytest

from npeff.models.config import EMBEDDED
from npeff.paper.config import ReproduceConfig
from npeff.paper.recipe import load_recipe
from npeff.paper.runs import Runs, collections, needs


def runs(scale: float, **options: Any) -> Runs:
    return Runs(ReproduceConfig(scale=scale, **options))


def test_rules_of_scaling() -> None:
    paper = load_recipe("tunings").setups["sst2"]
    assert runs(1).setup(paper) == paper
    assert runs(1).settle(paper, paper, 60_000) == paper
    half = runs(0.5).setup(paper)
    assert (half.examples, half.model, half.sketch, half.solver) == (30_000, paper.model, "sparse", "paper")
    small = runs(0.04).setup(paper)
    assert (small.examples, small.model, small.sketch, small.solver) == (2400, EMBEDDED, "blocks", "als")
    settled = runs(0.04).settle(paper, small, 2400)
    assert settled.components == 102
    assert settled.joint_rate == pytest.approx(3e-4 * 25)
    assert runs(0.04).settle(paper, small, 800).components == 50, "no more than one per 16 examples"
    assert runs(1e-9).setup(paper).examples == 64
    assert runs(0.04, solver="paper").setup(paper).solver == "paper"
    assert runs(0.04, solver="als").setup(paper, keep_solver=True).solver == "paper"
    own = runs(1, model="mine", examples=("sst2=2400",))
    assert own.setup(paper).examples == 2400
    assert own.setup(paper).model == "mine"
    assert own.settle(paper, own.setup(paper), 2400).components == 102
    assert runs(0.04).scaled(paper, 50, 4, 50, root=True) == 10
    assert [runs(scale).scaled(paper, 51_200, 2000, 51_200) for scale in (1, 0.1, 1e-4)] == [51_200, 5120, 2000]
    assert runs(0.25).scaled(paper, 128, 4, 512) == 32
    assert runs(0.01).scaled(paper, 128, 4, 512) == 4
    assert runs(0.01).scaled(paper, 128, 4, 3) == 3


def test_what_recipes_need() -> None:
    recipe = load_recipe("expectation-projections")
    whole, small = runs(1), runs(0.01)
    assert [setup.directions for setup in collections(recipe, whole)] == [
        f"projection:{count}" for count in (1, 4, 16, 64)
    ]
    assert len(collections(load_recipe("seeds"), whole)) == 2, "seeds share a collection"
    assert needs(recipe, small).endswith("4 collections, 1,600 examples")
    assert needs(load_recipe("human-evaluation"), whole) == "people"
