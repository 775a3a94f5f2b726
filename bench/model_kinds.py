"""Kinds of models: rows against plain autograd, and what a mixture of experts costs. Tiny random models, CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from bench import entry
from bench.collect import seconds
from npeff.collect.batch import Collector
from npeff.collect.check import compare_with_autograd
from npeff.collect.config import CollectConfig, DirectionsConfig
from npeff.collect.session import Prepared
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import AnswerSet
from npeff.models.config import ModelConfig
from npeff.models.load import LoadedModel, load_network
from npeff.models.select import select_parameters
from npeff.tasks.task import load_task

VOCABULARY = 256
REPEATS = 5

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "intermediate_size": 64}
MIXTURES = {
    "Mixtral": hf.MixtralConfig(**_SMALL, num_local_experts=6, intermediate_size=64),
    "Qwen2-MoE": hf.Qwen2MoeConfig(**_SMALL, **_EXPERTS, num_experts=8, shared_expert_intermediate_size=48),
    "Qwen3-MoE": hf.Qwen3MoeConfig(**_SMALL, **_EXPERTS, num_experts=8),
    "OLMoE": hf.OlmoeConfig(**_SMALL, num_experts=8, num_experts_per_tok=3, intermediate_size=48),
    "gpt-oss": hf.GptOssConfig(**_SMALL, head_dim=16, num_local_experts=6, intermediate_size=48),
    "DeepSeek-V3": hf.DeepseekV3Config(
        **{**_SMALL, "num_key_value_heads": 4},
        **_EXPERTS,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}

_ENCODER = {**_SMALL, "intermediate_size": 96, "num_labels": 3, "pad_token_id": 0}
_ENCODER.pop("num_key_value_heads")
CLASSIFIERS = (
    hf.BertConfig(**_ENCODER),
    hf.RobertaConfig(**_ENCODER),
    hf.DebertaV2Config(
        **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True, pooler_hidden_size=64
    ),
    hf.ModernBertConfig(**_ENCODER, local_attention=8),
    hf.LlamaConfig(**_SMALL, intermediate_size=96, num_labels=3, pad_token_id=0),
)


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    yield entry("models.moe_error", max(error_of(random_model(config)) for config in MIXTURES.values()), "<= 1e-4")
    yield entry("models.moe_cost", moe_cost(mixture(512)), "<= 1.5")
    # blocks of the sketch are 63 and 65 columns wide, which grouped matrix products do not take
    yield entry("models.moe_cost_unaligned", moe_cost(mixture(500)), "<= 1.5")
    yield entry("models.moe_cost_biases", moe_cost(mixture_with_biases(512)), "<= 1.5")
    yield entry("models.quantised_error", quantised_error(), "<= 1e-3")
    yield entry("models.offload_error", offload_error(), "<= 1e-5")
    yield entry("models.classifier_error", max(classifier_error(config) for config in CLASSIFIERS), "<= 1e-4")


def random_model(config: Any) -> LoadedModel:
    """A causal model of random weights, large enough that routing and everything else matters."""
    return loaded(hf.AutoModelForCausalLM, config)


def loaded(kind: Any, config: Any) -> LoadedModel:
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 128
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    network = kind.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    network.eval().requires_grad_(False)
    return LoadedModel(ModelConfig(model=config.model_type), network, None, torch.device("cpu"))


def prepared(model: LoadedModel, answers: AnswerSet) -> Prepared:
    config = CollectConfig("", model=model.config, directions=DirectionsConfig("exact"))
    selection = select_parameters(model.network)
    sketch = make_sketch(config.sketch, selection.modules)
    collector = Collector(config, model, answers, selection, sketch)
    return Prepared(config, load_task("sst2"), answers, model, selection, collector)


def two_tokens(model: LoadedModel) -> Prepared:
    return prepared(model, AnswerSet("tokens", ("a", "b"), ((3,), (7,))))


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def error_of(model: LoadedModel) -> float:
    """Largest relative error of the rows of four prompts, in one padded batch, against autograd one at a time."""
    return compare_with_autograd(two_tokens(model), prompts(4, 5, 20)).autograd_error


def quantised_error() -> float:
    """The same of a model with 8-bit weights (torchao), against autograd in a copy with plain weights."""
    with saved(random_model(hf.LlamaConfig(**{**_SMALL, "hidden_size": 128}, intermediate_size=192))) as folder:
        network, _, _ = load_network(ModelConfig(folder, quantise="torchao-int8"), folder, {}, torch.device("cpu"))
    network.eval().requires_grad_(False)
    return error_of(LoadedModel(ModelConfig(folder), network, None, torch.device("cpu")))


def offload_error() -> float:
    """Largest relative difference of rows of a model whose weights lie on disk from rows of the same in memory."""
    model = random_model(hf.LlamaConfig(**_SMALL, intermediate_size=96))
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    parts |= {"model.layers.1": "disk", "model.norm": "disk", "lm_head": "disk"}
    with saved(model) as folder:
        config = ModelConfig(folder, device_map=json.dumps(parts))
        network, _, _ = load_network(config, folder, {}, torch.device("cpu"))
        network.eval().requires_grad_(False)
        batch, rows = prompts(4, 5, 20), []
        for each in (model.network, network):
            ready = two_tokens(LoadedModel(config, each, None, torch.device("cpu")))
            rows.append(ready.collector.collect(batch, list(range(len(batch))))["rows"])
    return float(((rows[1] - rows[0]).norm(dim=(1, 2)) / rows[0].norm(dim=(1, 2))).max())


@contextlib.contextmanager
def saved(model: LoadedModel) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        network: Any = model.network
        network.save_pretrained(folder)
        yield folder


def classifier_error(config: Any) -> float:
    """`error_of` a classifier of three classes."""
    model = dataclasses.replace(loaded(hf.AutoModelForSequenceClassification, config), tokenizer=_NoTypes())
    classes = AnswerSet("classes", ("a", "b", "c"), ((0,), (1,), (2,)))
    texts = [[token % (VOCABULARY - 1) + 1 for token in ids] for ids in prompts(4, 5, 20)]
    return compare_with_autograd(prepared(model, classes), texts).autograd_error


class _NoTypes:
    model_input_names = ("input_ids", "attention_mask")


def mixture(width: int) -> Any:
    """32 experts, 4 of them for each token; hidden states, and those of experts, of this width."""
    sizes = {**_SMALL, "hidden_size": width, "num_attention_heads": 8, "head_dim": 64}
    return hf.Qwen3MoeConfig(
        **sizes, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=width, intermediate_size=width
    )


def mixture_with_biases(width: int) -> Any:
    """The same with a bias for every expert."""
    sizes = {**_SMALL, "hidden_size": width, "num_attention_heads": 8, "head_dim": 64}
    return hf.GptOssConfig(**sizes, num_local_experts=32, num_experts_per_tok=4, intermediate_size=width)


def moe_cost(config: Any) -> float:
    """All that a collection does ÷ forward and backward with weight gradients, of a mixture of experts."""
    model = random_model(config)
    ready, batch = two_tokens(model), prompts(32, 20, 20)
    left_out = set(ready.selection.left_out)
    weights = [weight for name, weight in model.network.named_parameters() if name not in left_out]
    answer_model = ready.collector.answer_model

    def training_step() -> None:
        for weight in weights:
            weight.requires_grad_(True)
        z, _ = answer_model.logits(batch)
        torch.autograd.grad(z, weights, torch.tensor([[0.5, -0.5]]).expand(len(batch), 2))
        for weight in weights:
            weight.requires_grad_(False)

    def collection() -> None:
        ready.collector.collect(batch, list(range(len(batch))))

    training_step()
    collection()
    return statistics.median(seconds(collection) / seconds(training_step) for _ in range(REPEATS))
