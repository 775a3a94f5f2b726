"""Acting on a perturbation: the change alone, a low-rank adapter, or the whole changed model."""

from __future__ import annotations

import shutil
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


def save_delta(path: Path, selection: Selection, vector: Parameters, scale: float) -> None:
    """Write scale · vector as parameter name → float32 tensor in the parameter's own shape."""
    tensors = {
        name: (part * scale).cpu().contiguous()
        for module in selection.modules
        for name, part in module.unpack(vector[module.name]).items()
    }
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"what": "add to the parameters of the model"})


def save_adapter(
    folder: Path, selection: Selection, vector: Parameters, scale: float, share: float, most: int, model: str
) -> dict[str, Any]:
    """Write scale · vector as a LoRA adapter in PEFT's layout, each matrix at the smallest rank that keeps `share`.

    A matrix that would need more than `most` ranks is an error that says so. Biases have no place in such an adapter;
    they are left out, and the share of the whole that is kept says what that costs.
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
        if A.shape[0] > most:
            raise UserError(
                f"No small adapter: {module.name} needs rank {A.shape[0]} to keep {share:.0%} of its change. Lower "
                f"--adapter-share, raise --adapter-rank, or save the delta instead."
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
    return {"largest_rank": top_rank, "kept": 1 - lost / whole}


def save_model(folder: Path, prepared: Prepared, vector: Parameters, scale: float) -> None:
    """Write the model with scale · vector added and its tokenizer, in `save_pretrained` layout; whole or not at all."""
    building = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(building, ignore_errors=True)
    network: Any = prepared.model.network
    with disk_errors(folder), EditedWeights(prepared.selection.modules) as weights:
        weights.add(vector, scale)
        network.save_pretrained(building)
        prepared.model.tokenizer.save_pretrained(building)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
