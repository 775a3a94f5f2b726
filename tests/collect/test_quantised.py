"""Rows of quantised models against those of copies with plain weights; sizes; perturbation; what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from npeff.collect.check import compare_with_autograd
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, prepare_to_edit, prepare_with_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig, ModelOptions, ParamsConfig
from npeff.models.load import load_model
from npeff.models.params import params
from npeff.models.select import parameter_sizes
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from tests import tiny

ERRORS = {"torchao-int8": 1e-3, "torchao-int4": 1e-3, "bnb-8bit": 0.1, "bnb-4bit": 1e-3}
"""bitsandbytes rounds the inputs of 8-bit layers too."""


def need(way):
    pytest.importorskip("torchao" if way.startswith("torchao") else "bitsandbytes")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of sizes that all ways to quantise can take."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=len(tiny.tokenizer()), max_position_embeddings=128, attention_bias=True, **sizes)
    model = hf.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def config_of(base, way, reviews, run=""):
    return CollectConfig(
        str(run),
        data=DataConfig("sst2", data=str(reviews), limit=24),
        model=ModelConfig(str(base), device="cpu", quantise=way),
        sketch=SketchConfig(dim=256),
        batch_tokens=200,
    )


@pytest.mark.parametrize("way", ERRORS)
def test_rows_are_those_of_the_plain_numbers(way, base, review_file):
    need(way)
    prepared, _, prompts = prepare_with_prompts(config_of(base, way, review_file))
    assert prepared.model.quantised
    report = compare_with_autograd(prepared, prompts[:3])
    assert 0 < report.autograd_error < ERRORS[way]
    assert prepared.model.quantised
    plain = load_model(ModelConfig(str(base), device="cpu"))
    assert parameter_sizes(prepared.model.network) == parameter_sizes(plain.network)
    assert prepared.selection.size == prepared.selection.whole - sum(
        size
        for name, size in parameter_sizes(plain.network).items()
        if "norm" in name or "embed" in name or "lm_head" in name
    )


@pytest.mark.parametrize("way", ["torchao-int8", "bnb-4bit"])
def test_from_collection_to_perturbation(way, base, review_file, tmp_path):
    need(way)
    run = collect(config_of(base, way, review_file, tmp_path / "run"))
    assert prepare_run(run, "cpu").model.quantised
    edited = prepare_to_edit(run, "cpu")
    assert not edited.model.quantised
    assert edited.model.fingerprint() == run.manifest.identity["model_sha256"]
    decompose(DecomposeConfig(run=str(run.path), components=3, holdout=0.0, device="cpu", max_passes=50))
    options = {"component": (0,), "protocol": "paper", "top": 3, "random": 6, "nulls": 0, "device": "cpu"}
    (results,) = perturb(PerturbConfig(run=str(run.path), save="model", **options)).values()
    assert results.components[0].best.ratio > 0
    saved = next((run.path / "perturbations").glob("*/model/00000"))
    assert not load_model(ModelConfig(str(saved), device="cpu")).quantised


@pytest.mark.parametrize("way", ["torchao-int8", "bnb-8bit", "bnb-4bit"])
def test_quantised_checkpoints_need_no_option(way, base, tmp_path, capsys):
    need(way)
    made = load_model(ModelConfig(str(base), device="cpu", quantise=way))
    made.network.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    read = load_model(ModelConfig(str(tmp_path), device="cpu"))
    assert read.quantised
    assert read.fingerprint() == made.fingerprint()
    assert read.fingerprint() != load_model(ModelConfig(str(base), device="cpu")).fingerprint()
    params(ParamsConfig(str(tmp_path), ModelOptions(device="cpu")))
    plain = sum(parameter_sizes(load_model(ModelConfig(str(base), device="cpu")).network).values())
    shown = re.findall(r"([\d,]+) parameters, .* of the model", capsys.readouterr().out)
    assert sum(int(number.replace(",", "")) for number in shown) == plain
    with pytest.raises(UserError, match="quantised already"):
        load_model(ModelConfig(str(tmp_path), device="cpu", quantise="bnb-8bit"))


def test_layers_that_round_their_inputs_are_refused(base, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    way = hf.TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig())
    network = hf.AutoModelForCausalLM.from_pretrained(base, quantization_config=way)
    network.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="No gradient goes through the quantised layers"):
        load_model(ModelConfig(str(tmp_path), device="cpu"))


def test_other_ways_are_refused_by_name(base, tmp_path, monkeypatch):
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    for method in ("gptq", "awq", "something-new"):
        settings["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
        (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(UserError, match=f"^Model .* is quantised by {method}, which is not read"):
            load_model(ModelConfig(str(tmp_path), device="cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torchao"):
        load_model(ModelConfig(str(base), device="cpu", quantise="torchao-int8"))


def test_weights_of_gpt_oss_are_unpacked(tmp_path, review_file):
    """Four bits a number and a common exponent for 32 of them, as gpt-oss is published; random ones are as good."""
    config = tiny.network("gpt_oss").config
    config.intermediate_size = 64
    network = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in network.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.contiguous()
            continue
        experts, d_in, d_out = tensor.shape
        blocks = (experts, d_out, -(-d_in // 32))
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    network.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    network.config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    prepared, _, prompts = prepare_with_prompts(config_of(tmp_path, None, review_file))
    assert not prepared.model.quantised
    experts = prepared.model.network.model.layers[0].mlp.experts.gate_up_proj
    assert len(experts.unique()) < 100  # 16 values, and a few exponents
    assert compare_with_autograd(prepared, prompts[:3]).fits
