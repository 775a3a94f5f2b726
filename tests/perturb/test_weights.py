"""Weights put back bit for bit, derivatives along a change of them, and what `--save` writes."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.models.select import select_parameters
from npeff.perturb.run import perturb
from npeff.perturb.weights import EditedWeights, moving
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests import tiny
from tests.perturb.conftest import change, results
from tests.perturb.test_evaluate import random_vector


def test_parameters_are_themselves_again_after_derivatives(prepared):
    modules = prepared.selection.modules
    before = [dict(module.module.named_parameters()) for module in modules]
    with contextlib.suppress(KeyboardInterrupt), moving(modules, random_vector(prepared)):
        assert modules[0].module.weight is not before[0]["weight"]
        raise KeyboardInterrupt
    for module, parameters in zip(modules, before, strict=True):
        now = dict(module.module.named_parameters())
        assert now.keys() == parameters.keys()
        assert all(now[name] is parameter for name, parameter in parameters.items())


def test_weights_come_back_bit_for_bit(prepared):
    before = prepared.model.fingerprint()
    vector = random_vector(prepared)
    with EditedWeights(prepared.selection.modules) as weights:
        weights.add(vector, 3.0)
        assert prepared.model.fingerprint() != before
        weights.add(vector, -1e-3)
    assert prepared.model.fingerprint() == before

    def interrupted():
        with EditedWeights(prepared.selection.modules) as weights:
            weights.add(vector, 3.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert prepared.model.fingerprint() == before
    # a failure in the middle of a change: the second module's part has a wrong shape
    names = list(vector)
    broken = vector | {names[1]: torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="shape"), EditedWeights(prepared.selection.modules) as weights:
        weights.add(broken, 1.0)
    assert prepared.model.fingerprint() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_does_what_it_says(dtype):
    network = tiny.network("gpt2").to(dtype)
    selection = select_parameters(network)
    vector = {m.name: torch.randn(m.shape, generator=torch.Generator().manual_seed(1)) for m in selection.modules}
    del vector[selection.modules[0].name]
    originals = {name: tensor.clone() for name, tensor in network.named_parameters()}
    with EditedWeights(selection.modules) as weights:
        weights.add({selection.modules[0].name: torch.ones(selection.modules[0].shape)}, 1.0)
        weights.add(vector, 0.5)
        changed = {name: part for m in selection.modules[1:] for name, part in m.unpack(vector[m.name]).items()}
        for name, parameter in network.named_parameters():
            expected = (originals[name].float() + 0.5 * changed[name]).to(dtype) if name in changed else originals[name]
            assert torch.equal(parameter, expected), name
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, originals[name])


def test_what_is_saved_is_what_was_measured(config, model_directory, monkeypatch):
    """Delta, model and adapter all lead to the perturbed weights."""
    original = dict(load_model(ModelConfig(model=str(model_directory), device="cpu")).network.named_parameters())
    for kind in ("delta", "model", "adapter"):
        perturb(change(config, component=[1], save=kind, perturbation=kind, adapter_share=0.999))
    folder, saved = results(config, "delta")
    delta = load_file(folder / "delta" / "00001.safetensors")
    best = saved["components"][0]["best"]
    length = sum(float(part.double().square().sum()) for part in delta.values()) ** 0.5
    assert length == pytest.approx(best["magnitude"], rel=1e-4)
    model = load_model(ModelConfig(model=str(results(config, "model")[0] / "model" / "00001"), device="cpu"))
    for name, parameter in model.network.named_parameters():
        torch.testing.assert_close(parameter, original[name] + delta.get(name, 0), rtol=0, atol=1e-6)
    folder, saved = results(config, "adapter")
    adapter = load_file(folder / "adapter" / "00001" / "adapter_model.safetensors")
    assert saved["components"][0]["saved"]["kept"] > 0.9
    name = "model.layers.1.mlp.down_proj"
    A, B = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    error = (B @ A - delta[f"{name}.weight"]).norm() / delta[f"{name}.weight"].norm()
    assert error < 0.04
    monkeypatch.setattr("npeff.perturb.weights.LARGEST_RANK", 1)
    with pytest.raises(UserError, match="No small adapter"):
        perturb(change(config, component=[1], save="adapter", perturbation="small", adapter_share=0.999))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_the_adapter(config, many_answers, tmp_path, family):
    """PEFT's own loader gives the weights of the delta: of Linear modules, and of GPT-2's transposed Conv1D."""
    if family == "gpt2":
        shutil.copytree(many_answers.path, tmp_path / "ten")
        config = change(config, run=str(tmp_path / "ten"), protocol="paper")
    config = change(config, component=[1], adapter_share=0.9999)
    for kind in ("delta", "adapter"):
        perturb(change(config, save=kind, perturbation=kind))
    delta = load_file(results(config, "delta")[0] / "delta" / "00001.safetensors")
    where = Run.open(config.run).manifest.model
    network = load_model(ModelConfig(model=where, device="cpu")).network
    original = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    adapted = PeftModel.from_pretrained(network, str(results(config, "adapter")[0] / "adapter" / "00001"))
    changed = dict(adapted.merge_and_unload().named_parameters())
    matrices = [name for name, part in delta.items() if part.ndim == 2]
    assert len(matrices) > 4
    for name in matrices:
        change_made = changed[name].detach() - original[name]
        assert (change_made - delta[name]).norm() < 0.02 * delta[name].norm() + 1e-6
