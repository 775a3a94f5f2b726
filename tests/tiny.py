"""Tiny random models of every family, and a tokenizer for them."""

from __future__ import annotations

import copy
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

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

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

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": hf.MixtralConfig(num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": hf.Qwen2MoeConfig(
        num_key_value_heads=2, num_experts=6, shared_expert_intermediate_size=20, mlp_only_layers=[], **_EXPERTS
    ),
    "qwen3_moe": hf.Qwen3MoeConfig(num_key_value_heads=2, head_dim=8, num_experts=6, **_EXPERTS),
    "olmoe": hf.OlmoeConfig(num_key_value_heads=2, num_experts=7, num_experts_per_tok=3),
    "gpt_oss": hf.GptOssConfig(num_key_value_heads=2, head_dim=8, num_local_experts=5, num_experts_per_tok=2),
    "deepseek_v3": hf.DeepseekV3Config(
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **_EXPERTS,
    ),
}
"""Families with fused experts."""

CLASSES = ("entailment", "neutral", "contradiction")
CLASSIFIERS = {
    "bert": hf.BertConfig(),
    "roberta": hf.RobertaConfig(type_vocab_size=1),
    "deberta-v2": hf.DebertaV2Config(
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        share_att_key=True,
        type_vocab_size=0,
        pooler_hidden_size=32,
    ),
    "modernbert": hf.ModernBertConfig(
        local_attention=8, cls_token_id=0, sep_token_id=1, reference_compile=False, classifier_bias=True
    ),
    "llama-score": hf.LlamaConfig(num_key_value_heads=2),
    "gpt2-score": hf.GPT2Config(n_embd=32, n_layer=2, n_head=4),
}
"""Classifiers of texts: encoders, and causal models with a score head."""


@functools.cache
def pair_tokenizer(types: bool = True) -> hf.PreTrainedTokenizerFast:
    """`tokenizer` with a token before and behind each text, as encoders have it, and types of tokens, as some have."""
    from tokenizers.processors import TemplateProcessing

    core = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    core.post_processor = TemplateProcessing(
        single="<s>:0 $A:0 </s>:0", pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    special = {"cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    special["pad_token"] = str(tokenizer().convert_ids_to_tokens(2))  # one that the texts do not have
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=names, model_max_length=120, **special)


def save_classifier(directory: Path, family: str, **settings: object) -> Path:
    """A directory of a classifier with three classes and its tokenizer."""
    asked = CLASSIFIERS[family]
    config = asked.__class__.from_dict(asked.to_dict() | settings)
    config.vocab_size = len(tokenizer())
    if family != "gpt2-score":
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 32, 2, 4
        config.intermediate_size = 48
    config.max_position_embeddings = 128
    causal = family.endswith("-score")
    if not causal:
        config.pad_token_id = 2
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:2]
    config.id2label, config.label2id = dict(enumerate(CLASSES)), {name: i for i, name in enumerate(CLASSES)}
    torch.manual_seed(0)
    model = hf.AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(directory)
    (tokenizer() if causal else pair_tokenizer(family in ("bert", "deberta-v2"))).save_pretrained(directory)
    return directory


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


def tokenizer_with(template: str | None, bos: bool = False) -> hf.PreTrainedTokenizerFast:
    """The same with a chat template."""
    made = copy.deepcopy(tokenizer(bos))
    made.chat_template = template
    return made


def network(family: str, seed: int = 0) -> torch.nn.Module:
    """A model of two small layers with weights large enough that everything matters, biases included."""
    asked = {**FAMILIES, **MIXTURES}[family]
    config = asked.__class__.from_dict(asked.to_dict())
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
