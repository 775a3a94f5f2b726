"""Repair: the regression against plain optimisation, what is chosen and measured, what a user can get wrong."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from npeff.act import repair as module
from npeff.act.config import RepairConfig
from npeff.act.repair import Repair, compare_ways, regress, repair, take_in_turn
from npeff.cli import main
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.run import open_decomposition
from npeff.perturb.protocol import make_plan
from npeff.store.run import Run
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object


def problem(n=60, J=5, r=3):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    log_p, D = draw(n, r).log_softmax(1), draw(n, J, r)
    Q = torch.nn.functional.one_hot((log_p + 0.8 * D[:, 2] - 0.5 * D[:, 4] + 0.3 * draw(n, r)).argmax(1), r).double()
    return log_p, D, Q


def objective(log_p, D, Q, penalty, s):
    z = log_p + torch.einsum("njr,j->nr", D, s)
    return -(Q * z.log_softmax(1)).sum(1).mean() + s @ penalty @ s / 2


def test_sizes_are_those_of_plain_optimisation():
    log_p, D, Q = problem()
    penalty = torch.diag(torch.tensor([0.1, 0.2, 0.05, 0.4, 0.1], dtype=torch.float64))
    s = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([s], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15)

    def closure():
        optimiser.zero_grad()
        loss = objective(log_p, D, Q, penalty, s)
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(regress(log_p, D, Q, penalty), s.detach(), rtol=1e-5, atol=1e-6)


def test_directions_that_matter_are_taken_first():
    log_p, D, Q = problem()
    penalty = 1e-3 * torch.eye(5, dtype=torch.float64)
    steps = list(take_in_turn(3, log_p, D, Q, penalty))
    assert [len(chosen) for chosen, _ in steps] == [1, 2, 3]
    assert set(steps[1][0]) == {2, 4}
    alone = []
    for j in range(5):  # the first is the best one alone, by a search over its size
        own = torch.linspace(-3, 3, 601, dtype=torch.float64)
        unit = torch.eye(5, dtype=torch.float64)[j]
        alone.append(min(float(objective(log_p, D, Q, penalty, size * unit)) for size in own))
    assert steps[0][0] == [int(np.argmin(alone))]


def test_ways_are_compared_on_the_same_labelled_examples():
    answers = {"model": [0, 0, 1, 1, 0], "bias": [0, 1, 1, 1, 0], "repair": [0, 1, 1, 0, 1]}
    sure = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double().log()
    ways = {way: (sure[given], 0.0, []) for way, given in answers.items()}
    model, bias, mended = compare_ways(ways, np.array([0, 1, 1, 1, -1]))
    assert [each.predictions for each in (model, bias, mended)] == list(answers.values())
    assert [each.accuracy for each in (model, bias, mended)] == [0.75, 1.0, 0.75]
    assert (model.better, model.worse, model.ahead) == (1, 1, 0.0)
    assert (bias.better, bias.worse, bias.ahead) == (0, 1, -25.0)
    assert model.ahead_low < 0 < model.ahead_high
    assert model.low < 0.75 < model.high
    assert model.loss == pytest.approx(-(3 * np.log(0.9) + np.log(0.1)) / 4)
    assert "no more than offsets" in module._verdict([model, bias, mended])


@pytest.fixture
def config(held_run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COUNTS", (1, 3))
    shutil.copytree(held_run.path, tmp_path / "run")
    return RepairConfig(str(tmp_path / "run"), decomposition="npeff", device="cpu", limit=0.02)


def change(config, **changes):
    return from_dict(RepairConfig, to_dict(config) | changes)


def test_a_repair_is_measured_on_the_test_part_beside_other_ways(config, capsys):
    found = repair(change(config, save="delta"))
    folder = Run.open(config.run).path / "repairs" / "npeff"
    assert from_dict(Repair, read_object(folder / "repair.json")) == found
    assert found.mended == 80
    ways = {each.way: each for each in found.outcomes}
    assert list(ways) == ["model", "bias", "repair"]
    mended = ways["repair"]
    assert sorted(len(trial.made_of.split(",")) for trial in mended.tried) == [1, 3]
    assert mended.tried[0].loss == min(trial.loss for trial in mended.tried)
    assert all(0 < trial.damage <= config.limit for trial in mended.tried)
    assert mended.damage > 0
    assert ways["bias"].damage == ways["model"].damage == 0
    assert found.verdict in capsys.readouterr().out
    assert {"repair.md", "repair.csv", "repair.tex"} <= {path.name for path in folder.iterdir()}
    check_the_saved_change(config, folder, found.saved, mended, ways["model"])


def check_the_saved_change(config, folder, saved, mended, model):
    """The delta, added to the weights, gives the predictions that were reported; plain forward passes, one by one."""
    from safetensors.torch import load_file

    run = Run.open(config.run)
    prepared = prepare_run(run, "cpu")
    prompts, network = read_prompts(run, prepared), prepared.model.network
    held_out = open_decomposition(run, "npeff").notes.held_out
    assert len(mended.predictions) == 40
    delta = load_file(folder / saved.path)

    def predictions():
        with torch.inference_mode():
            z = torch.cat([prepared.collector.answer_model.logits([prompts[i]])[0] for i in sorted(held_out)])
        return dict(zip(sorted(held_out), z.argmax(1).tolist(), strict=True))

    before = predictions()
    with torch.no_grad():
        for name, part in delta.items():
            network.get_parameter(name).add_(part)
    assert sum(float(part.square().sum()) for part in delta.values()) ** 0.5 == pytest.approx(
        mended.tried[0].length, rel=1e-4
    )
    after = predictions()
    tests = make_plan(run, open_decomposition(run, "npeff"), [], 1, 16, 128, 0).test.examples
    assert [before[i] for i in tests] == model.predictions
    assert [after[i] for i in tests] == mended.predictions


def test_only_what_is_asked_for_is_mended(config):
    run = Run.open(config.run)
    labels, mend, Q = module.read_targets(run, ["label=Negative", "prediction=Positive"])
    table = run.table.to_pylist()
    assert labels.tolist() == [row["label"] for row in table]
    assert mend.tolist() == [row["label"] == 0 and row["prediction_text"] == "Positive" for row in table]
    p = run.tensor("probabilities").double()
    torch.testing.assert_close(Q[~mend], p[~mend])
    assert bool((Q[mend] == torch.tensor([1.0, 0.0])).all())


def test_mistakes_are_told(config, run):
    with pytest.raises(UserError, match="--holdout"):
        repair(RepairConfig(str(run.path), decomposition="npeff"))
    with pytest.raises(UserError, match="No labelled example"):
        repair(change(config, fix=["label=Nonsense"]))
    with pytest.raises(UserError, match="--fix takes conditions"):
        repair(change(config, fix=["./nothing.jsonl"]))
    with pytest.raises(UserError, match="--limit"):
        change(config, limit=0.0)
    assert main(["repair", config.run, "--repair", "../x"]) == 2


@pytest.fixture
def adapter(model_directory, tmp_path):
    """A LoRA adapter with random matrices, and its product for each layer."""
    import peft
    import transformers as hf

    network = hf.AutoModelForCausalLM.from_pretrained(model_directory)
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(network, settings)
    torch.manual_seed(0)
    products = {}
    with torch.no_grad():
        for name, layer in model.named_modules():
            if hasattr(layer, "lora_A"):
                A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                A.copy_(torch.randn(A.shape) * 0.1)
                B.copy_(torch.randn(B.shape) * 0.1)
                products[name.removeprefix("base_model.model.")] = 3 * B @ A
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", products


def test_an_adapter_is_measured_beside_it_under_the_same_limit(config, adapter):
    path, products = adapter
    found = repair(change(config, beside=[str(path)]))
    outcome = found.outcomes[3]
    assert outcome.way == "adapter"
    assert outcome.tried[0].made_of == str(path)
    assert 0 < outcome.tried[0].damage <= config.limit
    assert outcome.damage > 0

    run = Run.open(config.run)
    session = module._Session(run, open_decomposition(run, "npeff"), change(config, beside=[str(path)]))
    weights = {name: value.clone() for name, value in session.prepared.model.network.state_dict().items()}
    ((_, vector),) = session.adapters()
    for name, matrix in vector.items():
        expected = torch.zeros_like(matrix)
        if name in products:
            expected[:, : products[name].shape[1]] = products[name]
        torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-6)
    after = session.prepared.model.network.state_dict()
    assert list(after) == list(weights)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
