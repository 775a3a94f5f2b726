"""Loading models, and naming what cannot be loaded."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from npeff.models.config import ModelConfig
from npeff.models.load import EMBEDDED_FILE, EMBEDDED_PACKAGE, load_model
from npeff.models.prompts import encode
from npeff.models.select import select_parameters
from npeff.utils.errors import UserError
from tests import tiny


def test_a_local_directory(model_directory):
    model = load_model(ModelConfig(model=str(model_directory)))
    assert not model.network.training
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert model.context == 128
    again = load_model(ModelConfig(model=str(model_directory)))
    assert model.fingerprint() == again.fingerprint()
    with torch.no_grad():
        next(again.network.parameters()).view(-1)[0] += 1
    assert model.fingerprint() != again.fingerprint()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_precision(model_directory, dtype):
    model = load_model(ModelConfig(model=str(model_directory), dtype=dtype))
    assert {parameter.dtype for parameter in model.network.parameters()} == {getattr(torch, dtype)}


@pytest.mark.smollm2
def test_the_embedded_model_equals_its_gguf_file():
    embedded = load_model(ModelConfig())
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    path = Path(package.submodule_search_locations[0]) / EMBEDDED_FILE
    direct = load_model(ModelConfig(model=str(path)))
    assert embedded.fingerprint() == direct.fingerprint()
    assert select_parameters(embedded.network).size == 106_168_320
    ids = torch.tensor([encode(embedded.tokenizer, "The capital of France is")])
    with torch.no_grad():
        best = embedded.network(ids).logits[0, -1].argmax()
    assert embedded.tokenizer.decode([int(best)]) == " Paris"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no model directory"),
        ("nowhere.gguf", "no GGUF file"),
        ("a/b/c", "no model directory"),
    ],
)
def test_models_that_are_not_there(model, words):
    with pytest.raises(UserError, match=words):
        load_model(ModelConfig(model=model))


def test_fingerprint_of_a_lone_number(model_directory):
    model = load_model(ModelConfig(str(model_directory)))
    before = model.fingerprint()
    model.network.scale = torch.nn.Parameter(torch.tensor(2.0))
    assert model.fingerprint() != before


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(ModelConfig(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Could not load model"):
        load_model(ModelConfig(model=str(tmp_path)))


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (hf.LlamaForTokenClassification, hf.LlamaConfig(**SMALL, pad_token_id=0)),  # its head would be random
        (hf.LlamaForTokenClassification, hf.LlamaConfig(**SMALL, pad_token_id=0, tie_word_embeddings=True)),
        (hf.BertForMaskedLM, hf.BertConfig(**SMALL)),  # nothing is missing, but it looks at the tokens that follow
        (hf.BartForConditionalGeneration, hf.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1)),
        (hf.T5ForConditionalGeneration, hf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        (hf.CLIPTextModel, hf.CLIPTextConfig(**SMALL)),
    ],
)
def test_another_kind_of_model_is_refused_by_name(tmp_path, capfd, kind, settings):
    settings.vocab_size = len(tiny.tokenizer())
    kind(settings).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    capfd.readouterr()
    with pytest.raises(UserError, match=f"is a {kind.__name__}, and no causal language model") as error:
        load_model(ModelConfig(str(tmp_path), device="cpu"))
    assert "\n" not in str(error.value)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_weights_that_are_not_used_are_named(model_directory, tmp_path, capsys):
    folder = shutil.copytree(model_directory, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"vision.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(ModelConfig(str(folder), device="cpu"))
    assert "1 weights of the checkpoint are none of this model, as vision.weight." in capsys.readouterr().out


def test_weights_that_are_missing_are_named(model_directory, tmp_path, capfd):
    """A checkpoint without a matrix of the network itself, in one line."""
    folder = shutil.copytree(model_directory, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"comes without model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelConfig(str(folder), device="cpu"))
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_whole_models_of_every_family_load(family, tmp_path):
    """No weight of them counts as missing, tied ones included."""
    load_model(ModelConfig(str(tiny.save(tmp_path / family, family)), device="cpu"))


def test_a_hub_that_cannot_be_reached(monkeypatch, recwarn, capfd):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"nobody/nothing.*the Hub cannot be reached.*smollm2-135m") as error:
        load_model(ModelConfig("nobody/nothing", device="cpu"))
    assert "\n" not in str(error.value)
    assert "Retry" not in "".join(capfd.readouterr())
