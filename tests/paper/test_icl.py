"""`npeff icl`: the table from a tiny model, resuming, mistakes, and the classifier by hand and against brute force."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from npeff import cli
from npeff.decompose.run import open_decomposition
from npeff.paper.config import IclConfig
from npeff.paper.icl import (
    UNDECIDED,
    classify,
    correct,
    fit_offsets,
    icl,
    label_weights,
    mcnemar,
    mean_and_interval,
)
from npeff.paper.icl_context import Predictor
from npeff.store.run import Run
from npeff.utils.configs import write_record
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, write_json
from tests.synthetic import add_decomposition, make_run

OPTIONS = {"shots": 2, "sets": 3, "scored": 12, "top": 4}


def test_the_table(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = icl(IclConfig(str(run.path), **OPTIONS))  # type: ignore[arg-type]
    found = read_json(directory / "table.json")
    assert [row["title"] for row in found["rows"]] == ["NPEFF", "GC"]
    assert found["examples"] == 38
    behind = np.array(read_json(directory / "predictions.json")["predictions"])
    labels, before = (run.table[name].to_numpy() for name in ("label", "prediction"))
    kept = np.setdiff1d(np.arange(40), found["context"]["examples"])
    accuracies = {row["title"]: row["accuracy"] for row in found["models"]}
    assert accuracies["2-shot"] == np.mean(behind[kept] == labels[kept])
    assert accuracies["0-shot"] == np.mean(before[kept] == labels[kept])
    for row in (*found["rows"], *found["models"]):
        assert 0 <= row["decided"] <= 1
        if row["accuracy"] is not None:
            assert row["interval"][0] <= row["accuracy"] <= row["interval"][1]
    assert len(found["context"]["scores"]) == 3
    text = (directory / "table.md").read_text()
    assert "| NPEFF |" in text
    assert "| 0-shot, corrected | 100.0 |" in text
    assert text in capsys.readouterr().out
    rows = list(csv.DictReader((directory / "table.csv").open(encoding="utf-8")))
    assert [row["title"] for row in rows] == ["NPEFF", "GC", "0-shot", "0-shot, corrected", "2-shot"]
    assert (directory / "table.png").is_file()
    assert (directory / "table.svg").is_file()


def test_scores_that_are_known_are_not_computed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = icl(IclConfig(str(run.path), **OPTIONS, seed=1))  # type: ignore[arg-type]
    whole = read_json(directory / "search.json"), read_json(directory / "predictions.json")
    # as if it had been killed after the first set and the first block
    write_json(directory / "search.json", {**whole[0], "scores": whole[0]["scores"][:1]})
    write_json(directory / "predictions.json", {**whole[1], "predictions": whole[1]["predictions"][:16]})
    asked: list[int] = []
    plain = Predictor.predict
    monkeypatch.setattr(
        Predictor,
        "predict",
        lambda self, context, examples: asked.append(len(examples)) or plain(self, context, examples),
    )
    icl(IclConfig(str(run.path), **OPTIONS, seed=1))  # type: ignore[arg-type]
    assert asked == [12, 12, 16, 8]
    assert (read_json(directory / "search.json"), read_json(directory / "predictions.json")) == whole


def test_mistakes_are_told(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Only 40 usable examples"):
        icl(IclConfig(str(run.path)))
    with pytest.raises(UserError, match=r"has \d+ tokens, but the model takes 1 to 128.*fewer --shots"):
        icl(IclConfig(str(run.path), shots=12, sets=1, scored=12))
    with pytest.raises(UserError, match="no finished decomposition 'x'"):
        icl(IclConfig(str(run.path), decomposition=("x",)))
    texts = [f"text {i}" for i in range(30)]
    with pytest.raises(UserError, match="vocabulary"):
        icl(IclConfig(str(make_run(tmp_path / "v", texts, task_labels=[]).path)))
    with pytest.raises(UserError, match="has no labels"):
        icl(IclConfig(str(make_run(tmp_path / "u", texts, labels=[None] * 30).path)))
    with pytest.raises(UserError, match="has no finished decomposition"):
        icl(IclConfig(str(make_run(tmp_path / "d", texts).path)))
    prefixed = make_run(tmp_path / "p", texts)
    task = replace(prefixed.manifest.task, prefix="Review: good\nSentiment: Positive\n\n")
    write_record(prefixed.path / "manifest.json", replace(prefixed.manifest, task=task))
    with pytest.raises(UserError, match="few-shot prefix"):
        icl(IclConfig(str(prefixed.path)))
    for options in ({"shots": 0}, {"purity": 0.5}, {"seed": -1}):
        with pytest.raises(UserError):
            IclConfig("x", **options)  # type: ignore[arg-type]


def test_the_command_line() -> None:
    config = cli.parse("icl", ["runs/x", "--decomposition", "a", "b", "--shots", "4"])
    assert config == IclConfig("runs/x", ("a", "b"), shots=4)


def test_files_of_the_first_version_continue(run: Run) -> None:
    """0.1.0 wrote search.json and predictions.json with fewer keys."""
    directory = icl(IclConfig(str(run.path), **OPTIONS, seed=2))  # type: ignore[arg-type]
    search, predictions = (read_json(directory / name) for name in ("search.json", "predictions.json"))
    old = {"key": {name: search["key"][name] for name in ("run", "sets", "scored")}, "scores": [0.0, 1.0, 0.0]}
    write_json(directory / "search.json", old, sealed=True)
    icl(IclConfig(str(run.path), **OPTIONS, seed=2))  # type: ignore[arg-type]
    table = read_json(directory / "table.json")
    assert table["context"]["scores"] == [0.0, 1.0, 0.0], "known scores are taken as they are"
    assert table["context"]["examples"] == search["key"]["sets"][1]
    assert predictions["key"]["context"].count("Review: ") == 2


def test_the_old_name_of_an_option() -> None:
    with pytest.raises(UserError, match="--names is now --decomposition"):
        cli.parse("icl", ["runs/x", "--names", "a"])


def test_weights_by_hand() -> None:
    scores = torch.tensor([[4.0, 1, 0], [3, 2, 0], [2, 3, 0], [1, 4, 1], [9, 9, 9]])
    labels = np.array([0, 0, 0, 1, 1])
    usable = np.array([True, True, True, True, False])
    weights, left_out = label_weights(scores, labels, usable, 2, top=4, purity=0.75)
    assert weights.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert left_out == 1
    weights, _ = label_weights(scores, labels, usable, 2, top=2, purity=0.75)
    assert weights.tolist() == [[1, 0, 0], [0, 0, 0]], "half is not three quarters"
    unknown = np.array([-1, 0, 0, 1, 1])
    assert label_weights(scores, unknown, usable, 2, top=2, purity=1)[0].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-gradients"])
def test_predictions_equal_brute_force(tmp_path: Path, method: str) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    add_decomposition(run, method)
    decomposition = open_decomposition(run, method)
    labels = run.table["label"].to_numpy().astype(np.int64)
    weights, _ = label_weights(decomposition.scores("positive"), labels, np.ones(90, bool), 2, top=8, purity=0.75)
    predictions = classify(decomposition, weights)
    w = decomposition.coefficients.numpy()
    for i in range(90):
        sums = [0.0, 0.0]
        for j in range(w.shape[1]):
            best = [k for k in np.argsort(-w[:, j], kind="stable") if w[k, j] > 0][:8]
            if len(best) == 8:
                value = float(w[i, j] > 0) if method == "clusters" else float(w[i, j])
                for label in (0, 1):
                    sums[label] += value * (np.mean(labels[best] == label) >= 0.75)
        if abs(sums[0] - sums[1]) > 1e-6:
            assert predictions[i] == int(sums[1] > sums[0])
        elif sums[0] == sums[1] == 0:
            assert predictions[i] == UNDECIDED


@pytest.mark.parametrize("classes", [2, 4])
def test_offsets_are_the_best_that_brute_force_finds(classes: int) -> None:
    random = np.random.default_rng(classes)
    for _ in range(20):
        labels = random.integers(0, classes, 25)
        # rounded, so that some examples need the same offset
        scores = np.round(random.standard_normal((25, classes)) + 2 * (np.arange(classes) == labels[:, None]), 1)
        scores[:, 0] += 3

        def right(offsets: np.ndarray, scores: np.ndarray = scores, labels: np.ndarray = labels) -> int:
            return int(((scores + offsets).argmax(axis=1) == labels).sum())

        found = fit_offsets(scores, labels)
        assert right(found) >= right(np.zeros(classes))
        for answer in range(classes):  # no other offset of one answer is better
            for value in np.arange(-12, 12, 0.05) + 0.01:
                assert right(np.where(np.arange(classes) == answer, value, found)) <= right(found)


def test_an_example_has_no_say_in_its_own_correction() -> None:
    random = np.random.default_rng(0)
    probabilities = random.dirichlet([2, 1], 60)
    labels, places, folds = random.integers(0, 2, 60), np.arange(5, 60), np.arange(55) % 5
    predictions = correct(probabilities, labels, places, folds)
    assert (predictions[:5] == UNDECIDED).all()
    for fold in range(5):
        own = places[folds == fold]
        other = labels.copy()
        other[own] = 1 - other[own]
        assert (correct(probabilities, other, places, folds)[own] == predictions[own]).all()


def test_intervals_and_the_paired_test() -> None:
    values = np.array([1, 0, 0, -1, 1, 1, 0, 1])
    mean, (low, high) = mean_and_interval(values)  # type: ignore[misc]
    draws = np.random.default_rng(1).choice(values, (20000, 8)).mean(axis=1)
    assert mean == values.mean()
    assert (low, high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=0.13)
    assert mean_and_interval(values[:0]) == (None, None)
    first, second = np.array([1, 1, 1, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 0, 0, 1, 1, 0])
    # five against one: all outcomes of six fair coins that are as uneven
    assert mcnemar(first, second) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(first, first) == 1
    assert mcnemar(first[:0], first[:0]) is None
