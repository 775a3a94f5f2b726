"""The methods by name: making an estimator, and reading one from disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from npeff.decompose.base import Decomposition
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.clusters import Clusters
from npeff.decompose.config import FitConfig
from npeff.decompose.history import History
from npeff.decompose.npeff import GradientNpeff, Npeff
from npeff.decompose.sae import Sae
from npeff.decompose.svd import ActivationSvd, GradientSvd
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, sha256

CLASSES: dict[str, type[Decomposition]] = {
    "npeff": Npeff,
    "gnpeff": GradientNpeff,
    "clusters": Clusters,
    "sae": Sae,
    "svd-gradients": GradientSvd,
    "svd-activations": ActivationSvd,
}


def create(config: FitConfig, checkpoint: Checkpoint | None = None, quiet: bool = True) -> Decomposition:
    """The estimator that a config asks for."""
    return CLASSES[config.method](config, checkpoint=checkpoint, quiet=quiet)


def kind_of(method: str) -> str:
    """Rows that a method is made of."""
    return CLASSES[method].kind


def load(directory: Path | str, fingerprint: str | None = None) -> Decomposition:
    """Read what `save` wrote; with `fingerprint`, refuse a decomposition of another run."""
    directory = Path(directory)
    if not (directory / "config.json").exists():
        raise UserError(f"There is no finished decomposition in {directory}; make one with `npeff decompose`.")
    values = read_json(directory / "config.json")
    try:
        method, saved, digest = values["method"], values["config"], values["sha256"]
        notes, ending, reseeded = dict(values["notes"]), str(values["history"]["ending"]), values["history"]["reseeded"]
        decomposition = CLASSES[method](from_dict(FitConfig, saved))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory / 'config.json'} does not describe a decomposition: no {error}.") from error
    if fingerprint is not None and notes.get("run") not in (None, fingerprint):
        raise UserError(f"{directory} belongs to another run (or the run was collected again); decompose this one.")
    tensors_file = directory / "tensors.safetensors"
    if not tensors_file.exists() or sha256(tensors_file) != digest:
        raise UserError(f"{tensors_file} is missing or damaged; run `npeff decompose` again.")
    try:
        tensors = load_file(tensors_file)
        _check_tensors(tensors, decomposition.config)
        for name in _TENSORS:
            setattr(decomposition, name, tensors.pop(name))
        decomposition.restore(tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{tensors_file} does not hold the tensors of a decomposition: {error}.") from error
    decomposition.notes = notes
    decomposition.history = History([], ending, reseeded)
    return decomposition


_TENSORS = ("components", "coefficients", "residuals")


def _check_tensors(tensors: dict[str, torch.Tensor], config: FitConfig) -> None:
    """Raise ValueError for tensors, of a run from elsewhere, that no fit with this config has written."""
    examples, numbers = tensors["coefficients"].shape[:1], tensors["components"].shape[-1:]
    count = torch.Size([config.components])
    shapes = {"components": count + numbers, "coefficients": examples + count, "residuals": examples}
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite, or not float32")
