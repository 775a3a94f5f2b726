"""Groups of components in the place of components."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.analyse.groups import group_mix
from npeff.analyse.records import Group
from npeff.decompose.run import open_decomposition
from npeff.explore.evidence import read_perturbations
from npeff.perturb import protocol
from npeff.perturb.config import PerturbConfig
from npeff.perturb.protocol import make_plan, users
from npeff.perturb.run import perturb
from npeff.perturb.whitening import DirectionMaker
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.perturb.conftest import change, results

GROUPS = [Group(0, [1, 4], 0.9, 1), Group(1, [1, 2, 4], 0.5, None)]


@pytest.fixture(autouse=True)
def grouped(monkeypatch):
    monkeypatch.setattr(protocol, "groups", lambda decomposition: GROUPS)


def test_a_group_ranks_by_the_sum_of_its_coefficients_and_leaves_its_users_out(held_run):
    decomposition = open_decomposition(held_run, "npeff")
    plan = make_plan(held_run, decomposition, PerturbConfig("", group=(0,), top=4, random=16))
    assert plan.members == [[1, 4], [1, 2, 4]]
    sums = decomposition.coefficients.numpy()[:, [1, 4]].sum(axis=1)
    ranked = plan.component(0).test[0].top
    part = plan.test.examples
    assert ranked.tolist() == part[np.argsort(-sums[part], kind="stable")][:4].tolist()
    fitted = sums.copy()
    fitted[decomposition.notes.held_out] = 0
    assert set(np.argsort(-fitted)[:3]) <= set(users(decomposition, [1, 4]))


@pytest.mark.parametrize("direction", ["plain", "reject"])
def test_its_direction_is_made_of_its_members(held_run, direction):
    decomposition = open_decomposition(held_run, "npeff")
    config = PerturbConfig("", group=(0, 1), top=4, random=16, direction=direction, threshold=1.0, carriers=1.0)
    plan = make_plan(held_run, decomposition, config)
    made = DirectionMaker(held_run, decomposition, plan, config).make([plan.component(0)])
    H = decomposition.components.double()
    whole = group_mix(decomposition, [1, 4]) @ H
    if direction == "reject":  # with a threshold of 1 nothing of the other components is left, one after another
        for j in (0, 2, 3, 5):
            whole = whole - (whole @ H[j]) / (H[j] @ H[j]) * H[j]
    torch.testing.assert_close(made.targets[0].double(), whole, atol=1e-5, rtol=1e-4)
    assert made.stationarity[0] > 0.99


def test_the_command_keeps_results_of_groups_apart(config, capsys):
    perturb(change(config, component=[], group=[0]))
    assert "group 0: KL ratio" in capsys.readouterr().out
    folder, saved = results(config, "npeff-groups-reject-lift-heldout")
    assert [record["component"] for record in saved["components"]] == [0]
    assert saved["components"][0]["fidelity"] > 0.98
    run = Run.open(config.run)
    assert read_perturbations(run, "npeff", open_decomposition(run, "npeff")) == []  # group 0 is not component 0
    with pytest.raises(UserError, match="group was"):
        perturb(change(config, perturbation=folder.name))
    with pytest.raises(UserError, match="no group 7: the decomposition has 0 to 1"):
        perturb(change(config, component=[], group=[7]))
    with pytest.raises(UserError, match="one of them at a time"):
        change(config, group=[0])
