"""The command: results, resume, what it writes, and what a user can get wrong."""

from __future__ import annotations

import csv
import hashlib
import json
import re
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
from npeff.perturb.report import Results, read_results
from npeff.perturb.run import perturb
from npeff.perturb.whitening import plan_directions
from npeff.store.run import Run
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, write_json
from tests import tiny
from tests.perturb.conftest import change, results


def test_perturb_measures_both_signs_at_equal_effect(config):
    found = perturb(change(config, curve=[2.0, 0.1]))["npeff"]
    folder, saved = results(config, "npeff-reject-lift")
    assert [record["component"] for record in saved["components"]] == [1, 4]
    assert from_dict(Results, saved) == found == read_results(folder)
    assert found.summary.kl_ratio == pytest.approx(geometric_mean(r["best"]["ratio"] for r in saved["components"]))
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
    found = perturb(change(config, predict=False))["npeff"].summary
    assert found.predicted_ratio is None
    folder, before = results(config, "npeff-reject-lift")
    assert [record["best"]["predicted_ratio"] for record in before["components"]] == [None, None]
    assert "| nan" not in (folder / "table.md").read_text(encoding="utf-8")
    again = perturb(config)["npeff"].summary
    assert again.kl_ratio == pytest.approx(found.kl_ratio, rel=1e-6)
    assert again.predicted_ratio == pytest.approx(again.kl_ratio, rel=0.1)


@pytest.mark.parametrize("direction", ["reject", "whiten"])
def test_components_are_added(config, monkeypatch, direction):
    """One after the other gives the same as both at once; what is chosen along the way is chosen once."""
    config = change(config, direction=direction, ridge=0.01 if direction == "whiten" else None)
    whole = perturb(change(config, perturbation="whole"))["npeff"]
    first = perturb(change(config, component=[4]))["npeff"]
    assert [record.component for record in first.components] == [4]
    both = perturb(change(config, component=[1]))["npeff"]
    assert both.summary.components == 2
    assert both.components[1] == first.components[0]
    for one, other in zip(whole.components, both.components, strict=True):
        assert one.component == other.component
        assert one.best.top == other.best.top
        assert one.best.ratio == pytest.approx(other.best.ratio, rel=1e-3)
    folder, saved = results(config, f"npeff-{direction}-lift")
    assert saved["notes"]["ridge"] == config.ridge
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]["component"] == [1, 4]
    rows = (folder / "results.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "1", "4", "4"]
    # drawn components are added too, and more of them
    drawn = perturb(change(config, component=[], count=3))["npeff"]
    assert {1, 4} < {record.component for record in drawn.components}
    with (folder.parent / "table.csv").open(newline="", encoding="utf-8") as file:
        counts = {row["perturbation"]: int(row["components"]) for row in csv.DictReader(file)}
    assert counts == {"whole": 2, folder.name: drawn.summary.components}
    monkeypatch.setattr(command, "prepare_run", None)  # all are there: no model is loaded
    assert perturb(change(config, component=[4])) == {"npeff": drawn}


def test_a_ridge_is_chosen_once(config):
    config = change(config, direction="whiten")
    first = perturb(change(config, component=[4]))["npeff"].notes
    assert first.ridge in [trial.ridge for trial in first.ridges]
    assert perturb(change(config, component=[1]))["npeff"].notes == first
    assert perturb(change(config, component=[2], perturbation="other"))["npeff"].notes.ridges != first.ridges


def test_what_comes_with_results_may_be_asked_for_later(config):
    first = perturb(change(config, component=[4], curve=[0.5]))["npeff"].components[0]
    folder, _ = results(config, "npeff-reject-lift")
    saved = perturb(change(config, component=[4], save="delta"))["npeff"].components[0]
    assert (folder / saved.saved.path).is_file()
    assert saved.curve == first.curve
    assert saved.best.ratio == pytest.approx(first.best.ratio, rel=1e-6)
    adapter = perturb(change(config, component=[4], save="adapter"))["npeff"].components[0].saved
    assert adapter.share == 0.9
    other = perturb(change(config, component=[4], save="adapter", adapter_share=0.5))["npeff"].components[0].saved
    assert other.kept < adapter.kept


def as_in_0_1_0(run, folder):
    """Rewrite results as that version wrote them; the digest is that version's, spelled out."""
    made = read_object(folder / "config.json")
    config = {**made["config"], "background_rows": 4096, "adapter_rank": 64}
    config |= {"components": config.pop("component"), "label": config.pop("perturbation")}
    config["sensing"] |= {"gamma": 0.99, "beta": 4.0, "inner_tolerance": 1e-3, "debias": 0}
    kept = {n: v for n, v in config.items() if n not in ("run", "label", "overwrite", "device", "memory_gb", "predict")}
    decomposition = open_decomposition(run, "npeff")
    tensors = (decomposition.components, decomposition.coefficients)
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
    whole = json.dumps([run.fingerprint, run.manifest.examples_sha256, digest, kept], sort_keys=True)
    key = hashlib.sha256(whole.encode()).hexdigest()
    write_json(folder / "config.json", made | {"config": config, "key": key}, sealed=True)
    for path in (folder / "results.json", *(folder / "components").iterdir()):
        values = read_object(path)
        for record in values.get("components", [values]):
            for name in ("stationarity", "entries", "residual", "iterations", "planted_cosine", "key"):
                record.pop(name, None)
        write_json(path, {**values, "key": key}, sealed=True)
    notes = read_object(folder / "notes.json")
    write_json(folder / "notes.json", {"stationarity": [1.0], "ridge": notes["ridge"], "ridges": []}, sealed=True)


def test_results_of_0_1_0_are_read_continued_and_replayed(config, tmp_path):
    config = change(config, direction="whiten")
    first = perturb(change(config, component=[4]))["npeff"]
    folder, _ = results(config, "npeff-whiten-lift")
    as_in_0_1_0(Run.open(config.run), folder)
    before = (folder / "config.json").read_bytes()
    old = read_results(folder)
    assert old.components[0].best == first.components[0].best
    both = perturb(config)["npeff"]
    assert [record.component for record in both.components] == [1, 4]
    assert both.components[1].best == first.components[0].best
    assert both.notes.ridge == first.notes.ridge
    assert (folder / "config.json").read_bytes() == before
    with pytest.raises(UserError, match=r"--top was 4 and is now 3"):
        perturb(change(config, top=3))
    shutil.copytree(config.run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "perturbations")
    again = replay(ReplayConfig(str(folder), to=str(tmp_path / "again")))["npeff"]
    assert [record.component for record in again.components] == [4]
    assert again.components[0].best.ratio == pytest.approx(first.components[0].best.ratio, rel=1e-4)


def test_results_of_another_decomposition_are_not_continued(config):
    perturb(change(config, perturbation="x"))
    with pytest.raises(UserError, match="--decomposition was npeff and is now clusters"):
        perturb(change(config, decomposition="clusters", perturbation="x"))
    run = Run.open(config.run)
    open_decomposition(run, "gnpeff").save(run.path / "decompositions" / "npeff")
    with pytest.raises(UserError, match="the run or its decomposition was another one"):
        perturb(change(config, perturbation="x"))
    replaced = perturb(change(config, perturbation="x", component=[2], overwrite=True))["npeff"]
    assert [record.component for record in replaced.components] == [2]


def test_it_says_what_it_uses_and_how_long_it_takes(config, capsys):
    perturb(change(config, decomposition=None))
    said = capsys.readouterr().out
    assert "Components of svd-gradients:" in said
    assert re.search(r"2 to do: lifting takes about [\d.]+ seconds, measuring about [\d.]+ seconds\.", said)


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
    ratios = {name: perturb(change(config, direction=name))["npeff"].summary.kl_ratio for name in ("whiten", "plain")}
    assert ratios["whiten"] > ratios["plain"]


@pytest.mark.parametrize("method", ["gnpeff", "clusters", "svd-gradients"])
def test_other_methods(config, method):
    perturb(change(config, decomposition=method, component=[], count=2, top=3, magnitude=0.05, direction="whiten"))
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
    whole = change(config, perturbation="whole")
    perturb(whole)
    expected = results(config, "whole")[1]
    broken = change(config, perturbation="broken")
    record = command._Session.record

    def stop_at_four(session, number, *rest):
        if number == 4:
            raise KeyboardInterrupt
        return record(session, number, *rest)

    monkeypatch.setattr(command._Session, "record", stop_at_four)
    with pytest.raises(KeyboardInterrupt):
        perturb(broken)
    monkeypatch.setattr(command._Session, "record", record)
    done = []
    monkeypatch.setattr(
        command._Session,
        "record",
        lambda session, number, *rest: done.append(number) or record(session, number, *rest),
    )
    perturb(broken)
    assert done == [4]
    again = results(config, "broken")[1]
    for before, after in zip(expected["components"], again["components"], strict=True):
        assert after["best"]["ratio"] == pytest.approx(before["best"]["ratio"], rel=1e-3)
    monkeypatch.setattr(command, "prepare_run", None)  # nothing is left to do, so no model is loaded
    perturb(broken)
    with pytest.raises(UserError, match=r"other options: --target-kl was 0\.001 and is now 0\.5\. Choose another"):
        perturb(change(broken, target_kl=0.5))
    with pytest.raises(UserError, match=r"--mu was 4e-05 and is now 0\.1\."):
        perturb(change(broken, sensing={"mu": 0.1}))


def test_all_methods_in_one_table(config):
    every = change(config, decomposition="all", component=[], count=2, top=3)
    found = perturb(every)
    assert list(found) == ["npeff", "gnpeff", "clusters", "svd-gradients"]
    folder = Run.open(config.run).path / "perturbations"
    with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["decomposition"]: float(row["KL ratio"]) for row in rows} == {
        name: pytest.approx(results.summary.kl_ratio) for name, results in found.items()
    }
    ratios = [float(row["KL ratio"]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert len((folder / "table.md").read_text(encoding="utf-8").splitlines()) == 4 + len(rows)
    with pytest.raises(UserError, match="single one"):
        change(every, perturbation="x")


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
        perturb(change(config, component=[99]))
    with pytest.raises(UserError, match="too few"):
        perturb(change(config, random=1000))
    with pytest.raises(UserError, match="no finished decomposition"):
        perturb(change(config, decomposition="nothing"))
    for wrong in (
        {"fidelity": 0.0},
        {"top": 0},
        {"target_kl": 0.0},
        {"perturbation": "../x"},
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
