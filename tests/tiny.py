"""Tiny random models of every family, and a tokenizer for them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from npeff.models.config import ModelConfig
from npeff.models.load import LoadedModel

TEXTS = [
    "a film of great charm and wit",
    "dull , flat and far too long",
    "one of the best of the year",
    "it never finds a story worth telling , and the jokes are old",
    "good",
    "the cast is fine but the script is a mess of half ideas",
]
LABELS = ("Negative", "Positive")
INTENTS = ("pay bill", "pay bill now", "pay rent", "weather", "what song", "what", "order checks", "order")

FAMILIES = {
    "llama": hf.LlamaConfig(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "qwen2": hf.Qwen2Config(num_key_value_heads=2),
    "qwen3": hf.Qwen3Config(num_key_value_heads=2, head_dim=8),
    "gemma2": hf.Gemma2Config(num_key_value_heads=2, head_dim=8),
    "gemma3": hf.Gemma3TextConfig(num_key_value_heads=2, head_dim=8),
    "gpt2": hf.GPT2Config(n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": hf.GPTNeoXConfig(),
    "opt": hf.OPTConfig(ffn_dim=48, word_embed_proj_dim=24),
    "phi": hf.PhiConfig(num_key_value_heads=4),
    "phi3": hf.Phi3Config(num_key_value_heads=2),
}


@functools.cache
def tokenizer(bos: bool = False) -> hf.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; it has no padding token, as many do not."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [f"Review: {text}\nSentiment: {label}" for text in TEXTS for label in LABELS] + list(INTENTS) * 2
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(corpus, trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def network(family: str, seed: int = 0) -> torch.nn.Module:
    """A model of two small layers with weights large enough that everything matters, biases included."""
    config = FAMILIES[family].__class__.from_dict(FAMILIES[family].to_dict())
    config.vocab_size = len(tokenizer())
    if family != "gpt2":
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 32, 2, 4
        config.intermediate_size = 48
    config.max_position_embeddings = 128
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:2]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval().requires_grad_(False)


def loaded(family: str, seed: int = 0) -> LoadedModel:
    return LoadedModel(ModelConfig(model=family), network(family, seed), tokenizer(), torch.device("cpu"))


def save(directory: Path, family: str = "llama", seed: int = 0) -> Path:
    """A model directory that `--model` can name."""
    network(family, seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
