"""`npeff icl`: the classifier against brute force, contexts read once, the table from a tiny model."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from npeff import cli
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.paper.config import IclConfig
from npeff.paper.icl import icl
from npeff.paper.icl_context import draw, render
from npeff.paper.icl_predict import Predictor
from npeff.paper.icl_votes import classify, label_weights
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, write_json
from tests import tiny
from tests.synthetic import add_decomposition, make_run


@pytest.fixture(scope="module")
def run(model_directory: Path, review_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """40 reviews of the tiny model, decomposed by two methods."""
    path = str(tmp_path_factory.mktemp("icl") / "run")
    config = CollectConfig(
        path,
        data=DataConfig(data=str(review_file)),
        model=ModelConfig(str(model_directory)),
        sketch=SketchConfig(dim=64),
        shard_examples=16,
    )
    collect(config)
    for method in ("npeff", "clusters"):
        decompose(DecomposeConfig(run=path, method=method, components=3))  # type: ignore[arg-type]
    return Run.open(path)


# --- the classifier ------------------------------------------------------------------------------------------------


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
    from npeff.decompose.run import open_decomposition

    found = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    add_decomposition(found, method)
    decomposition = open_decomposition(found, method)
    labels = found.table["label"].to_numpy().astype(np.int64)
    votes = classify(decomposition, labels, np.ones(90, bool), 2, top=8)
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
            assert votes.predictions[i] == int(sums[1] > sums[0])
            assert not votes.undecided[i]


# --- contexts ------------------------------------------------------------------------------------------------------


def test_sets_do_not_meet_the_scored_examples() -> None:
    sets, scored = draw(np.arange(100, 160), shots=6, sets=20, scored=40, seed=3)
    assert len(sets) == 20
    assert all(len(set(chosen)) == 6 for chosen in sets)
    assert len(set(scored)) == 40
    assert not set(scored) & {example for chosen in sets for example in chosen}
    assert draw(np.arange(100, 160), 6, 20, 40, 3) == (sets, scored)
    with pytest.raises(UserError, match="Only 60 usable examples have a label"):
        draw(np.arange(60), 6, 20, 55, 3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "opt"])
def test_reading_the_context_once_changes_nothing(family: str, tmp_path: Path, review_file: Path) -> None:
    config = CollectConfig(
        str(tmp_path / "run"),
        data=DataConfig(data=str(review_file)),
        model=ModelConfig(str(tiny.save(tmp_path / "model", family))),
        sketch=SketchConfig(dim=64),
        fisher=False,
        gradient=False,
    )
    other = collect(config)
    prepared = prepare_run(other)
    context = render(prepared.task, other.table, [0, 1])
    assert context.count("Review: ") == 2
    assert "Sentiment: Negative\n\n" in context
    shared, plain = Predictor(prepared), Predictor(prepared)
    plain.shares = False
    examples = other.table.slice(2)
    assert shared.predict(context, examples).tolist() == plain.predict(context, examples).tolist()
    assert shared.shares, "the first batch agreed with whole prompts"
    # without a context the run's own predictions come back
    assert shared.predict("", other.table).tolist() == other.table["prediction"].to_pylist()


def test_a_cache_that_disagrees_is_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(prepare_run(run))
    monkeypatch.setattr(predictor, "_behind", lambda cache, shared, prompts: torch.randn(len(prompts), 2) * 9)
    assert predictor.predict("", run.table).tolist() == run.table["prediction"].to_pylist()
    assert not predictor.shares


# --- the command ---------------------------------------------------------------------------------------------------

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
    with pytest.raises(UserError, match=r"has \d+ tokens, but the model takes 128"):
        icl(IclConfig(str(run.path), shots=12, sets=1, scored=12))
    with pytest.raises(UserError, match="no finished decomposition 'x'"):
        icl(IclConfig(str(run.path), names=("x",)))
    texts = [f"text {i}" for i in range(30)]
    with pytest.raises(UserError, match="vocabulary"):
        icl(IclConfig(str(make_run(tmp_path / "v", texts, task_labels=[]).path)))
    with pytest.raises(UserError, match="has no labels"):
        icl(IclConfig(str(make_run(tmp_path / "u", texts, labels=[None] * 30).path)))
    with pytest.raises(UserError, match="has no finished decomposition"):
        icl(IclConfig(str(make_run(tmp_path / "d", texts).path)))
    prefixed = make_run(tmp_path / "p", texts)
    prefixed.manifest["task"]["prefix"] = "Review: good\nSentiment: Positive\n\n"
    write_json(prefixed.path / "manifest.json", prefixed.manifest)
    with pytest.raises(UserError, match="few-shot prefix"):
        icl(IclConfig(str(prefixed.path)))
    for options in ({"shots": 0}, {"purity": 0.5}, {"seed": -1}):
        with pytest.raises(UserError):
            IclConfig("x", **options)  # type: ignore[arg-type]


def test_the_command_line() -> None:
    config = cli.parse("icl", ["runs/x", "--names", "a", "b", "--shots", "4"])
    assert config == IclConfig("runs/x", ("a", "b"), shots=4)
