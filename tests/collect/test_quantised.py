"""Rows of quantised models against those of copies with plain weights; sizes; perturbation; what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from npeff.collect.check import compare_with_autograd
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, prepare_to_edit, prepare_with_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig, ModelOptions, ParamsConfig
from npeff.models.load import load_model
from npeff.models.params import params
from npeff.models.quantised import unpack
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
    form = {
        "gptq": (r" in a form \(marlin, 4 bits\)", {"checkpoint_format": "marlin"}),
        "awq": (r" in a form \(gemv, 4 bits\)", {"version": "GEMV"}),
        "something-new": (", which is", {}),
    }
    for method, (said, more) in form.items():
        settings["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, **more}
        (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(UserError, match=f"^Model .* is quantised by {method}{said} not read"):
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


def words_of(rows, bits, order):
    """Lists of small numbers as words of 32 bits, written out bit by bit; place k of a word holds number order[k]."""
    each = 32 // bits
    packed = []
    for row in rows:
        line = []
        for start in range(0, len(row), each):
            digits = [format(row[start + order[place]], f"0{bits}b") for place in reversed(range(each))]
            line.append(int("".join(digits), 2))
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def pack(weight, form, bits, group_size, shuffled):
    """A weight [d_out, d_in] rounded and packed, and the numbers that are left of it, one by one."""
    generator = np.random.default_rng(len(weight))
    d_out, d_in = weight.shape
    groups = (generator.permutation(d_in) if shuffled else np.arange(d_in)) // group_size
    integers, zeros = np.zeros((d_in, d_out), int), generator.integers(1, 2**bits, (groups.max() + 1, d_out))
    scales, plain = np.zeros(zeros.shape), np.zeros((d_out, d_in))
    for o in range(d_out):
        for group in range(len(zeros)):
            scales[group, o] = np.float16(np.abs(weight[o, groups == group]).max() / (2 ** (bits - 1)))
        for i in range(d_in):
            scale, zero = scales[groups[i], o], zeros[groups[i], o]
            integers[i, o] = np.clip(round(float(weight[o, i]) / scale) + zero, 0, 2**bits - 1)
            plain[o, i] = scale * (int(integers[i, o]) - int(zero))
    order = [0, 2, 4, 6, 1, 3, 5, 7] if form == "gemm" else range(32 // bits)
    kept = zeros - 1 if form == "gptq" else zeros
    packed = {"scales": torch.tensor(scales, dtype=torch.float16), "qzeros": words_of(kept.tolist(), bits, order)}
    rows = integers if form == "gemm" else integers.T
    words = words_of(rows.tolist(), bits, order)
    packed["qweight"] = (words if form == "gemm" else words.T).contiguous()
    if shuffled:
        packed["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return packed, torch.tensor(plain, dtype=torch.float32)


@pytest.mark.parametrize(
    ("form", "bits", "shuffled"),
    [("gptq", 4, True), ("gptq", 8, False), ("gptq_v2", 2, False), ("gptq_v2", 4, False), ("gemm", 4, False)],
)
def test_packed_integers_are_read_as_they_were_written(form, bits, shuffled):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(bits)).numpy()
    packed, plain = pack(weight, form, bits, 16, shuffled)
    torch.testing.assert_close(unpack({"g_idx": None, **packed}, bits, 16, form), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("method", "form"), [("gptq", "gptq"), ("awq", "gemm")])
def test_checkpoints_of_gptq_and_awq_are_unpacked(method, form, base, tmp_path, review_file):
    tensors, expected = {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed, expected[name] = pack(tensor.numpy(), form, 4, 64, shuffled=False)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tiny.tokenizer().save_pretrained(tmp_path)
    prepared, _, prompts = prepare_with_prompts(config_of(tmp_path, None, review_file))
    assert not prepared.model.quantised
    for name, plain in expected.items():
        torch.testing.assert_close(prepared.model.network.get_parameter(name).data, plain, rtol=1e-6, atol=0)
    assert compare_with_autograd(prepared, prompts[:3]).fits
    with pytest.raises(UserError, match="quantised already"):
        load_model(ModelConfig(str(tmp_path), device="cpu", quantise="torchao-int8"))
