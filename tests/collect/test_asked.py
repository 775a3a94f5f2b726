"""What a model is asked and says, against transformers itself."""

from __future__ import annotations

import json

import pytest
import torch

from npeff.cli import main
from npeff.collect.asked import ask, spread
from npeff.collect.identity import differences, identity_of
from npeff.collect.session import prepare_run, prepare_with_prompts, read_prompts
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.store.run import Run
from npeff.store.schema import AskedTask
from npeff.tasks.task import Task
from npeff.utils.configs import from_dict
from tests import tiny
from tests.collect.runs import arguments, with_run


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A tiny model whose tokenizer has a chat template."""
    folder = tiny.save(tmp_path_factory.mktemp("chat"))
    tokenizer = tiny.tokenizer_with(tiny.CHATML)
    tokenizer.save_pretrained(folder)
    return folder


def test_what_is_said_is_what_the_model_says(config, tmp_path):
    prepared, dataset, prompts = prepare_with_prompts(with_run(config, tmp_path))
    asked = ask(prepared, dataset, prompts, 10)
    rows = spread(len(prompts), 10)
    assert rows[0] == 0
    assert rows[-1] == len(prompts) - 1
    labels, right, masses = dataset.table["label"].to_pylist(), [], []
    tokens = [ids[0] for ids in prepared.answers.tokens]
    entropies = []
    for row in rows:
        with torch.no_grad():
            p = prepared.model.network(torch.tensor([prompts[row]])).logits[0, -1].double().softmax(0)
        masses.append(float(p[tokens].sum()))
        q = p[tokens] / p[tokens].sum()
        right.append(int(q.argmax()) == labels[row])
        entropies.append(float(-(q * q.log2()).sum()))
    assert asked.accuracy == pytest.approx(sum(right) / 10)
    assert asked.mass == pytest.approx(sum(masses) / 10, rel=1e-4)
    assert asked.entropy == pytest.approx(sum(entropies) / 10, rel=1e-4)
    shown = "\n".join(asked.lines)
    text = prepared.model.tokenizer.decode(prompts[0])
    assert "\n".join(f"  | {line}" for line in text.split("\n")) in shown
    assert f"goes on with {' or '.join(repr(prepared.model.tokenizer.decode(token)) for token in tokens)}" in shown
    assert "chat template" not in shown


def test_mass_of_suffixes_counts_no_text_twice():
    """'pay bill now' is a way to go on with 'pay bill', so its probability is in that one's already."""
    model = tiny.loaded("llama")
    task = Task("t", "Q: {text}\nIntent:", "suffixes", tiny.INTENTS)
    answers = resolve_answers(task, model.tokenizer)
    prompt = model.tokenizer("Q: good\nIntent:").input_ids
    expected = 0.0
    for ids in answers.tokens:
        if any(ids != other and ids[: len(other)] == other for other in answers.tokens):
            continue
        whole = torch.tensor([[*prompt, *ids]])
        log_p = model.network(whole).logits[0].double().log_softmax(1)
        expected += float(sum(log_p[len(prompt) - 1 + i, token] for i, token in enumerate(ids)).exp())
    z, mass = AnswerModel(model, answers).ask([prompt])
    assert z.shape == (1, len(tiny.INTENTS))
    assert float(mass) == pytest.approx(expected, rel=1e-4)


def test_a_chat_run_replays(chat_model, review_file, tmp_path, capsys):
    """Collected with worked examples as turns; its prompts are made again from the run alone."""
    path = tmp_path / "run"
    command = ["collect", str(path), "--task", "sst2", "--data", str(review_file), "--model", str(chat_model)]
    command += ["--chat", "--few-shot", "2", "--dim", "256"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "  | <|assistant|>" in out
    assert "asked without it" not in out
    run = Run.open(path)
    asked = run.manifest.task.chat
    assert [next(iter(turn)) for turn in asked.turns] == ["user", "assistant"] * 2
    prepared = prepare_run(run)
    prompts = read_prompts(run, prepared)
    turns = [{"role": role, "content": text} for turn in asked.turns for role, text in turn.items()]
    for row, ids in enumerate(prompts):
        question = {"role": "user", "content": f"Review: {run.table['text'][row]}\nSentiment:"}
        whole = prepared.model.tokenizer.apply_chat_template([*turns, question], add_generation_prompt=True)
        assert ids == whole["input_ids"]
    assert main(command) == 0  # nothing has changed
    assert main(["replay", str(path), "--to", str(tmp_path / "copy")]) == 0
    copy = Run.open(tmp_path / "copy")
    assert copy.manifest.identity == run.manifest.identity
    assert torch.equal(copy.tensor("probability"), run.tensor("probability"))


def test_another_template_is_another_task(chat_model, review_file, tmp_path, capsys):
    command = ["collect", str(tmp_path / "run"), "--task", "sst2", "--data", str(review_file), "--chat", "--dim", "256"]
    changed = tmp_path / "changed"
    tiny.save(changed)
    tiny.tokenizer_with(tiny.CHATML.replace("<|assistant|>", "<|model|>")).save_pretrained(changed)
    assert main([*command, "--model", str(chat_model)]) == 0
    capsys.readouterr()
    assert main([*command, "--model", str(changed)]) == 2
    assert "task.chat.rendered was" in capsys.readouterr().err


def test_check_says_that_a_template_is_not_used(chat_model, review_file, capsys):
    command = ["check", str(chat_model), "sst2", "--data", str(review_file), "--dim", "256", "--examples", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "has a chat template, and is asked without it; --chat uses it." in out
    assert "This model and task fit." not in out  # a random model does no task
    assert "Or --chat, which uses" in out
    assert "collecting takes about" in out
    assert main([*command, "--chat"]) == 0
    assert "asked without it" not in capsys.readouterr().out
    command[2] = "judge"
    assert main(command) == 0
    assert "asked without it" not in capsys.readouterr().out
    assert main([*command, "--no-chat"]) == 0
    assert "asked without it" in capsys.readouterr().out


def test_a_dry_run_shows_it_too(config, capsys):
    assert main([*arguments(config), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "The model reads" in out
    assert "always the commonest label" in out
    assert "% of the model" in out


def test_exclusions_are_told(config, tmp_path, capsys):
    """In the command's output, the manifest, and the facts of the page."""
    from npeff.explore.export import facts

    assert main([*arguments(with_run(config, tmp_path / "run")), "--exclude", "*.mlp.*"]) == 0
    run = Run.open(tmp_path / "run")
    network = tiny.network("llama")
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    gone = sum(size for name, size in sizes.items() if ".mlp." in name)
    assert run.manifest.model_parameters == sum(sizes.values())
    assert run.manifest.excluded_parameters == gone
    share = f"{100 * gone / sum(sizes.values()):.3g}%"
    assert f"--include and --exclude leave out {share}" in capsys.readouterr().out
    assert facts(run)["left out"].startswith(f"{share} of the model's parameters")
    assert json.loads((run.path / "manifest.json").read_text())["excluded_parameters"] == gone


def test_runs_that_know_nothing_of_chats_and_adapters_continue(config, tmp_path):
    """Of earlier versions: entries that are missing stand for what there was then."""
    prepared, dataset, _ = prepare_with_prompts(with_run(config, tmp_path / "run"))
    now = identity_of(prepared.config, prepared.task, prepared.model, dataset.before)
    old = json.loads(json.dumps(now))
    del old["task"]["chat"], old["model"]["adapter"]
    assert "chat" not in old["data"]
    assert differences(old, now) == ""
    assert from_dict(AskedTask, old["task"]) == from_dict(AskedTask, now["task"])
