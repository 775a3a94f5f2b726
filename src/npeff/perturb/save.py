"""Acting on a perturbation: the change alone, a low-rank adapter, or the whole changed model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from npeff.collect.session import Prepared
from npeff.models.select import Selection
from npeff.perturb.lift import Parameters, norm
from npeff.perturb.weights import EditedWeights
from npeff.perturb.where import low_rank
from npeff.utils.errors import UserError
from npeff.utils.files import PARTIAL, disk_errors, whole_file, write_json

LARGEST_RANK = 64
"""An adapter of a larger rank would not be small."""


@dataclass(frozen=True)
class Saved:
    """A change of the parameters that was written."""

    path: str
    """File or directory, below that of the results."""
    largest_rank: int | None = None
    """Of an adapter: the largest rank of a matrix."""
    kept: float | None = None
    """Of an adapter: share of the change's squared length that it keeps."""
    share: float | None = None
    """Of an adapter: share of each matrix's squared length that was asked for."""


def save_change(
    folder: Path, number: int, kind: str, prepared: Prepared, vector: Parameters, scale: float, share: float
) -> Saved | None:
    """Write the change scale · vector where that is asked for.

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
    if kind == "nothing":
        return None
    path = folder / kind / f"{number:05d}"
    if kind == "adapter":
        rank, kept = save_adapter(path, prepared.selection, vector, scale, share, prepared.config.model.model)
        return Saved(str(path.relative_to(folder)), rank, kept, share)
    if kind == "delta":
        path = path.with_suffix(".safetensors")
        save_delta(path, prepared.selection, vector, scale)
    else:
        save_model(path, prepared, vector, scale)
    return Saved(str(path.relative_to(folder)))


def save_delta(path: Path, selection: Selection, vector: Parameters, scale: float) -> None:
    """Write a change as parameter name → float32 tensor in the parameter's own shape.

    Args:
        path: The file.
        selection: The parameters that the vector is about.
        vector: Module name → [d_out, columns].
        scale: What to multiply the vector with.
    """
    tensors = {
        name: (part * scale).cpu().contiguous()
        for module in selection.modules
        for name, part in module.unpack(vector[module.name]).items()
    }
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"what": "add to the parameters of the model"})


def save_adapter(
    folder: Path, selection: Selection, vector: Parameters, scale: float, share: float, model: str
) -> tuple[int, float]:
    """Write a change as a LoRA adapter in PEFT's layout, each matrix at the smallest rank that keeps `share`.

    Biases have no place in such an adapter: they are left out.

    Args:
        folder: The adapter's directory.
        selection: The parameters that the vector is about.
        vector: Module name → [d_out, columns].
        scale: What to multiply the vector with.
        share: Share of each matrix's squared length to keep.
        model: Name of the model, as PEFT records it.

    Returns:
        The largest rank, and the share of the whole vector's squared length that the adapter keeps.

    Raises:
        UserError: A matrix would need more than `LARGEST_RANK`.
    """
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    lost, whole = 0.0, norm(vector) ** 2
    for module in selection.modules:
        matrix = vector[module.name]
        weight = matrix[:, : matrix.shape[1] - module.bias]
        lost += float(matrix[:, weight.shape[1] :].double().square().sum())
        energy = float(weight.double().square().sum())
        if not module.weight or energy == 0:
            continue
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
        "fan_in_fan_out": any(module.transposed for module in selection.modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with whole_file(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary)
    write_json(folder / "adapter_config.json", settings)
    return top_rank, 1 - lost / whole


def save_model(folder: Path, prepared: Prepared, vector: Parameters, scale: float) -> None:
    """Write the changed model and its tokenizer in the layout of `save_pretrained`; whole or not at all.

    Args:
        folder: The model's directory.
        prepared: The model.
        vector: Module name → [d_out, columns].
        scale: What to multiply the vector with.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(building, ignore_errors=True)
    network: Any = prepared.model.network
    with disk_errors(folder), EditedWeights(prepared.selection.modules) as weights:
        weights.add(vector, scale)
        network.save_pretrained(building)
        prepared.model.tokenizer.save_pretrained(building)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
