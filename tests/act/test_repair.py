"""Repair: the regression against plain optimisation, what is chosen and measured, what a user can get wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from npeff.act import repair as module
from npeff.act.config import RepairConfig
from npeff.act.lora import fine_tune
from npeff.act.regression import objective as value
from npeff.act.regression import regress, take_in_turn
from npeff.act.repair import REPAIR, Repair, calibration_error, compare_ways, read_wanted, repair
from npeff.cli import main
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.run import open_decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.protocol import make_plan
from npeff.perturb.weights import EditedWeights
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


def test_the_objective_is_cross_entropy_and_penalty():
    log_p, D, Q = problem()
    penalty, s = torch.eye(5, dtype=torch.float64) / 3, torch.linspace(-1, 1, 5, dtype=torch.float64)
    assert float(value(s, log_p, D, Q, penalty)) == pytest.approx(float(objective(log_p, D, Q, penalty, s)))


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
    answers = {"model": [0, 0, 1, 1, 0], "bias": [0, 1, 1, 1, 0], REPAIR: [0, 1, 1, 0, 1]}
    sure = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double().log()
    ways = {way: (sure[given], [], []) for way, given in answers.items()}
    model, bias, mended = compare_ways(ways, np.array([0, 1, 1, 1, -1]))
    assert [each.predictions for each in (model, bias, mended)] == list(answers.values())
    assert [each.accuracy for each in (model, bias, mended)] == [0.75, 1.0, 0.75]
    assert (model.better, model.worse, model.ahead) == (1, 1, 0.0)
    assert (bias.better, bias.worse, bias.ahead) == (0, 1, -25.0)
    assert model.ahead_low < 0 < model.ahead_high
    assert model.loss == pytest.approx(-(3 * np.log(0.9) + np.log(0.1)) / 4)
    assert [each.calibration for each in (model, bias)] == pytest.approx([0.15, 0.1])
    assert "no more than bias" in module.verdict([model, bias, mended])


def test_calibration_is_told_bin_by_bin():
    random = np.random.default_rng(0)
    log_p = torch.from_numpy(random.normal(size=(200, 3)) * 2).log_softmax(1)
    labels = random.integers(0, 3, 200)
    probability, answer = log_p.exp().max(1)
    expected = 0.0
    for low in np.arange(0, 1, 0.1):
        inside = (probability.numpy() >= low) & (probability.numpy() < low + 0.1)
        if inside.any():
            gap = (answer.numpy() == labels)[inside].mean() - probability.numpy()[inside].mean()
            expected += abs(gap) * inside.mean()
    assert calibration_error(log_p, labels) == pytest.approx(expected)


@pytest.fixture
def config(held_run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COUNTS", (1, 3))
    monkeypatch.setattr(module, "PENALTIES", (0.02, 0.2))
    shutil.copytree(held_run.path, tmp_path / "run")
    return RepairConfig(str(tmp_path / "run"), decomposition="npeff", device="cpu", limit=0.02, nulls=0)


def change(config, **changes):
    return from_dict(RepairConfig, to_dict(config) | changes)


def test_a_repair_is_measured_on_the_test_part_beside_other_ways(config, capsys):
    found = repair(change(config, save="delta", nulls=1, lora=2))
    folder = Run.open(config.run).path / "repairs" / "npeff"
    assert from_dict(Repair, read_object(folder / "repair.json")) == found
    assert found.mended == 80
    ways = {each.way: each for each in found.outcomes}
    assert list(ways) == ["model", "bias", "repair", "random groups 0", "LoRA"]
    mended = ways["repair"]
    assert sorted(len(trial.made_of.split(",")) for trial in mended.tried) == [1, 3]
    assert sorted(trial.made_of for trial in ways["LoRA"].tried) == ["epoch 1", "epoch 2"]
    for way in ("repair", "random groups 0", "LoRA"):
        tried = ways[way].tried
        assert tried[0].loss == min(trial.loss for trial in tried)
        assert all(0 < trial.damage <= config.limit for trial in tried)
        assert ways[way].damage == ways[way].elsewhere[0].kl > 0
    assert {each.text for each in mended.elsewhere} == {"running text", "clinc150", "triviaqa"}
    assert ways["bias"].damage == ways["model"].damage == 0
    assert mended.predictions != ways["random groups 0"].predictions or mended.loss != ways["random groups 0"].loss
    assert found.verdict in capsys.readouterr().out
    assert {"repair.md", "repair.csv", "repair.tex"} <= {path.name for path in folder.iterdir()}
    check_the_saved_change(config, folder, found, mended, ways["model"])


def check_the_saved_change(config, folder, found, mended, model):
    """The delta, added to the weights, gives the predictions that were reported; plain forward passes, one by one."""
    from safetensors.torch import load_file

    run = Run.open(config.run)
    prepared = prepare_run(run, "cpu")
    prompts, network = read_prompts(run, prepared), prepared.model.network
    held_out = open_decomposition(run, "npeff").notes.held_out
    assert len(mended.predictions) == 40
    delta = load_file(folder / found.saved.path)

    def predictions():
        with torch.inference_mode():
            z = torch.cat([prepared.collector.answer_model.logits([prompts[i]])[0] for i in sorted(held_out)])
        return dict(zip(sorted(held_out), z.argmax(1).tolist(), strict=True))

    before = predictions()
    with torch.no_grad():
        for name, part in delta.items():
            network.get_parameter(name).add_(part)
    length = torch.cat([part.flatten() for part in delta.values()]).norm()
    assert float(length) == pytest.approx(mended.tried[0].length, rel=1e-4)
    after = predictions()
    tests = make_plan(run, open_decomposition(run, "npeff"), PerturbConfig("", count=1)).test.examples
    assert [before[i] for i in tests] == model.predictions
    assert [after[i] for i in tests] == mended.predictions


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_saved_repair_has_its_report_as_card(config, kind):
    found = repair(change(config, save=kind))
    folder = Run.open(config.run).path / "repairs" / "npeff"
    card = (folder / found.saved.path / "README.md").read_text(encoding="utf-8")
    assert found.verdict.split(".")[0] in card.replace("\\", "")
    assert found.ranks["1"] <= found.ranks["4"] <= found.ranks["16"] <= 1


def wanted(run, *fix):
    decomposition = open_decomposition(run, "npeff")
    fit = np.setdiff1d(np.arange(120), decomposition.notes.held_out)
    return read_wanted(run, decomposition, fit, fix)


def test_only_what_is_asked_for_is_mended(config, tmp_path):
    run = Run.open(config.run)
    labels, mend, Q = wanted(run, "label=Negative", "prediction=Positive")
    table = run.table.to_pylist()
    assert labels.tolist() == [row["label"] for row in table]
    assert mend.tolist() == [row["label"] == 0 and row["prediction_text"] == "Positive" for row in table]
    p = run.tensor("probabilities").double()
    torch.testing.assert_close(Q[~mend], p[~mend])
    assert bool((Q[mend] == torch.tensor([1.0, 0.0])).all())

    other = [1 - row["label"] for row in table[:7]]  # a file says otherwise than the run
    lines = [
        {"text": row["text"], "label": ["Negative", "Positive"][new]} for row, new in zip(table, other, strict=False)
    ]
    (tmp_path / "fix.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    labels, mend, Q = wanted(run, str(tmp_path / "fix.jsonl"))
    assert mend.nonzero()[0].tolist() == list(range(7))
    assert labels.tolist() == other + [row["label"] for row in table[7:]]
    assert Q[:7].argmax(1).tolist() == other


def test_examples_of_components_that_are_tuned_to_a_label_alone(config):
    run = Run.open(config.run)
    decomposition = open_decomposition(run, "npeff")
    W, fit = decomposition.coefficients.numpy(), np.setdiff1d(np.arange(120), decomposition.notes.held_out)
    best = [fit[np.argsort(-W[fit, j], kind="stable")[:16]] for j in range(6)]
    labels = np.zeros(120, int)
    labels[best[2]], predictions = 1, np.arange(120) % 2
    for j in set(range(6)) - {2}:  # others have both labels, or one prediction
        labels[best[j][0]] = 1 - labels[best[j][1]]
    labels[best[2]] = 1
    tuned = [j for j in range(6) if len(set(labels[best[j]])) == 1 and len(set(predictions[best[j]])) > 1]
    assert 2 in tuned
    uses = module._uses_tuned(decomposition, fit, labels, predictions)
    assert uses.tolist() == [int(row.argmax()) in tuned for row in W]


def test_mistakes_are_told(config, run):
    with pytest.raises(UserError, match="--holdout"):
        repair(RepairConfig(str(run.path), decomposition="npeff"))
    with pytest.raises(UserError, match="No labelled example"):
        repair(change(config, fix=["label=Nonsense"]))
    with pytest.raises(UserError, match="--fix takes a file"):
        repair(change(config, fix=["./nothing.jsonl"]))
    with pytest.raises(UserError, match="--limit"):
        change(config, limit=0.0)
    assert main(["repair", config.run, "--repair", "../x"]) == 2


def test_lora_lowers_the_loss_and_leaves_the_model_as_it_was(config):
    run = Run.open(config.run)
    prepared = prepare_run(run, "cpu")
    prompts, before = read_prompts(run, prepared), prepared.model.network.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    examples, Q = np.arange(32), torch.eye(2, dtype=torch.float64)[run.table["label"].to_numpy()]

    def loss(change):
        with EditedWeights(prepared.selection.modules) as weights, torch.inference_mode():
            weights.add(change, 1.0)
            z = torch.cat([prepared.collector.answer_model.logits([prompts[i]])[0] for i in examples])
        return float(-(Q[examples] * z.double().log_softmax(1)).sum(1).mean())

    losses = [loss({}), *map(loss, fine_tune(prepared, prompts, examples, Q, 3))]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < losses[0] - 1e-4
    after = prepared.model.network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_lora_changes_are_those_that_peft_merges(config):
    run = Run.open(config.run)
    prepared = prepare_run(run, "cpu")
    prompts, Q = read_prompts(run, prepared), torch.eye(2, dtype=torch.float64)[run.table["label"].to_numpy()]
    seen = {}

    for change in fine_tune(prepared, prompts, np.arange(16), Q, 1):
        for name, layer in prepared.model.network.named_modules():
            if hasattr(layer, "lora_A"):
                A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                seen[name] = (2 * B @ A).detach()  # alpha ÷ rank = 2
        assert set(change) == set(seen)
        for name, product in seen.items():
            torch.testing.assert_close(change[name][:, : product.shape[1]], product)
            assert not change[name][:, product.shape[1] :].any()
