"""Time and memory of decompositions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from npeff.decompose.config import DecomposeConfig, PaperConfig, SaeConfig
from npeff.decompose.run import open_decomposition
from npeff.paper import costs
from npeff.paper.config import ReproduceConfig
from npeff.paper.recipe import load_recipe
from npeff.paper.runs import Experiment, Runs
from npeff.utils.configs import to_dict, write_record
from tests.synthetic import make_run


def test_cost_of_a_decomposition(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    options = PaperConfig(frozen_steps=20, joint_steps=30, frozen_rate=1e-3, joint_rate=1e-3)
    config = DecomposeConfig(run=str(run.path), decomposition="timed", components=4, solver="paper", paper=options)
    cost = costs._measure(config, torch.get_num_threads())
    assert (cost.frozen_steps, cost.joint_steps, cost.examples) == (19, 31, 90), "printed from step N1 on"
    assert 0 < cost.solver_seconds <= cost.seconds
    assert cost.peak >= 0
    saved = open_decomposition(run, "timed")
    assert cost.loss == pytest.approx(float(saved.residuals.mean()), rel=1e-5)
    assert saved.config.solver == "paper"
    assert saved.notes.made_for == "reproduce"


def test_a_step_of_the_autoencoder_is_one_of_its_optimiser(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    options = SaeConfig(top_k=2, sae_steps=400, sae_patience=500)
    config = DecomposeConfig(
        run=str(run.path), decomposition="timed", method="sae", components=4, tolerance=0, sae=options
    )
    cost = costs._measure(config, torch.get_num_threads())
    assert cost.steps == 400 // 50 + 1, "an entry of the history in 50 steps, and the final loss"
    assert 0 < 400 * cost.step_ms < 1000 * cost.seconds * 2


def test_costs_of_the_first_version_are_not_measured_again(tmp_path: Path) -> None:
    """0.1.0 called the name of a decomposition `name`, in the options that make the name of the file."""
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    setup = load_recipe("tunings").setups["sst2"]
    experiment = Experiment(Runs(ReproduceConfig(scale=0.01, out=str(tmp_path / "out"))), setup, setup, run)
    options = to_dict(experiment.fit_config())
    options["name"] = f"timed-{options.pop('decomposition')}"
    key = hashlib.sha256(json.dumps([run.fingerprint, options], sort_keys=True).encode()).hexdigest()[:16]
    cost = costs.Cost(1.0, 0.5, 3, 1, 1, None, None, 0.25, 90, 7)
    write_record(tmp_path / "out" / "costs" / f"{key}.json", cost)
    assert costs._timed(experiment, experiment.fit_config()) == cost
