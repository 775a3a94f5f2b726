"""The command: results, resume, what it writes, and what a user can get wrong."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from npeff.cli import replay
from npeff.config import ReplayConfig
from npeff.decompose.run import open_decomposition
from npeff.explore.evidence import read_perturbations
from npeff.perturb import run as command
from npeff.perturb.config import PerturbConfig, SensingConfig
from npeff.perturb.protocol import make_plan, users
from npeff.perturb.records import Results, chance_limit, read_results
from npeff.perturb.report import write_overview
from npeff.perturb.run import perturb
from npeff.perturb.statistics import geometric_mean, mean_interval, next_interval
from npeff.perturb.whitening import DirectionMaker
from npeff.store.run import Run
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, write_json
from tests import tiny
from tests.conftest import write_reviews
from tests.perturb.conftest import change, make_run, results


def test_held_out_examples_are_measured(config, capsys):
    found = perturb(change(config, curve=[2.0, 0.1], predict=True, ranks=True))["npeff"]
    folder, saved = results(config, "npeff-reject-lift-heldout")
    assert [record["component"] for record in saved["components"]] == [1, 4]
    assert from_dict(Results, saved) == found == read_results(folder)
    assert saved["parts"] == {"fit": 60, "tune": 20, "test": 40}
    held_out = open_decomposition(Run.open(config.run), "npeff").notes.held_out
    for record in saved["components"]:
        best = record["best"]
        assert record["fidelity"] > 0.98
        assert [trial["sign"] for trial in record["tried"]] == [1, -1]
        for trial in record["tried"]:  # sign and length are chosen on other examples than those that are measured
            assert trial["top_kl"] == pytest.approx(1e-3, rel=0.11)
            assert trial["ratio"] == pytest.approx(trial["top_kl"] / trial["random_kl"])
        chosen = max(record["tried"], key=lambda trial: trial["ratio"])
        assert (best["sign"], best["magnitude"]) == (chosen["sign"], chosen["magnitude"])
        assert set(best["top"]) <= set(held_out)
        assert best["top_kl"] == pytest.approx(np.mean(best["top_kls"]))
        others = [kl for kl in best["random_kls"] if kl is not None]
        assert best["random_kl"] == pytest.approx(np.mean(others))
        assert best["ratio"] == pytest.approx(best["top_kl"] / best["random_kl"])
        assert best["interval"][0] <= best["ratio"] <= best["interval"][1]
        assert 0 < best["permuted"]["p"] <= 1
        assert {damage["text"] for damage in best["elsewhere"]} == {"running text", "clinc150", "triviaqa"}
        assert set(best["accuracy"]) == {"top", "related", "random"}
        assert sum(place["share"] for place in record["where"]) == pytest.approx(1)
        assert all(set(place["ranks"]) == {"1", "4", "16"} for place in record["where"])
        small, large = record["curve"]
        assert small["magnitude"] == pytest.approx(0.1 * best["magnitude"])
        assert small["top_kl"] < best["top_kl"] < large["top_kl"]
        assert small["ratio"] == pytest.approx(best["predicted_ratio"], rel=0.02)
    names = {
        "results.csv",
        "table.md",
        "table.tex",
        "curve.png",
        "ratios.png",
        "ratios.svg",
        "where.svg",
        "config.json",
    }
    assert names <= {p.name for p in folder.iterdir()}
    said = capsys.readouterr().out
    assert "held-out, geometric mean of 2" in said
    assert "random groups" in said
    assert "in-sample" not in said


def test_the_summary_has_an_interval_and_a_null(config):
    found = perturb(config)["npeff"]
    best = [record.best for record in found.components]
    assert found.summary.kl_ratio == pytest.approx(geometric_mean(outcome.ratio for outcome in best))
    kls = [
        [np.array([np.nan if kl is None else kl for kl in getattr(outcome, name)]) for outcome in best]
        for name in ("top_kls", "random_kls")
    ]
    assert found.summary.interval == mean_interval(*kls)
    nulls = [record.best.ratio for record in found.nulls]
    assert len(nulls) == found.summary.null.groups == 3
    assert found.summary.null.ratio == pytest.approx(geometric_mean(nulls))
    assert found.summary.null.single == next_interval(nulls)
    limits = [chance_limit(outcome, found.summary.null) for outcome in best]
    assert found.summary.above_null == sum(o.ratio > limit for o, limit in zip(best, limits, strict=True))
    folder, _ = results(config, "npeff-reject-lift-heldout")
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["component"] for row in rows] == ["1", "4", *(f"random group {n}" for n in range(3))]
    for row, outcome, limit in zip(rows, best, limits, strict=False):
        assert row["effect"] == ("yes" if outcome.ratio > limit else "none")
        assert float(row["chance"]) == limit
    # more nulls are added to those that are there
    more = perturb(change(config, nulls=5))["npeff"]
    assert more.nulls[:3] == found.nulls
    assert len(more.nulls) == 5


def test_a_null_is_no_effect_of_its_own_examples(held_run, config):
    """A random group's direction changes its own group more than others (to second order), held-out groups no more."""
    own = []
    found = perturb(change(config, nulls=8, component=[1], direction="whiten", ridge=1e-3))["npeff"]
    run = Run.open(config.run)
    decomposition = open_decomposition(run, "npeff")
    options = PerturbConfig("", component=(1,), top=4, random=16, ridge=1e-3, carriers=1.0)
    plan = make_plan(run, decomposition, options)
    maker = DirectionMaker(run, decomposition, plan, options)
    subjects = [plan.null(number, 0) for number in range(8)]
    rows = run.source("fisher").read(0, 120)
    for subject, vector in zip(subjects, maker.make(subjects).sums.vectors, strict=True):
        effects = (rows @ vector).double().square().numpy()
        others = np.setdiff1d(plan.fit, subject.group)
        own.append(effects[subject.group].mean() / effects[others].mean())
    held = [record.best.ratio for record in found.nulls]
    assert geometric_mean(own) > 3 * geometric_mean(held)
    low, high = found.summary.null.interval
    assert low < 1 < high


def test_the_papers_protocol_is_in_sample(config, capsys):
    found = perturb(change(config, protocol="paper"))["npeff"]
    assert found.summary.protocol == "paper"
    for record in found.components:
        fitted = open_decomposition(Run.open(config.run), "npeff").coefficients[:, record.component].numpy()
        assert set(record.best.top) <= set(np.argsort(-fitted)[:4].tolist())
        assert record.best.top_kl == pytest.approx(1e-3, rel=0.05)
        assert record.best.ratio == pytest.approx(max(trial.ratio for trial in record.tried), rel=1e-6)
    said = capsys.readouterr().out
    assert "in-sample" in said
    assert "held-out" not in said
    folder, _ = results(config, "npeff-reject-lift-paper")
    assert "In-sample" in (folder / "table.tex").read_text(encoding="utf-8")


def test_another_run_is_measured(config, tmp_path, model_directory):
    reviews = write_reviews(tmp_path / "other.jsonl", 150)
    other = make_run(tmp_path / "other", model_directory, reviews, methods=())
    found = perturb(change(config, component=[1], evaluate_on=str(other.path)))["npeff"]
    assert found.parts["tune"] + found.parts["test"] == 90
    assert 0 < found.components[0].best.top_kl < 1
    with pytest.raises(UserError, match="--evaluate-on was another run"):
        perturb(change(config, component=[1]))
    longer = make_run(tmp_path / "longer", model_directory, reviews, methods=(), dim=1024)
    with pytest.raises(UserError, match=r"was not collected as .* sketch\.dim was 2048 and is now 1024"):
        perturb(change(config, evaluate_on=str(longer.path)))
    with pytest.raises(UserError, match="leave --protocol paper out"):
        change(config, protocol="paper", evaluate_on=str(other.path))


def test_a_prediction_may_be_made_later(config):
    found = perturb(config)["npeff"].summary
    assert found.predicted_ratio is None
    folder, before = results(config, "npeff-reject-lift-heldout")
    assert [record["best"]["predicted_ratio"] for record in before["components"]] == [None, None]
    assert "| nan" not in (folder / "table.md").read_text(encoding="utf-8")
    again = perturb(change(config, predict=True))["npeff"].summary
    assert again.kl_ratio == pytest.approx(found.kl_ratio, rel=1e-4)
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
    folder, saved = results(config, f"npeff-{direction}-lift-heldout")
    assert saved["notes"]["ridge"] == config.ridge
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]["component"] == [1, 4]
    rows = (folder / "results.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows[1:3]] == ["1", "4"]
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
    best = max(trial.ratio for trial in first.ridges)
    assert first.ridge == max(trial.ridge for trial in first.ridges if trial.ratio >= 0.9 * best)
    assert perturb(change(config, component=[1]))["npeff"].notes == first
    # and it does not depend on which components are asked for
    assert perturb(change(config, component=[2], perturbation="other"))["npeff"].notes.ridges == first.ridges


def test_what_comes_with_results_may_be_asked_for_later(config):
    first = perturb(change(config, component=[4], curve=[0.5]))["npeff"].components[0]
    folder, _ = results(config, "npeff-reject-lift-heldout")
    saved = perturb(change(config, component=[4], save="delta"))["npeff"].components[0]
    assert (folder / saved.saved.path).is_file()
    assert saved.curve == first.curve
    assert saved.best.ratio == pytest.approx(first.best.ratio, rel=1e-4)
    adapter = perturb(change(config, component=[4], save="adapter"))["npeff"].components[0].saved
    assert adapter.share == 0.9
    other = perturb(change(config, component=[4], save="adapter", adapter_share=0.5))["npeff"].components[0].saved
    assert other.kept < adapter.kept


def test_results_of_versions_without_a_protocol_are_listed_and_not_continued(config):
    config = change(config, protocol="paper", perturbation="old")
    perturb(config)
    folder, _ = results(config, "old")
    made = read_object(folder / "config.json")
    del made["config"]["protocol"]
    write_json(folder / "config.json", made, sealed=True)
    for path in (folder / "results.json", *(folder / "components").iterdir()):
        values = read_object(path)
        for record in values.get("components", [values]):
            record["outcomes"] = [record["best"], record["best"] | {"sign": -record["best"]["sign"]}]
        write_json(path, values, sealed=True)
    run = Run.open(config.run)
    old = read_results(folder)
    assert [line[0] for line in write_overview(folder.parent).rows] == ["old"]
    assert read_perturbations(run, "npeff", open_decomposition(run, "npeff")) == []
    with pytest.raises(UserError, match="by rules that are no longer in use"):
        perturb(config)
    assert read_results(folder) == old


def test_results_of_another_decomposition_are_not_continued(config):
    perturb(change(config, perturbation="x"))
    with pytest.raises(UserError, match="--decomposition was npeff and is now clusters"):
        perturb(change(config, decomposition="clusters", component=[], count=1, perturbation="x"))
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
    assert re.search(r"2 components and 3 random groups to do: lifting takes about [\d.]+ seconds, measuring", said)


def test_whitening_leaves_users_out_and_beats_plain(config):
    run = Run.open(config.run)
    decomposition = open_decomposition(run, "npeff")
    options = PerturbConfig("", component=(1, 4), top=4, random=16)
    plan = make_plan(run, decomposition, options)
    subjects = [plan.component(number) for number in plan.components]
    directions, plain, few = (
        DirectionMaker(run, decomposition, plan, replace(options, **how)).make(subjects)
        for how in ({"carriers": 1.0}, {"direction": "plain"}, {"carriers": 0.5})
    )
    difference = (directions.sums.weights["fisher"] - plain.sums.weights["fisher"]).numpy()
    carried = (few.sums.weights["fisher"] != 0).numpy()
    coefficients = decomposition.coefficients.numpy()
    for j, number in enumerate(plan.components):
        own = users(decomposition, [number])
        largest = coefficients[plan.fit, number].max()
        assert (coefficients[own, number] >= 0.1 * largest).all()
        assert 0 < len(own) <= 30
        assert not difference[j][own].any()
        assert difference[j].any()
        assert carried[j].sum() == round(0.5 * 60)
    rows = run.source("fisher").read(0, 120)
    torch.testing.assert_close(few.sums.weights["fisher"] @ rows, few.sums.vectors)
    torch.testing.assert_close(directions.sums.weights["fisher"] @ rows, directions.sums.vectors, rtol=1e-3, atol=1e-4)
    ratios = {name: perturb(change(config, direction=name))["npeff"].summary.kl_ratio for name in ("whiten", "plain")}
    assert ratios["whiten"] > ratios["plain"]


@pytest.mark.parametrize("method", ["gnpeff", "clusters", "svd-gradients"])
def test_other_methods(config, method):
    perturb(change(config, decomposition=method, component=[], count=2, top=3, magnitude=0.05, direction="whiten"))
    _, saved = results(config, f"{method}-whiten-lift-heldout")
    assert len(saved["components"]) == 2
    for record in saved["components"]:
        orders = {trial["order"] for trial in record["tried"]}
        assert orders == ({"positive", "negative", "absolute"} if method == "svd-gradients" else {"positive"})
        assert all(trial["magnitude"] == 0.05 for trial in (*record["tried"], record["best"]))
        assert record["fidelity"] > 0.98


def test_sensing(config):
    sensing = to_dict(SensingConfig(inner_iterations=5, long_steps=True))
    perturb(change(config, way="sensing", sensing=sensing))
    _, saved = results(config, "npeff-reject-sensing-heldout")
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

    def stop_at_four(session, subject, *rest):
        if subject.name == "component 4":
            raise KeyboardInterrupt
        return record(session, subject, *rest)

    monkeypatch.setattr(command._Session, "record", stop_at_four)
    with pytest.raises(KeyboardInterrupt):
        perturb(broken)
    monkeypatch.setattr(command._Session, "record", record)
    done = []
    monkeypatch.setattr(
        command._Session,
        "record",
        lambda session, subject, *rest: done.append(subject.name) or record(session, subject, *rest),
    )
    perturb(broken)
    assert done == ["component 4"]
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
    folder, before = results(config, "npeff-reject-lift-heldout")
    shutil.copytree(config.run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "perturbations")
    replay(ReplayConfig(str(folder), to=str(tmp_path / "again")))
    _, after = results(change(config, run=str(tmp_path / "again")), "npeff-reject-lift-heldout")
    for one, other in zip(before["components"], after["components"], strict=True):
        assert one["component"] == other["component"]
        assert one["best"]["ratio"] == pytest.approx(other["best"]["ratio"], rel=1e-4)


def test_bad_input(config):
    with pytest.raises(UserError, match="no component 99"):
        perturb(change(config, component=[99]))
    with pytest.raises(UserError, match="too few"):
        perturb(change(config, random=1000, protocol="paper"))
    with pytest.raises(UserError, match="Cannot read --elsewhere"):
        perturb(change(config, elsewhere="nowhere.txt"))
    with pytest.raises(UserError, match="no finished decomposition"):
        perturb(change(config, decomposition="nothing"))
    for wrong in (
        {"fidelity": 0.0},
        {"top": 0},
        {"target_kl": 0.0},
        {"perturbation": "../x"},
        {"magnitude": -1.0},
        {"curve": [0.0]},
        {"nulls": -1},
        {"protocol": "none"},
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
