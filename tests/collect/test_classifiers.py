"""Classifiers: rows against plain autograd, one text at a time as the model's users call it; pairs; what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
import yaml

from npeff.collect.capture import Capture
from npeff.collect.check import check, compare_with_autograd
from npeff.collect.config import CheckConfig, CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import collect_texts, prepare_run, prepare_with_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.tasks.config import DataConfig
from npeff.tasks.task import Task, task_from_yaml
from npeff.utils.errors import UserError
from tests import tiny

ENCODERS = [family for family in tiny.CLASSIFIERS if not family.endswith("-score")]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Sixteen labelled pairs of texts."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"premise": f"{i} {tiny.TEXTS[i % 6]}", "hypothesis": tiny.TEXTS[(2 * i + 1) % 6], "label": tiny.CLASSES[i % 3]}
        for i in range(16)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifiers")
    return {family: tiny.save_classifier(folder / family, family) for family in tiny.CLASSIFIERS}


def config_for(folder, model, data, **task):
    keys = {"answers": "classes", "text_columns": ["premise"], "data": str(data), **task}
    (folder / "task.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return CollectConfig(
        str(folder / "run"),
        data=DataConfig(task=str(folder / "task.yaml")),
        model=ModelConfig(model=str(model), device="cpu"),
        sketch=SketchConfig(dim=256),
        batch_tokens=150,
        storage="float32",
    )


@pytest.mark.parametrize("family", tiny.CLASSIFIERS)
def test_rows_equal_autograd(family, models, pairs, tmp_path):
    """The reference is the tokenizer and the model as transformers documents them, unpadded and without our code."""
    pair = {"pair": "{hypothesis}"} if family in ENCODERS else {"prompt": "{text} So: {hypothesis}"}
    prepared, _, prompts = prepare_with_prompts(config_for(tmp_path, models[family], pairs, **pair))
    assert prepared.task.labels == tiny.CLASSES
    collector, selection, sketch = prepared.collector, prepared.selection, prepared.collector.sketch
    network = hf.AutoModelForSequenceClassification.from_pretrained(models[family]).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(models[family])
    left = set(selection.left_out)
    weights = {name: weight for name, weight in network.named_parameters() if name not in left}
    assert not any("norm" in name.lower() or "embed" in name for name in weights)
    assert any("pooler" in name or "head.dense" in name or "classifier.dense" in name for name in weights) == (
        family in ENCODERS
    )
    V = torch.randn(len(prompts), 1, 3, generator=torch.Generator().manual_seed(0))
    lengths = {len(prompt) for prompt in prompts}
    assert len(lengths) > 3
    seen = 0
    for batch in collector.batches(prompts, 150):
        with Capture(selection.modules, sketch.fold_input) as capture:
            capture.start(len(batch), *collector.answer_model.sequences([prompts[i] for i in batch]))
            z, _ = collector.answer_model.logits([prompts[i] for i in batch])
            rows = capture.rows(z, V[batch], sketch)
        seen = max(seen, len(batch))
        for i, row, logits in list(zip(batch, rows[:, 0], z.detach(), strict=True))[:3]:
            record = json.loads(pairs.read_text(encoding="utf-8").splitlines()[i])
            texts = (
                [record["premise"], record["hypothesis"]]
                if family in ENCODERS
                else [" So: ".join(list(record.values())[:2])]
            )
            expected_z = network(**tokenizer(*texts, return_tensors="pt")).logits[0]
            torch.testing.assert_close(logits, expected_z.detach(), rtol=1e-4, atol=1e-4)
            found = dict(zip(weights, torch.autograd.grad(expected_z @ V[i, 0], list(weights.values())), strict=True))
            expected = sketch.matvec({m.name: m.pack(found) for m in selection.modules})
            assert (row - expected).norm() < 1e-4 * expected.norm()
    assert (seen == 1) == (family == "deberta-v2")


def test_from_collection_to_perturbation(models, pairs, tmp_path):
    config = config_for(tmp_path, models["bert"], pairs, pair="{hypothesis}")
    run = collect(config)
    assert run.manifest.task.labels == list(tiny.CLASSES)
    assert run.manifest.task.pair == "{hypothesis}"
    assert set(run.table["prediction_text"].to_pylist()) <= set(tiny.CLASSES)
    assert run.table["label"].null_count == 0
    rows, _ = collect_texts(run, ["a film"], fields=[{"hypothesis": "good"}])
    assert len(rows.ranks) == 1
    assert prepare_run(run, "cpu").model.classifies
    decompose(DecomposeConfig(run=str(tmp_path / "run"), components=3, holdout=0.0, device="cpu", max_passes=50))
    options = {"component": (0,), "protocol": "paper", "top": 3, "random": 6, "nulls": 0, "device": "cpu"}
    (results,) = perturb(PerturbConfig(run=str(tmp_path / "run"), **options)).values()
    assert results.components[0].best.elsewhere == []


@pytest.mark.parametrize("family", ["roberta", "deberta-v2", "llama-score"])
def test_check_fits(family, models, pairs, tmp_path, capsys):
    config = config_for(tmp_path, models[family], pairs)
    report = check(CheckConfig(str(models[family]), config.data.task))
    assert report.fits
    assert report.autograd_error > 0
    said = capsys.readouterr().out
    assert "and chooses 'entailment' or 'neutral' or 'contradiction'" in said
    assert "--few-shot" not in said


def test_heads_are_left_out_unless_included(models, pairs, tmp_path):
    config = config_for(tmp_path, models["bert"], pairs)
    prepared, _, prompts = prepare_with_prompts(config)
    assert {"classifier.weight", "classifier.bias"} <= set(prepared.selection.left_out)
    assert compare_with_autograd(prepared, prompts[:2]).fits
    from dataclasses import replace

    both = replace(config, model=replace(config.model, include=("classifier.*", "*.pooler.*")))
    prepared, _, prompts = prepare_with_prompts(both)
    assert {module.name for module in prepared.selection.modules} == {"classifier", "bert.pooler.dense"}
    assert compare_with_autograd(prepared, prompts[:3]).fits


def refusal(folder, model, data, **task):
    with pytest.raises(UserError) as refused:
        prepare_with_prompts(config_for(folder, model, data, **task))
    return str(refused.value)


def test_refusals(models, pairs, tmp_path, model_directory):
    bert = models["bert"]
    assert "needs a classifier" in refusal(tmp_path, model_directory, pairs)
    said = refusal(tmp_path, models["llama-score"], pairs, pair="{hypothesis}")
    assert "takes no pairs" in said
    assert 'prompt: "{text} {hypothesis}"' in said
    assert "in its order: entailment, neutral" in refusal(tmp_path, bert, pairs, labels=list(tiny.CLASSES[::-1]))
    assert "in its order" in refusal(tmp_path, bert, pairs, labels=["a", "b"])
    task = {"answers": "tokens", "prompt": "{text}:", "labels": list(tiny.CLASSES)}
    assert "is a classifier" in refusal(tmp_path, bert, pairs, **task)
    many = tiny.save_classifier(tmp_path / "many", "bert", problem_type="multi_label_classification")
    assert "does not choose one of several" in refusal(tmp_path, many, pairs)


def test_labels_of_the_task_rename_classes(models, pairs, tmp_path):
    names = ["yes", "maybe", "no"]
    label_map = dict(zip(tiny.CLASSES, names, strict=True))
    prepared, dataset, _ = prepare_with_prompts(
        config_for(tmp_path, models["bert"], pairs, labels=names, label_map=label_map)
    )
    assert prepared.answers.names == tuple(names)
    assert dataset.table["label"].to_pylist()[:4] == [0, 1, 2, 0]


def test_tasks_of_classifiers():
    task = task_from_yaml("answers: classes", "c", "c.yaml")
    assert (task.prompt, task.labels, task.render("a b")) == ("{text}", (), "a b")
    for wrong, said in (
        ("answers: classes\nchat: true", "neither a chat"),
        ("answers: classes\nlabels: [a]", "only one label"),
        ('answers: tokens\nprompt: "{text}:"\nlabels: [a, b]\npair: "{b}"', "pair is for classifiers"),
    ):
        with pytest.raises(UserError, match=said):
            task_from_yaml(wrong, "c", "c.yaml")
    nli = Task("n", "{text}", "classes", pair="It follows that {hypothesis}")
    assert nli.fields == ("hypothesis",)
    assert nli.render_pair("x", {"hypothesis": "y"}) == "It follows that y"
