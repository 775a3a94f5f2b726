"""Kinds of models: rows of Fishers against one-example autograd, on tiny models with random weights.

One function for each entry. References use nothing of npeff but the sketch: weights are written out by hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from bench import entry, model_kinds
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.session import Prepared, prepare
from npeff.models.config import ModelConfig
from npeff.models.load import embedded_model
from npeff.tasks.task import Task

TASK = Task("reviews", "Review: {text}\nSentiment:", "tokens", ("Negative", "Positive"))
TEXTS = ("a film of great charm and wit", "dull , flat and far too long", "one of the best of the year")
RANK, ALPHA = 4, 16


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    yield entry("models.adapter_error", adapter_error(), "<= 1e-4")
    yield from model_kinds.benchmarks(data)


def adapter_error() -> float:
    """Worst relative error of rows with a LoRA adapter: of the merged weights, and of its own matrices."""
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder, "base"), Path(folder, "adapter")
        save_model(base)
        save_adapter(base, adapter)
        return max(merged_error(base, adapter), own_error(base, adapter))


def save_model(folder: Path) -> None:
    """A tiny Llama with weights large enough that everything matters, and the embedded model's tokenizer."""
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(embedded_model())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    network = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_adapter(base: Path, folder: Path) -> None:
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(network_of(base), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)


def network_of(base: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)


def pairs_of(adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module → (A, B), as they lie in the adapter's file."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    names = sorted({name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors})
    form = "base_model.model.{}.lora_{}.weight"
    return {name: (tensors[form.format(name, "A")], tensors[form.format(name, "B")]) for name in names}


def merged_error(base: Path, adapter: Path) -> float:
    prepared, network = prepared_with(base, adapter), network_of(base)
    for name, (A, B) in pairs_of(adapter).items():
        network.get_submodule(name).weight.add_(ALPHA / RANK * B @ A)
    modules = {m.name: network.get_submodule(m.name).weight.clone() for m in prepared.selection.modules}
    return worst_error(prepared, network, modules, lambda leaves: {f"{name}.weight": w for name, w in leaves.items()})


def own_error(base: Path, adapter: Path) -> float:
    prepared, network, pairs = prepared_with(base, adapter, ("*lora_*",)), network_of(base), pairs_of(adapter)
    own = {f"{name}.lora_{kind}.default": pair["AB".index(kind)] for name, pair in pairs.items() for kind in "AB"}

    def weights(leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changes = {name: leaves[f"{name}.lora_B.default"] @ leaves[f"{name}.lora_A.default"] for name in pairs}
        before = {name: network.get_submodule(name).weight for name in pairs}
        return {f"{name}.weight": before[name] + ALPHA / RANK * change for name, change in changes.items()}

    return worst_error(prepared, network, own, weights)


def prepared_with(base: Path, adapter: Path, include: tuple[str, ...] = ()) -> Prepared:
    model = ModelConfig(str(base), adapter=str(adapter), include=include, device="cpu")
    return prepare(
        CollectConfig("", model=model, directions=DirectionsConfig("exact"), sketch=SketchConfig(dim=1024)), TASK
    )


def worst_error(prepared: Prepared, network: nn.Module, matrices: dict[str, torch.Tensor], weights: Any) -> float:
    """Relative error of collected rows, which have a sign of their own, over the texts.

    The reference is autograd by `matrices` (module → matrix) of a network whose weights `weights` makes of them. With
    two answers S = p₀ p₁ (1, -1)ᵀ (1, -1), so an example has one row.
    """
    prompts = [prepared.model.tokenizer(TASK.render(text)).input_ids for text in TEXTS]
    collected = prepared.collector.collect(prompts, list(range(len(prompts))))
    errors = []
    for number, prompt in enumerate(prompts):
        leaves = {name: matrix.clone().requires_grad_(True) for name, matrix in matrices.items()}
        logits = torch.func.functional_call(network, weights(leaves), (torch.tensor([prompt]),)).logits[0, -1]
        z = logits[[ids[0] for ids in prepared.answers.tokens]]
        p = z.detach().double().softmax(0)
        V = ((p[0] * p[1]).sqrt() * torch.tensor([1.0, -1.0])).float()
        found = dict(zip(leaves, torch.autograd.grad(z, list(leaves.values()), V), strict=True))
        expected = prepared.collector.sketch.matvec(found)
        row = collected["rows"][number, 0] * collected["pef_norm"][number].sqrt()
        errors.append(min(float((row - sign * expected).norm() / expected.norm()) for sign in (1, -1)))
    return max(errors)
