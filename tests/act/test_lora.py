"""Fine-tuning with LoRA: it lowers the loss, leaves the model as it is, and gives the changes that peft merges."""

from __future__ import annotations

import numpy as np
import torch

from npeff.act.lora import fine_tune
from npeff.collect.session import prepare_run, read_prompts
from npeff.perturb.weights import EditedWeights


def test_lora_lowers_the_loss_and_leaves_the_model_as_it_was(held_run):
    prepared = prepare_run(held_run, "cpu")
    prompts, before = read_prompts(held_run, prepared), prepared.model.network.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    examples, Q = np.arange(32), torch.eye(2, dtype=torch.float64)[held_run.table["label"].to_numpy()]

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


def test_lora_changes_are_those_that_peft_merges(held_run):
    prepared = prepare_run(held_run, "cpu")
    prompts, Q = read_prompts(held_run, prepared), torch.eye(2, dtype=torch.float64)[held_run.table["label"].to_numpy()]
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
