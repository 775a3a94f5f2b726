"""Models in several places: the same rows, the same hash, and no weight held that can be fetched again."""

from __future__ import annotations

import gc
import json

import accelerate
import pytest
import torch

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_to_edit, prepare_with_prompts
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.models.select import select_parameters
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from tests import tiny
from tests.collect.test_capture import SENTIMENT, captured_rows, prompts_of, random_directions

MAP = {
    **{"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"},
    **{"model.layers.1": "disk", "model.norm": "disk", "lm_head": "disk"},
}


def rows(model):
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    prompts = prompts_of(SENTIMENT, model.tokenizer)
    answer_model = AnswerModel(model, resolve_answers(SENTIMENT, model.tokenizer))
    return captured_rows(model, selection, sketch, answer_model, prompts, random_directions(len(prompts), 2))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_disk_gives_the_same_rows(family, tmp_path):
    tiny.save(tmp_path, family)
    plain = load_model(ModelConfig(str(tmp_path), device="cpu"))
    parts = MAP | ({"lm_head": "cpu"} if family == "gemma3" else {})  # tied to the embedding, so both are in one place
    placed = load_model(ModelConfig(str(tmp_path), device="cpu", device_map=json.dumps(parts)))
    assert any(parameter.is_meta for parameter in placed.network.parameters())
    assert placed.fingerprint() == plain.fingerprint()
    for expected, found in zip(rows(plain), rows(placed), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert any(parameter.is_meta for parameter in placed.network.parameters())


def test_memory_gives_the_same_rows():
    """Weights that lie in the memory of the CPU while a GPU computes; here the CPU does both."""
    plain, placed = tiny.loaded("llama"), tiny.loaded("llama")
    accelerate.cpu_offload(placed.network, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in placed.network.parameters())
    assert placed.fingerprint() == plain.fingerprint()
    for expected, found in zip(rows(plain), rows(placed), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_no_weight_is_held_until_the_backward_pass(tmp_path):
    tiny.save(tmp_path, "llama")
    everything_on_disk = json.dumps(dict.fromkeys(MAP, "disk") | {"model.rotary_emb": "cpu"})
    model = load_model(ModelConfig(str(tmp_path), device="cpu", device_map=everything_on_disk))
    shapes = {tuple(p.shape) for n, p in model.network.named_parameters() if "_proj.weight" in n}
    answer_model = AnswerModel(model, resolve_answers(SENTIMENT, model.tokenizer))
    first = model.network.model.layers[0].self_attn.q_proj
    first.register_forward_hook(lambda *call: call[-1].requires_grad_(True))

    def held():
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
        return sum(tuple(each.shape) in shapes for each in tensors)

    before = held()
    z, _ = answer_model.logits(prompts_of(SENTIMENT, model.tokenizer))
    assert z.requires_grad
    assert held() == before
    z.sum().backward()


def test_auto_and_runs_with_and_without(tmp_path, model_directory, review_file):
    """Where a model lies is not part of what a run is; weights on disk cannot be perturbed."""

    def config(run, **where):
        return CollectConfig(
            str(tmp_path / run),
            data=DataConfig("sst2", data=str(review_file), limit=12),
            model=ModelConfig(str(model_directory), device="cpu", **where),
            sketch=SketchConfig(dim=256),
        )

    first = collect(config("first"))
    second = collect(config("second", device_map=json.dumps(MAP)))
    assert second.manifest.identity == first.manifest.identity
    difference = first.source("fisher").read(0, 12) - second.source("fisher").read(0, 12)
    assert difference.norm() <= 1e-5 * first.source("fisher").read(0, 12).norm()
    assert collect(config("first", device_map="auto")).manifest.complete
    with pytest.raises(UserError, match=r"cannot be changed.*--device cpu"):
        prepare_to_edit(second)
    assert prepare_to_edit(second, "cpu").model.device.type == "cpu"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("everywhere", "neither auto nor JSON"),
        ("[1]", "should be auto, or name a device for every part"),
        ('{"": "cuda:7"}', "The device map does not fit"),
        (json.dumps(MAP | {"model.blocks.7": "cpu"}), "has no part 'model.blocks.7'"),
    ],
)
def test_maps_that_do_not_fit(given, said, model_directory):
    with pytest.raises(UserError, match=f"^(?!Could not).*{said}"):
        prepare_with_prompts(CollectConfig("", model=ModelConfig(str(model_directory), device_map=given)))


def test_tied_weights_in_two_places(tmp_path):
    tiny.save(tmp_path, "gemma3")
    with pytest.raises(UserError, match=r"does not fit.*lm_head.weight.*same place"):
        load_model(ModelConfig(str(tmp_path), device="cpu", device_map=json.dumps(MAP)))
