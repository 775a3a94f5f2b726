"""The one place that chooses where to compute."""

import os

import torch

from npeff.utils.errors import UserError


def choose_device(name: str, double: bool = False) -> torch.device:
    """The device that a user named, checked to exist.

    Args:
        name: cpu, cuda, cuda:1, mps, ...; `auto` takes a GPU if there is one, each rank of torchrun its own.
        double: Whether float64 is needed, which Apple's GPUs do not have: `auto` then passes them over.

    Returns:
        The device.

    Raises:
        UserError: The device cannot be used here.
    """
    if name == "auto":
        apple = torch.backends.mps.is_available() and not double
        name = "cuda" if torch.cuda.is_available() else "mps" if apple else "cpu"
        if name == "cuda" and "LOCAL_RANK" in os.environ:
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"Device {name!r} cannot be used here ({error}). Use cpu, cuda, mps or auto.") from error
