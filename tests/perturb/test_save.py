"""What `--save` writes."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.perturb import save
from npeff.perturb.run import perturb
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.perturb.conftest import change, results


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
    monkeypatch.setattr(save, "LARGEST_RANK", 1)
    with pytest.raises(UserError, match="No small adapter"):
        perturb(change(config, component=[1], save="adapter", perturbation="small", adapter_share=0.999))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_the_adapter(config, many_answers, tmp_path, family):
    """PEFT's own loader gives the weights of the delta: of Linear modules, and of GPT-2's transposed Conv1D."""
    if family == "gpt2":
        shutil.copytree(many_answers.path, tmp_path / "ten")
        config = change(config, run=str(tmp_path / "ten"))
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
