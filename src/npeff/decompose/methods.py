"""The methods by name: making an estimator, and reading one from disk."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from npeff.decompose.base import CONFIG, Decomposition, SavedDecomposition
from npeff.decompose.baselines import ActivationSvd, Clusters, GradientSvd, Sae
from npeff.decompose.checkpoint import Checkpoint, History
from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import GradientNpeff, Npeff
from npeff.utils import UserError, read_record, sha256

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
    """Read what `Decomposition.save` wrote.

    Args:
        directory: Directory of the decomposition.
        fingerprint: Fingerprint of the run that it has to be of.

    Returns:
        The decomposition; of its history only the end is known.

    Raises:
        UserError: There is no decomposition, it is damaged, or it is of another run.
    """
    directory = Path(directory)
    if not (directory / CONFIG).exists():
        raise UserError(f"There is no finished decomposition in {directory}; make one with `npeff decompose`.")
    saved = read_record(SavedDecomposition, directory / CONFIG)
    if fingerprint is not None and saved.notes.run not in (None, fingerprint):
        raise UserError(f"{directory} belongs to another run (or the run was collected again); decompose this one.")
    tensors_file = directory / "tensors.safetensors"
    if not tensors_file.exists() or sha256(tensors_file) != saved.sha256:
        raise UserError(f"{tensors_file} is missing or damaged; run `npeff decompose` again.")
    decomposition = create(saved.config)
    try:
        tensors = load_file(tensors_file)
        _check_tensors(tensors, decomposition)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{tensors_file} does not hold the tensors of a decomposition: {error}.") from error
    vars(decomposition).update(tensors)
    decomposition.notes = saved.notes
    decomposition.history = History([], saved.history.ending, saved.history.reseeded)
    return decomposition


def _check_tensors(tensors: dict[str, torch.Tensor], decomposition: Decomposition) -> None:
    """Raise ValueError for tensors, of a run from elsewhere, that no fit of this kind has written."""
    if set(tensors) != set(decomposition.tensors):
        raise ValueError(f"it has {', '.join(sorted(tensors))} in place of {', '.join(sorted(decomposition.tensors))}")
    examples, dim = tensors["coefficients"].shape[:1], tensors["components"].shape[-1:]
    count = torch.Size([decomposition.config.components])
    shapes = {"components": count + dim, "coefficients": examples + count, "residuals": examples}
    shapes |= {"encoder": count + dim, "bias": dim}
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has entries that are not finite, or not float32")
