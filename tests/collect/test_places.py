"""Several places of a prompt: each an example with answers of its own, in one forward pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.run import analyse
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, prepare_with_prompts, read_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.models.prompts import encode
from npeff.store.examples import label_texts
from npeff.tasks.config import DataConfig
from npeff.tasks.task import Task
from npeff.utils import UserError
from tests import tiny
from tests.collect.test_capture import plain_rows
from tests.collect.test_refusals import refuse

PLACES = (
    {"ask": "\nDrink:", "column": "drink", "labels": ["tea", "coffee", "milk"]},
    {"ask": "\nSize:", "column": "size", "labels": ["large", "small"]},
)
ROWS = [
    {"text": f"{text} {size}", "drink": drink, "size": size}
    for text in tiny.TEXTS[:6]
    for drink, size in (("tea", "large"), ("milk", "small"))
]


@pytest.fixture
def config(tmp_path, model_directory):
    task, data = tmp_path / "form.yaml", tmp_path / "orders.jsonl"
    task.write_text(f'prompt: "Order: {{text}}"\nanswers: tokens\nplaces: {json.dumps(PLACES)}\n')
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return CollectConfig(
        run=str(tmp_path / "run"),
        data=DataConfig(task=str(task), data=str(data)),
        model=ModelConfig(model=str(model_directory)),
        directions=DirectionsConfig("exact"),
        sketch=SketchConfig(dim=256),
    )


def test_each_place_is_an_example_with_what_stands_before_it(config):
    prepared, dataset, prompts = prepare_with_prompts(config)
    table, tokenizer = dataset.table.to_pylist(), prepared.model.tokenizer
    assert prepared.task.labels == ("tea", "coffee", "milk", "large", "small")
    assert len(table) == 2 * len(ROWS)
    for number, row in enumerate(ROWS):
        first, second = table[2 * number : 2 * number + 2]
        assert [first["label"], second["label"]] == [prepared.task.labels.index(row[n]) for n in ("drink", "size")]
        assert prompts[2 * number] == encode(tokenizer, f"Order: {row['text']}\nDrink:")
        assert prompts[2 * number + 1] == encode(tokenizer, f"Order: {row['text']}\nDrink: {row['drink']}\nSize:")


def test_rows_are_those_of_the_answers_of_each_place_by_autograd(config):
    prepared, _, prompts = prepare_with_prompts(config)
    collector, (batch, *_) = prepared.collector, prepared.collector.batches(prompts[:4], 1000, shared=True)
    assert len(batch) == 4
    found = collector.collect([prompts[i] for i in batch], batch)
    for row, i in enumerate(batch):
        labels = tuple(PLACES[i % 2]["labels"])
        task = Task("one", f"{{text}}{PLACES[i % 2]['ask']}", "tokens", labels=labels)
        z, G = plain_rows(
            prepared.model, prepared.selection, collector.sketch, task, prompts[i], torch.eye(len(labels))
        )
        p = z.float().reshape(-1).softmax(0)
        expected = G.T @ (torch.diag(p) - p[:, None] * p) @ G
        fisher = found["rows"][row].T @ found["rows"][row] * found["pef_norm"][row]
        assert (fisher - expected).norm() < 1e-4 * expected.norm()
        own = [prepared.task.labels.index(label) for label in labels]
        torch.testing.assert_close(found["probabilities"][row, own], p, rtol=1e-3, atol=1e-5)
        assert found["probabilities"][row].sum() == pytest.approx(1, abs=1e-5)


def test_places_of_a_prompt_share_its_forward_pass(config):
    prepared, _, prompts = prepare_with_prompts(config)
    collector = prepared.collector
    together = collector.collect(prompts[:2], [0, 1])
    assert collector.shares_prompts
    for i in (0, 1):
        alone = collector.collect([prompts[i]], [i])
        for name in ("rows", "probabilities", "activation"):
            torch.testing.assert_close(together[name][i], alone[name][0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("answers", ["tokens", "suffixes"])
def test_a_run_with_places_goes_through_the_pipeline(config, answers, tmp_path, capsys):
    path = tmp_path / "form.yaml"
    path.write_text(path.read_text().replace("answers: tokens", f"answers: {answers}"))
    run = collect(config)
    assert "accuracy" in capsys.readouterr().out
    labels = run.manifest.task.labels
    for number, (said, right) in enumerate(
        zip(run.table["prediction_text"].to_pylist(), label_texts(run.table, labels), strict=True)
    ):
        assert {said, right} <= set(PLACES[number % 2]["labels"])
    assert read_prompts(run, prepare_run(run))
    decompose(DecomposeConfig(run=config.run, decomposition="d", components=3))
    (analysis,) = analyse(AnalyseConfig(config.run, "d"))
    assert sum(analysis.component[0].orderings[0].labels.values()) == len(analysis.component[0].orderings[0].top)


def test_a_missing_answer_ends_the_places_of_a_row(config, tmp_path):
    rows = [ROWS[0], {**ROWS[2], "drink": None}, {**ROWS[4], "size": ""}]
    (tmp_path / "orders.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, dataset, _ = prepare_with_prompts(config)
    assert dataset.table["source_row"].to_pylist() == [1, 1, 2, 3, 3]  # lines of the file
    assert dataset.table["label"].to_pylist() == [0, 3, None, 0, None]


def test_data_that_do_not_fit_the_places_are_refused(config, tmp_path, capsys):
    words = ["collect", config.run, "--task", config.data.task, "--model", config.model.model, "--data"]
    wrong, lacking = tmp_path / "wrong.jsonl", tmp_path / "lacking.jsonl"
    wrong.write_text(json.dumps({**ROWS[0], "size": "tea"}) + "\n")
    lacking.write_text(json.dumps({"text": "a", "drink": "tea"}) + "\n")
    refuse([*words, str(wrong)], capsys, "'size' is 'tea'", "no answer to")
    refuse([*words, str(lacking)], capsys, "no column 'size'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": ({"ask": "A:", "column": "a"},)}, "place 1 should have ask"),
        ({"places": (PLACES[0], {**PLACES[1], "ask": "a\nDrink:"})}, "place 2 ends with what another one asks"),
        ({"places": ({**PLACES[0], "labels": ["tea", True]},)}, "no text"),
        ({"places": ({**PLACES[0], "ask": "Drink: "},)}, "white space at the end"),
        ({"places": ("Drink:",)}, "a list of mappings"),
        ({"chat": True}, "neither chat nor few_shot"),
        ({"answers": "vocabulary"}, "several places need"),
        ({"labels": ("a", "b")}, "labels are those of the places"),
    ],
)
def test_mistakes_in_places_are_told(changes, message):
    good = Task("form", "{text}", "tokens", places=PLACES)
    assert replace(good, name="again").labels == good.labels
    with pytest.raises(UserError, match=message):
        Task(**{"name": "form", "prompt": "{text}", "answers": "tokens", "places": PLACES} | changes)
