"""Answers that the model itself writes: sampled continuations, scored whole behind their prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.run import analyse
from npeff.cli import main
from npeff.collect.batch import Collector
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, prepare_with_prompts, read_prompts
from npeff.collect.sketch.make import make_sketch
from npeff.config import VerifyConfig
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.explore.export import export_site
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.config import ModelConfig, SamplesConfig
from npeff.models.prompts import encode
from npeff.models.select import select_parameters
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.task import Task
from npeff.utils import UserError
from npeff.verify import verify
from tests import tiny
from tests.collect.test_refusals import refuse

STORY = Task("g", "Review: {text}\nSentiment:", "generated")
TASK = 'prompt: "Review: {text}\\nSentiment:"\nanswers: generated\n'


@pytest.fixture
def config(tmp_path, model_directory, review_file):
    task = tmp_path / "story.yaml"
    task.write_text(TASK)
    return CollectConfig(
        run=str(tmp_path / "run"),
        data=DataConfig(task=str(task), data=str(review_file), limit=20),
        model=ModelConfig(model=str(model_directory)),
        sketch=SketchConfig(dim=256),
        samples=SamplesConfig(samples=5, max_tokens=4),
        shard_examples=8,
    )


def answer_model(**settings):
    model = tiny.loaded("llama")
    return AnswerModel(model, resolve_answers(STORY, model.tokenizer, SamplesConfig(**settings)))


def prompt_of(model, text):
    return encode(model.tokenizer, STORY.render(text))


def test_rows_equal_brute_force_over_the_continuations():
    """Whole continuations scored one by one with autograd, and the Fisher of their softmax as it is written."""
    asked = answer_model(samples=5, max_tokens=4)
    model, answers = asked.model, asked.answers
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    config = CollectConfig("", directions=DirectionsConfig("exact"), activation=False, gradient=False)
    collector = Collector(config, model, answers, selection, sketch)
    weights = {n: p for m in selection.modules for n, p in m.module.named_parameters(prefix=m.name, recurse=False)}
    for text in tiny.TEXTS[:3]:
        prompt = prompt_of(model, text)
        written = asked.sample(prompt)
        assert len(written) > 2
        answers.write(prompt, written, model.tokenizer)
        found = collector.collect([prompt], [0])
        scores, gradients = [], []
        for weight in weights.values():
            weight.requires_grad_(True)
        for suffix in written:
            log_p = model.network(input_ids=torch.tensor([[*prompt, *suffix]])).logits[0].log_softmax(-1)
            score = sum(log_p[len(prompt) - 1 + i, token] for i, token in enumerate(suffix))
            grads = dict(zip(weights, torch.autograd.grad(score, list(weights.values())), strict=True))
            parts = {m.name: (grads.get(f"{m.name}.weight"), grads.get(f"{m.name}.bias")) for m in selection.modules}
            gradients.append(sketch.matvec({m.name: m.matrix(*parts[m.name]) for m in selection.modules}))
            scores.append(score.detach())
        for weight in weights.values():
            weight.requires_grad_(False)
        p, G = torch.stack(scores).softmax(0), torch.stack(gradients)
        centred = G - p @ G
        expected = centred.T @ (p[:, None] * centred)
        fisher = found["rows"][0].T @ found["rows"][0] * found["pef_norm"][0]
        assert (fisher - expected).norm() < 1e-4 * expected.norm()
        assert found["prediction"][0] == int(p.argmax())
        assert found["top_probabilities"][0, : len(p)].sum() == pytest.approx(1, abs=1e-5)


def test_samples_depend_on_prompt_and_seed_only_and_follow_the_model():
    asked = answer_model(samples=400, max_tokens=1)
    prompt = prompt_of(asked.model, tiny.TEXTS[0])
    assert asked.sample(prompt) == asked.sample(prompt)
    assert asked.sample(prompt) != answer_model(samples=400, max_tokens=1, samples_seed=1).sample(prompt)
    with torch.no_grad():
        p = asked.model.network(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(0)
    likely = {(int(token),) for token in p.topk(3).indices}
    assert likely <= set(asked.sample(prompt))
    assert len(answer_model(samples=400, max_tokens=1, temperature=0.01).sample(prompt)) < 5


def test_continuations_end_with_the_stop_text():
    asked = answer_model(samples=300, max_tokens=6, stop="e")
    decode = asked.model.tokenizer.decode
    texts = [decode(list(ids)) for ids in asked.sample(prompt_of(asked.model, "good"))]
    stopped = [text for text in texts if "e" in text]
    assert stopped
    for ids in asked.sample(prompt_of(asked.model, "good")):
        assert "e" not in decode(list(ids[:-1]))


def test_a_run_keeps_and_shows_what_was_written(config, tmp_path, capsys):
    run = collect(config)
    assert "goes on with" in capsys.readouterr().out
    for row in run.table.to_pylist():
        assert 2 <= len(row["written"]) == len(row["written_tokens"]) <= 5
        assert row["prediction_text"] == row["written"][row["prediction"]]
    collect(config)
    assert "already complete" in capsys.readouterr().out
    prepared = prepare_run(Run.open(config.run))
    prompts = read_prompts(Run.open(config.run), prepared)
    for prompt, ids in zip(prompts, run.table["written_tokens"].to_pylist(), strict=True):
        assert [list(prepared.answers.tokens[i]) for i in prepared.answers.own[tuple(prompt)]] == ids
    decompose(DecomposeConfig(run=config.run, decomposition="d", components=3))
    (analysis,) = analyse(AnalyseConfig(config.run, "d"))
    assert set(analysis.component[0].orderings[0].predictions) <= set(run.table["prediction_text"].to_pylist())
    text = run.table["text"][4].as_py()
    capsys.readouterr()
    assert main(["probe", config.run, text]) == 0  # sampled again, and the same
    assert f"{run.table['prediction_text'][4].as_py().strip()} (" in capsys.readouterr().out
    site = export_site(run, tmp_path / "site").parent
    script = (site / "data" / "examples" / "0.js").read_text()
    block = json.loads(script[script.index("{") : script.rindex("}") + 1])
    for text in run.table["written"][2].as_py():
        assert text.strip() in block["fields"]["written"][2]


def test_perturbations_show_what_is_written_before_and_after(config):
    run = collect(config)
    decompose(DecomposeConfig(run=config.run, decomposition="d", components=3))
    asked = PerturbConfig(
        config.run, "d", component=(0,), protocol="paper", top=4, random=4, target_kl=0.05, nulls=0, direction="plain"
    )
    record = perturb(asked)["d"].components[0]
    assert [each.example for each in record.best.written] == record.best.top[:3]
    texts = run.table["written"].to_pylist()
    for each in record.best.written:  # the first sample with the run's seed, by the model as it was
        assert each.before == texts[each.example][0]
    assert any(each.before != each.after for each in record.best.written)
    (table,) = (Path(config.run) / "perturbations").glob("d-*/table.md")
    assert "before and after the change" in table.read_text()


def test_a_continued_run_keeps_what_was_written_first(config):
    whole = collect(config).table["written"].to_pylist()
    Path(config.run, "shards", "00001.safetensors").unlink()
    text = Path(config.run, "manifest.json").read_text()
    assert verify(VerifyConfig(config.run)) == ["shards/00001.safetensors"]
    assert Path(config.run, "manifest.json").read_text() == text  # hashes of the same shards
    assert Run.open(config.run).table["written"].to_pylist() == whole


def test_one_continuation_only_is_refused(config, capsys):
    words = ["collect", config.run, "--task", config.data.task, "--data", config.data.data, "--model"]
    cold = [*words, config.model.model, "--temperature", "0.0001", "--limit", "3", "--max-tokens", "2"]
    refuse(cold, capsys, "One continuation only", "--temperature", "--on-bad-example drop")
    refuse([*cold, "--samples", "1"], capsys, "at least 2")
    refuse([*cold, "--on-bad-example", "drop"], capsys, "No prompt fits", "One continuation only")
    refuse([*words, config.model.model, "--temperature", "0"], capsys, "above 0")


def test_check_takes_generated_answers(config, capsys):
    words = ["check", config.model.model, config.data.task, "--data", config.data.data, "--examples", "2"]
    assert main([*words, "--asked", "4", "--dim", "256"]) == 0
    assert "rows against plain autograd" in capsys.readouterr().out


def test_other_samples_are_another_run(config):
    collect(config)
    with pytest.raises(UserError, match="samples_seed was 0 and is now 1"):
        collect(replace(config, samples=replace(config.samples, samples_seed=1)))


def test_generated_answers_take_no_labels():
    with pytest.raises(UserError, match="leave out labels"):
        Task("t", "{text}", "generated", labels=("a", "b"))


def test_shared_prompts_give_what_each_continuation_alone_gives(config):
    found = []
    for share in (True, False):
        prepared, _, prompts = prepare_with_prompts(replace(config, share_prompt=share))
        found.append(prepared.collector.collect(prompts[:1], [0]))
    torch.testing.assert_close(found[0]["rows"], found[1]["rows"], rtol=1e-3, atol=1e-4)
