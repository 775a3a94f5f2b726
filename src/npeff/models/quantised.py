"""Quantised weights: which kinds are read, and the numbers that they stand for."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npeff.models.config import ModelConfig
from npeff.utils.errors import UserError

PACKAGES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
"""Ways to quantise whose models run as they are → the package that runs them."""
UNPACKED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Ways whose weights are unpacked when they are read: no gradient goes through how they are computed."""

_BNB = ("Params4bit", "Int8Params")


def quantisation(config: ModelConfig, settings: Any, gguf: bool) -> dict[str, Any]:
    """What `from_pretrained` must be told to read quantised weights, or to quantise them.

    Args:
        config: Which model, and how to quantise it if that is wanted.
        settings: The model's own config.
        gguf: Whether it is a GGUF file, whose weights are unpacked in any case.

    Returns:
        Options.

    Raises:
        UserError: The weights are quantised in a way that is not read, or already, or the package for it is missing.
    """
    saved = (None if gguf else getattr(settings, "quantization_config", None)) or {}
    method = (saved if isinstance(saved, dict) else saved.to_dict()).get("quant_method")
    method = str(getattr(method, "value", method)) if method else None
    if method and config.quantise:
        raise UserError(f"Model {config.model!r} is quantised already ({method}). Leave out --quantise.")
    if config.quantise:
        method = "torchao" if config.quantise.startswith("torchao") else "bitsandbytes"
    if method in UNPACKED:
        import transformers

        return {"quantization_config": getattr(transformers, UNPACKED[method])(dequantize=True)}
    if method and method not in PACKAGES:
        hint = f"Give one that is quantised by {' or '.join(PACKAGES)}, or the model itself, perhaps with --quantise."
        raise UserError(f"Model {config.model!r} is quantised by {method}, which is not read. {hint}")
    if method and importlib.util.find_spec(PACKAGES[method]) is None:
        raise UserError(f"A package is missing for this. Run: pip install {PACKAGES[method]}.")
    return {"quantization_config": _new(config)} if config.quantise else {}


def _new(config: ModelConfig) -> Any:
    """How transformers is told to quantise."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    dtype = getattr(torch, config.dtype)
    if config.quantise == "bnb-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if config.quantise == "bnb-4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    ways: Any = importlib.import_module("torchao.quantization")
    if config.quantise == "torchao-int8":
        return TorchAoConfig(ways.Int8WeightOnlyConfig())
    # of the kinds with 4 bits the one that runs everywhere
    four_bits = torch.int4  # type: ignore[attr-defined]
    return TorchAoConfig(ways.IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=ways.PerGroup(32)))


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer's weight is not kept as plain numbers."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and (type(weight).__name__ in _BNB or is_traceable_wrapper_subclass(weight))


def quantised_layers(network: nn.Module) -> dict[str, Any]:
    """Linear layers with quantised weights, by name."""
    return {name: module for name, module in network.named_modules() if is_quantised(module)}


def plain_weight(module: Any) -> torch.Tensor:
    """The numbers that a quantised weight stands for.

    Args:
        module: A quantised layer.

    Returns:
        [d_out, d_in].
    """
    weight = module.weight
    if type(weight).__name__ not in _BNB:
        return torch.Tensor(weight.dequantize().detach())
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(weight, getattr(module, "state", None)).detach()


def dequantise(network: Any) -> None:
    """Put plain linear layers in the place of quantised ones.

    Args:
        network: Changed in place; its weights then take as much memory as if it had never been quantised.
    """
    for name, module in quantised_layers(network).items():
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(plain_weight(module).to(network.dtype), requires_grad=False)
        plain.bias = module.bias
        owner, _, last = name.rpartition(".")
        setattr(network.get_submodule(owner), last, plain)
    forget_quantisation(network)


def forget_quantisation(network: Any) -> None:
    """Mark a model as one of plain weights: as a quantised one it could not be saved."""
    network.is_quantized, network.hf_quantizer = False, None
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config


def check_gradients(network: Any, model: str) -> None:
    """Refuse quantised layers that no gradient goes through, and keep others from becoming such.

    Args:
        network: With weights as they will be used.
        model: What messages call it.

    Raises:
        UserError: There is such a layer, as one that quantises its inputs too.
    """
    for module in quantised_layers(network).values():
        # else bitsandbytes packs weights anew on some CPUs when no gradient is wanted, and then there never is one
        module.support_avx512bf16_for_cpu = False
    for module in {type(module.weight): module for module in quantised_layers(network).values()}.values():
        x = torch.zeros(1, module.in_features, dtype=network.dtype, device=module.weight.device)
        if not module(x.requires_grad_(True)).requires_grad:
            hint = "Use weights that are quantised alone, without the activations."
            raise UserError(f"No gradient goes through the quantised layers of {model!r}. {hint}")
