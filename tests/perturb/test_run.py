"""The command: results, resume, what it writes, and what a user can get wrong."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from npeff.cli import replay
from npeff.config import ReplayConfig
from npeff.decompose.run import open_decomposition
from npeff.perturb import run as command
from npeff.perturb.config import SensingConfig
from npeff.perturb.evaluate import geometric_mean
from npeff.perturb.protocol import make_plan
from npeff.perturb.run import perturb
from npeff.perturb.whitening import plan_directions
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from tests import tiny
from tests.perturb.conftest import change, results


def test_perturb_measures_both_signs_at_equal_effect(config):
    found = perturb(change(config, curve=[2.0, 0.1]))
    folder, saved = results(config, "npeff-reject-lift")
    assert [record["component"] for record in saved["components"]] == [1, 4]
    assert found["kl_ratio"] == pytest.approx(geometric_mean(r["best"]["ratio"] for r in saved["components"]))
    for record in saved["components"]:
        assert record["fidelity"] > 0.98
        assert [outcome["sign"] for outcome in record["outcomes"]] == [1, -1]
        for outcome in record["outcomes"]:
            assert outcome["top_kl"] == pytest.approx(1e-3, rel=0.05)
            assert outcome["ratio"] == pytest.approx(outcome["top_kl"] / outcome["random_kl"])
            assert set(outcome["accuracy"]) == {"top", "related", "random"}
        assert record["best"]["ratio"] == max(outcome["ratio"] for outcome in record["outcomes"])
        assert record["best"]["ratio"] == pytest.approx(record["best"]["predicted_ratio"], rel=0.1)
        assert sum(place["share"] for place in record["where"]) == pytest.approx(1)
        small, large = record["curve"]
        assert small["magnitude"] == pytest.approx(0.1 * record["best"]["magnitude"])
        assert small["top_kl"] < record["best"]["top_kl"] < large["top_kl"]
        assert small["ratio"] == pytest.approx(record["best"]["predicted_ratio"], rel=0.02)
    assert {"results.csv", "table.md", "curve.png", "curve.svg", "where.png", "where.svg", "config.json"} <= {
        p.name for p in folder.iterdir()
    }


def test_prediction_may_be_left_out_and_made_later(config):
    found = perturb(change(config, predict=False))
    assert found["predicted_ratio"] is None
    folder, before = results(config, "npeff-reject-lift")
    assert [record["best"]["predicted_ratio"] for record in before["components"]] == [None, None]
    assert "| nan" not in (folder / "table.md").read_text(encoding="utf-8")
    again = perturb(config)
    assert again["kl_ratio"] == pytest.approx(found["kl_ratio"], rel=1e-6)
    assert again["predicted_ratio"] == pytest.approx(again["kl_ratio"], rel=0.1)


def test_whitening_uses_no_evaluation_example_and_beats_plain(config):
    run = Run.open(config.run)
    decomposition = open_decomposition(run, "npeff")
    plan = make_plan(run, decomposition, (1, 4), 8, 4, 16, 0)
    directions = plan_directions(run, decomposition, plan, "whiten")
    plain = plan_directions(run, decomposition, plan, "plain")
    difference = (directions.sums.weights["fisher"] - plain.sums.weights["fisher"]).numpy()
    for j, number in enumerate(plan.components):
        assert not difference[j][plan.random].any()
        assert not difference[j][plan.top_examples(number)].any()
        assert difference[j].any()
    few = plan_directions(run, decomposition, plan, "whiten", carriers=0.5)
    carried = (few.sums.weights["fisher"] != 0).numpy()
    for j, number in enumerate(plan.components):
        assert not carried[j][np.setdiff1d(plan.random, plan.top_examples(number))].any()
        allowed = np.union1d(plan.background, plan.top_examples(number))
        assert carried[j].sum() == round(0.5 * len(allowed))
    torch.testing.assert_close(few.sums.weights["fisher"] @ run.source("fisher").read(0, 40), few.sums.vectors)
    rows = run.source("fisher").read(0, 40)
    torch.testing.assert_close(directions.sums.weights["fisher"] @ rows, directions.sums.vectors, rtol=1e-3, atol=1e-4)
    ratios = {name: perturb(change(config, direction=name))["kl_ratio"] for name in ("whiten", "plain")}
    assert ratios["whiten"] > ratios["plain"]


@pytest.mark.parametrize("method", ["gnpeff", "clusters", "svd-gradients"])
def test_other_methods(config, method):
    perturb(change(config, decomposition=method, components=[], count=2, top=3, magnitude=0.05, direction="whiten"))
    _, saved = results(config, f"{method}-whiten-lift")
    assert len(saved["components"]) == 2
    for record in saved["components"]:
        orders = {outcome["order"] for outcome in record["outcomes"]}
        assert orders == ({"positive", "negative", "absolute"} if method == "svd-gradients" else {"positive"})
        assert all(outcome["magnitude"] == 0.05 for outcome in record["outcomes"])
        assert record["fidelity"] > 0.98


def test_sensing(config):
    sensing = to_dict(SensingConfig(inner_iterations=5, long_steps=True))
    perturb(change(config, way="sensing", sensing=sensing))
    _, saved = results(config, "npeff-reject-sensing")
    for record in saved["components"]:
        assert record["entries"] > 0
        assert record["residual"] < 0.5
        assert record["planted_cosine"] > 0.9
        assert record["fidelity"] == pytest.approx((1 - record["residual"] ** 2) ** 0.5, abs=0.01)


def test_a_stopped_command_continues(config, monkeypatch):
    whole = change(config, label="whole")
    perturb(whole)
    expected = results(config, "whole")[1]
    broken = change(config, label="broken")
    record = command._Session._record

    def stop_at_four(session, number, *rest):
        if number == 4:
            raise KeyboardInterrupt
        return record(session, number, *rest)

    monkeypatch.setattr(command._Session, "_record", stop_at_four)
    with pytest.raises(KeyboardInterrupt):
        perturb(broken)
    monkeypatch.setattr(command._Session, "_record", record)
    done = []
    monkeypatch.setattr(
        command._Session,
        "_record",
        lambda session, number, *rest: done.append(number) or record(session, number, *rest),
    )
    perturb(broken)
    assert done == [4]
    again = results(config, "broken")[1]
    for before, after in zip(expected["components"], again["components"], strict=True):
        assert after["best"]["ratio"] == pytest.approx(before["best"]["ratio"], rel=1e-3)
    monkeypatch.setattr(command, "prepare_run", None)  # nothing is left to do, so no model is loaded
    perturb(broken)
    with pytest.raises(UserError, match="other options"):
        perturb(change(broken, target_kl=0.5))


def test_all_methods_in_one_table(config):
    every = change(config, decomposition="all", components=[], count=2, top=3)
    found = perturb(every)
    assert list(found) == ["npeff", "gnpeff", "clusters", "svd-gradients"]
    folder = Run.open(config.run).path / "perturbations"
    with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["decomposition"]: float(row["KL ratio"]) for row in rows} == {
        name: pytest.approx(summary["kl_ratio"]) for name, summary in found.items()
    }
    ratios = [float(row["KL ratio"]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert len((folder / "table.md").read_text(encoding="utf-8").splitlines()) == 2 + len(rows)
    with pytest.raises(UserError, match="single one"):
        change(every, label="x")


def test_replay_gives_the_same_results(config, tmp_path):
    perturb(config)
    folder, before = results(config, "npeff-reject-lift")
    shutil.copytree(config.run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "perturbations")
    replay(ReplayConfig(str(folder), to=str(tmp_path / "again")))
    _, after = results(change(config, run=str(tmp_path / "again")), "npeff-reject-lift")
    for one, other in zip(before["components"], after["components"], strict=True):
        assert one["component"] == other["component"]
        assert one["best"]["ratio"] == pytest.approx(other["best"]["ratio"], rel=1e-4)


def test_bad_input(config):
    with pytest.raises(UserError, match="no component 99"):
        perturb(change(config, components=[99]))
    with pytest.raises(UserError, match="too few"):
        perturb(change(config, random=1000))
    with pytest.raises(UserError, match="no finished decomposition"):
        perturb(change(config, decomposition="nothing"))
    for wrong in (
        {"fidelity": 0.0},
        {"top": 0},
        {"target_kl": 0.0},
        {"label": "../x"},
        {"magnitude": -1.0},
        {"curve": [0.0]},
    ):
        with pytest.raises(UserError):
            change(config, **wrong)


def test_changed_model_and_changed_texts_are_refused(config, run):
    manifest_path = Run.open(config.run).path / "manifest.json"
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    table_path = manifest_path.parent / "examples.parquet"
    whole = table_path.read_bytes()
    table = pq.read_table(table_path)
    texts = table["text"].to_pylist()
    place = table.column_names.index("text")
    pq.write_table(table.set_column(place, "text", pa.array(["new", *texts[1:]], pa.string())), table_path)
    with pytest.raises(UserError, match=r"examples\.parquet is missing or has changed"):
        perturb(config)
    table_path.write_bytes(whole)
    other = tiny.save(manifest_path.parent.parent / "other", seed=1)
    manifest["config"]["model"]["model"] = str(other)
    del manifest["seal"]
    manifest_path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="no longer the one"):
        perturb(config)
