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
from npeff.paper.icl import classify, icl, label_weights
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
    assert found["accuracy_k"] == np.mean(behind[kept] == labels[kept])
    assert found["accuracy_0"] == np.mean(before[kept] == labels[kept])
    assert len(found["context"]["scores"]) == 3
    text = (directory / "table.md").read_text()
    assert "| | NPEFF | GC |" in text
    assert "| Similarity ICL |" in text
    assert text in capsys.readouterr().out
    rows = list(csv.DictReader((directory / "table.csv").open(encoding="utf-8")))
    assert [row["title"] for row in rows] == ["NPEFF", "GC"]
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
    predictions, undecided = classify(decomposition, weights)
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
            assert not undecided[i]
