"""Steering: the unit of strength, what is said, and weights that come back."""

from __future__ import annotations

import pytest
import torch

import npeff
from npeff.act.config import SteerConfig
from npeff.act.steer import UNIT, Steering, steer
from npeff.cli import main
from npeff.collect.session import read_prompts
from npeff.decompose.run import open_decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.protocol import make_plan
from npeff.utils.errors import UserError
from tests import tiny

TEXT = "a film of great charm"


@pytest.fixture(scope="module")
def steering(held_run):
    return Steering(held_run, open_decomposition(held_run, "npeff"), 1, device="cpu")


def weights_of(network):
    return {name: parameter.detach().clone() for name, parameter in network.state_dict().items()}


def answers(steering, examples):
    """Log-probabilities of the answers, one example at a time."""
    prompts, model = read_prompts(steering.run, steering.prepared), steering.prepared.collector.answer_model
    with torch.inference_mode():
        return torch.cat([model.logits([prompts[i]])[0].double().log_softmax(1) for i in examples])


def test_strength_one_is_a_kl_of_a_tenth_to_second_order_and_up_is_towards_the_models_answers(steering):
    decomposition = open_decomposition(steering.run, "npeff")
    plan = make_plan(steering.run, decomposition, PerturbConfig("", component=(1,), random=60))
    top = plan.component(1).tune[0].top.tolist()
    before = answers(steering, top)
    kls, rises = [], []
    for strength in (0.02, -0.02):
        with steering.hold(strength):
            after = answers(steering, top)
        kls.append(float((before.exp() * (before - after)).sum(1).mean()) / strength**2)
        rises.append(float((after - before).gather(1, before.argmax(1, keepdim=True)).mean()))
    assert sum(kls) / 2 == pytest.approx(UNIT, rel=0.02)
    assert rises[0] > 0 > rises[1]


def test_weights_come_back_bit_for_bit(steering):
    before = weights_of(steering.prepared.model.network)

    def interrupted():
        with steering.hold(3.0) as model:
            assert any(not torch.equal(value, before[name]) for name, value in weights_of(model.network).items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    steering.say(TEXT, (5.0, -5.0), 4)
    after = weights_of(steering.prepared.model.network)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_said_is_what_the_changed_model_says(steering):
    asis, up = steering.say(TEXT, (0.0, 4.0), 5)
    network, tokenizer = tiny.network("llama"), tiny.tokenizer()
    ids = tokenizer(f"Review: {TEXT}\nSentiment:").input_ids
    for strength, said in ((0.0, asis), (4.0, up)):
        with torch.no_grad():
            for module in steering.prepared.selection.modules:
                for name, change in module.unpack(steering.vector[module.name]).items():
                    original = tiny.network("llama").get_parameter(name)
                    network.get_parameter(name).copy_(original + strength * steering.unit * change)
            taken = list(ids)
            for place in range(5):  # the likeliest token each time
                logits = network(torch.tensor([taken])).logits[0, -1]
                if place == 0:
                    answer = logits[[tokenizer(f" {label}").input_ids[0] for label in tiny.LABELS]].softmax(0)
                if int(logits.argmax()) == 0:
                    break
                taken.append(int(logits.argmax()))
        assert said.text == tokenizer.decode(taken[len(ids) :])
        assert said.answer == tiny.LABELS[int(answer.argmax())]
        assert said.probability == pytest.approx(float(answer.max()), rel=1e-4)
    assert abs(asis.probability - up.probability) > 1e-3


def test_the_command_and_python_say_the_same(held_run, capsys):
    path = str(held_run.path)
    options = ["--component", "1", "--strength", "2", "-2", "--tokens", "3", "--decomposition", "npeff"]
    assert main(["steer", path, TEXT, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[-3:]] == ["0", "2", "-2"]
    found = npeff.steer_text(held_run, TEXT, 1, strength=(2.0,), tokens=3, decomposition="npeff", plain=True)
    assert [(each.strength, each.answer) for each in found] == [(0.0, None), (2.0, None)]
    with npeff.hold_component(held_run, 1, 2.0, "npeff") as model:
        assert model.tokenizer(TEXT).input_ids


def test_mistakes_are_told(held_run):
    with pytest.raises(UserError, match="no component 99"):
        steer(SteerConfig(str(held_run.path), TEXT, 99, decomposition="npeff"))
    with pytest.raises(UserError, match="not empty"):
        SteerConfig(str(held_run.path), "", 1)
