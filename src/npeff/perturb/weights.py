"""A model's weights: changed for a while and then put back bit for bit, derivatives along a change, and its files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.autograd import forward_ad as _forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from npeff.collect.session import Prepared
from npeff.models.experts import computing_experts, is_router
from npeff.models.select import CapturedModule
from npeff.perturb.lift import Parameters, norm
from npeff.perturb.where import low_rank
from npeff.utils import Record, UserError
from npeff.utils.files import PARTIAL, disk_errors, whole_file, write_json

forward_ad: Any = _forward_ad  # torch leaves it untyped
LARGEST_RANK = 64
"""An adapter of a larger rank would not be small."""


class EditedWeights:
    """Context manager that keeps a copy of the selected parameters and gives it back however the block ends.

    with EditedWeights(selection.modules) as weights:
        weights.add(vector, 2.0)     # parameters are now the original + 2 · vector
        ...
    """

    def __init__(self, modules: Iterable[CapturedModule]) -> None:
        self.modules = {module.name: module for module in modules}
        self._originals: dict[tuple[str, str], torch.Tensor] = {}

    def __enter__(self) -> EditedWeights:
        self._originals = {name: tensor.detach().clone() for name, tensor in self._parameters()}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self._originals = {}

    def add(self, vector: Mapping[str, torch.Tensor], scale: float) -> None:
        """Set every parameter to its original plus scale times its part of a vector.

        Args:
            vector: Module name → [d_out, columns]; parameters of absent modules become the original.
            scale: What to multiply the vector with.

        Raises:
            ValueError: A part of the vector has another shape than its parameter.
        """
        changes = {
            (module, name): change
            for module, matrix in vector.items()
            for name, change in self.modules[module].unpack(matrix).items()
        }
        with torch.no_grad():
            for name, parameter in self._parameters():
                original = self._originals[name]
                if name in changes and changes[name].shape != original.shape:
                    raise ValueError(f"{name[1]} has shape {tuple(original.shape)}, not {tuple(changes[name].shape)}")
                if name not in changes:
                    parameter.copy_(original)
                elif parameter.dtype == torch.float32:
                    torch.add(original, changes[name].to(original), alpha=scale, out=parameter)
                else:  # summed in float32: half precision would round the change away before it is added
                    parameter.copy_(original.float() + scale * changes[name].to(original.device, torch.float32))

    def restore(self) -> None:
        """Put the original parameters back."""
        self.add({}, 0.0)

    def _parameters(self) -> Iterable[tuple[tuple[str, str], torch.Tensor]]:
        """Everything that a vector can change: names of matrix and parameter, and what of the parameter it is."""
        for module in self.modules.values():
            for name, attribute in module.parameters.items():
                yield (module.name, name), module.part(getattr(module.module, attribute))


@contextlib.contextmanager
def moving(modules: Sequence[CapturedModule], vector: Parameters) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, whatever the model computes carries its derivative along a change of the parameters.

    with moving(selection.modules, vector) as derivative:
        dz = derivative(answer logits)      # J v

    Modules hold dual numbers of their parameters and the vector meanwhile; the parameters themselves stay as they are.

    Args:
        modules: The modules that the vector may change.
        vector: Module name → [d_out, columns].

    Yields:
        A function that gives the derivative of a tensor, in its own shape.
    """
    held: list[tuple[torch.nn.Module, str, torch.nn.Parameter | None]] = []
    experts = [module.module for module in modules if module.expert is not None]
    try:
        # only the plain form of attention and of experts can be differentiated forwards
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), computing_experts(experts, None):
            for owner, attribute, change in by_parameter(modules, vector).values():
                parameter = getattr(owner, attribute)
                held.append((owner, attribute, parameter))
                # not by assignment, which takes nothing but a Parameter, and that would lose the derivative
                owner._parameters[attribute] = forward_ad.make_dual(parameter.detach(), change.to(parameter))
            yield _derivative
    finally:
        for owner, kind, before in held:
            owner._parameters[kind] = before


def by_parameter(
    modules: Iterable[CapturedModule], vector: Parameters
) -> dict[str, tuple[torch.nn.Module, str, torch.Tensor]]:
    """Put a vector of matrices together to a vector of parameters.

    Args:
        modules: The matrices that the vector may change.
        vector: Module name → [d_out, columns].

    Returns:
        Name of each parameter that changes → its module, what that calls it, and the change in the parameter's shape.
    """
    found: dict[str, tuple[torch.nn.Module, str, torch.Tensor]] = {}
    for module in modules:
        parts = module.unpack(vector[module.name]) if module.name in vector else {}
        for name, part in parts.items():
            attribute = module.parameters[name]
            if module.expert is not None:  # the others' parts are in the same parameter
                shape = getattr(module.module, attribute).shape
                whole = found[name][2] if name in found else part.new_zeros(shape)
                whole[module.expert] = part
                part = whole
            found[name] = (module.module, attribute, part)
    return found


def _derivative(value: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor | None = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if tangent is None else tangent


# --- changes as files ---------------------------------------------------------------------------------------


class Saved(Record):
    """A change of the parameters that was written."""

    path: str
    """File or directory, below that of the results."""
    largest_rank: int | None = None
    """Of an adapter: the largest rank of a matrix."""
    kept: float | None = None
    """Of an adapter: share of the change's squared length that it keeps."""
    share: float | None = None
    """Of an adapter: share of each matrix's squared length that was asked for."""


def check_saving(kind: str, prepared: Prepared) -> None:
    """Say at once that a change cannot be written as it is asked for.

    Args:
        kind: nothing, delta, adapter or model.
        prepared: The model that it is a change of.

    Raises:
        UserError: An adapter is on that model, which the change would have to go on top of.
    """
    adapter, layers = prepared.model.config.adapter, dict(prepared.model.network.named_parameters())
    if adapter and (kind == "adapter" or (kind == "model" and any(".base_layer." in name for name in layers))):
        raise UserError(
            f"The run's model has the adapter {adapter} on it, so --save {kind} fits no model. Use --save delta."
        )


def save_change(
    folder: Path, number: int, kind: str, prepared: Prepared, vector: Parameters, scale: float, share: float
) -> Saved | None:
    """Write the change scale · vector where that is asked for.

    A delta is parameter name → float32 tensor in the parameter's own shape; a model and its tokenizer have the layout
    of `save_pretrained`.

    Args:
        folder: Directory of the results.
        number: The component.
        kind: nothing, delta, adapter or model.
        prepared: The model that it is a change of.
        vector: Module name → [d_out, columns].
        scale: What to multiply the vector with.
        share: Share of each matrix's squared length that an adapter keeps.

    Returns:
        What was written; None for nothing.
    """
    modules, name = prepared.selection.modules, f"{kind}/{number:05d}"
    if kind == "adapter":
        rank, kept = save_adapter(folder / name, modules, vector, scale, share, prepared.config.model.model)
        return Saved(name, rank, kept, share)
    if kind == "model":
        network: Any = prepared.model.network
        building = folder / kind / f".{number:05d}{PARTIAL}"
        with disk_errors(folder / name), EditedWeights(modules) as weights:
            weights.add(vector, scale)
            network.save_pretrained(building)
            prepared.model.tokenizer.save_pretrained(building)
            shutil.rmtree(folder / name, ignore_errors=True)
            building.rename(folder / name)
        return Saved(name)
    if kind == "delta":
        parts = by_parameter(modules, vector)
        tensors = {name: (part * scale).cpu().contiguous() for name, (_, _, part) in parts.items()}
        with whole_file(folder / f"{name}.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"what": "add to the parameters of the model"})
        return Saved(f"{name}.safetensors")
    return None


def save_adapter(
    folder: Path, modules: Sequence[CapturedModule], vector: Parameters, scale: float, share: float, model: str
) -> tuple[int, float]:
    """Write a change as a LoRA adapter in PEFT's layout, each matrix at the smallest rank that keeps `share`.

    Biases have no place in such an adapter: they are left out.

    Args:
        folder: The adapter's directory.
        modules: Those that the vector is about.
        vector: Module name → [d_out, columns].
        scale: What to multiply the vector with.
        share: Share of each matrix's squared length to keep.
        model: Name of the model, as PEFT records it.

    Returns:
        The largest rank, and the share of the whole vector's squared length that the adapter keeps.

    Raises:
        UserError: A matrix would need more than `LARGEST_RANK`, or is not that of a linear layer.
    """
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    lost, whole = 0.0, norm(vector) ** 2
    for module in modules:
        weight, bias = vector[module.name].tensor_split([module.shape[1] - module.bias], dim=1)
        lost += float(bias.double().square().sum())
        energy = float(weight.double().square().sum())
        if not module.weight or energy == 0:
            continue
        if module.expert is not None or is_router(module.module):
            raise UserError(f"No adapter can hold a change of {module.name}. Save the delta instead.")
        B, A, kept = low_rank(weight * scale, share)
        if A.shape[0] > LARGEST_RANK:
            raise UserError(
                f"No small adapter: {module.name} needs rank {A.shape[0]} to keep {share:.0%} of its change, more "
                f"than {LARGEST_RANK}. Lower --adapter-share, or save the delta instead."
            )
        lost += (1 - kept) * energy
        ranks[module.name] = A.shape[0]
        tensors[f"base_model.model.{module.name}.lora_A.weight"] = A.cpu().contiguous()
        tensors[f"base_model.model.{module.name}.lora_B.weight"] = B.cpu().contiguous()
    top_rank = max(ranks.values())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": top_rank,
        "lora_alpha": top_rank,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,  # equal to the rank: the product is added as it is
        "target_modules": list(ranks),
        "fan_in_fan_out": any(module.transposed for module in modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with whole_file(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary)
    write_json(folder / "adapter_config.json", settings)
    return top_rank, 1 - lost / whole
