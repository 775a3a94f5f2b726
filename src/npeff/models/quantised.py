"""Quantised weights: which kinds are read, and the numbers that they stand for."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npeff.models.config import ModelConfig
from npeff.utils import UserError

PACKAGES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}
"""Ways to quantise whose models run as they are → the package that runs them."""
UNPACKED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Ways whose weights are unpacked when they are read: no gradient goes through how they are computed."""

PACKED = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""Ways whose packages need a GPU, so that weights are unpacked here → forms of packing that are known."""

_BNB = ("Params4bit", "Int8Params")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in 32 bits AWQ puts each of eight neighbours."""


def quantisation(config: ModelConfig, settings: Any, path: str, gguf: bool) -> dict[str, Any]:
    """What `from_pretrained` must be told to read quantised weights, or to quantise them.

    Args:
        config: Which model, and how to quantise it if that is wanted.
        settings: The model's own config.
        path: Where it is.
        gguf: Whether it is a GGUF file, whose weights are unpacked in any case.

    Returns:
        Options.

    Raises:
        UserError: The weights are quantised in a way that is not read, or already, or the package for it is missing.
    """
    saved = (None if gguf else getattr(settings, "quantization_config", None)) or {}
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    method = saved.get("quant_method")
    method = str(getattr(method, "value", method)) if method else None
    if method and config.quantise:
        raise UserError(f"Model {config.model!r} is quantised already ({method}). Leave out --quantise.")
    if config.quantise:
        method = "torchao" if config.quantise.startswith("torchao") else "bitsandbytes"
    if method in UNPACKED:
        import transformers

        return {"quantization_config": getattr(transformers, UNPACKED[method])(dequantize=True)}
    if method in PACKED:
        del settings.quantization_config
        return {"config": settings, "state_dict": read_packed(_files(path, config.revision), config, method, saved)}
    if method and method not in PACKAGES:
        hint = f"Give one that is quantised by {' or '.join(PACKAGES)}, or the model itself, perhaps with --quantise."
        raise UserError(f"Model {config.model!r} is quantised by {method}, which is not read. {hint}")
    if method and importlib.util.find_spec(PACKAGES[method]) is None:
        raise UserError(f"A package is missing for this. Run: pip install {PACKAGES[method]}.")
    return {"quantization_config": _new(config)} if config.quantise else {}


def _files(path: str, revision: str | None) -> list[Path]:
    """The files of a checkpoint's weights; those of the Hub are fetched."""
    from huggingface_hub import snapshot_download

    pattern = "*.safetensors"
    folder = path if Path(path).is_dir() else snapshot_download(path, revision=revision, allow_patterns=[pattern])
    return sorted(Path(folder).glob(pattern))


def read_packed(files: list[Path], config: ModelConfig, method: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of GPTQ or AWQ as plain numbers.

    Args:
        files: Its files.
        config: Which model, and in which precision.
        method: gptq or awq.
        saved: How it was quantised, from its config.

    Returns:
        Name → tensor, as in the checkpoint of the model before it was quantised.

    Raises:
        UserError: It is packed in a form that is not known.
    """
    bits = int(saved.get("bits") or 0)
    form = str(saved.get("version" if method == "awq" else "checkpoint_format") or PACKED[method][0]).lower()
    if form not in PACKED[method] or bits not in ((4,) if method == "awq" else (2, 4, 8)):
        hint = "Give the model itself, perhaps with --quantise."
        told = f"quantised by {method} in a form ({form}, {bits} bits) not read"
        raise UserError(f"Model {config.model!r} is {told}. {hint}")
    tensors: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        packed = {part: tensors.pop(f"{name}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        plain = unpack(packed, bits, int(saved.get("group_size") or -1), form)
        tensors[f"{name}.weight"] = plain.to(getattr(torch, config.dtype))
    return tensors


def unpack(packed: Mapping[str, Any], bits: int, group_size: int, form: str) -> torch.Tensor:
    """The numbers that a packed weight stands for: scale · (integer - zero), both of the input's group.

    Args:
        packed: scales [groups, d_out]; qzeros [groups, d_out · bits / 32]; qweight, [d_in · bits / 32, d_out] of GPTQ
            or [d_in, d_out · bits / 32] of AWQ; g_idx [d_in], the group of each input, or None.
        bits: Of an integer.
        group_size: Neighbouring inputs that make a group if g_idx is None; -1 if all make one.
        form: One of `PACKED`.

    Returns:
        float32 [d_out, d_in].
    """
    scales, zeros = packed["scales"].float(), _integers(packed["qzeros"], bits)
    if form == "gemm":
        numbers = _integers(packed["qweight"], bits)
        numbers, zeros = (part.view(len(part), -1, 8)[:, :, _AWQ_ORDER].flatten(1) for part in (numbers, zeros))
    else:
        numbers = _integers(packed["qweight"].T, bits).T
        if form == "gptq":  # the first form keeps zeros less one
            zeros = (zeros + 1) % 2**bits
    in_order = torch.arange(len(numbers)) // (group_size if group_size > 0 else len(numbers))
    group = in_order if packed["g_idx"] is None else packed["g_idx"].long()
    return ((numbers - zeros[group]) * scales[group]).T.contiguous()


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """What words of 32 bits [n, m] hold, the lowest bits first: [n, m · 32 / bits]."""
    return (words[:, :, None] >> torch.arange(0, 32, bits) & 2**bits - 1).flatten(1)


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
