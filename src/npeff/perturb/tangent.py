"""Derivatives of a model's answers along a change of its parameters, exact: by forward-mode differentiation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from npeff.models import CapturedModule
from npeff.perturb.lift import Parameters

forward_ad: Any = _forward_ad  # torch leaves it untyped


@contextlib.contextmanager
def moving(modules: Iterable[CapturedModule], vector: Parameters) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, whatever the model computes carries its derivative along `vector`; yields what reads it.

    with moving(selection.modules, vector) as derivative:
        dz = derivative(answer logits)      # J v

    Parameters are not touched: a hook adds V x to the derivative of each module's output, V its part of the vector.
    """
    handles = []
    try:
        # only the plain form of attention can be differentiated forwards
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            for module in modules:
                if module.name in vector:
                    handles.append(module.module.register_forward_hook(_hook(module, vector[module.name])))
            yield _derivative
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: CapturedModule, matrix: torch.Tensor) -> Callable[[Any, tuple[Any, ...], torch.Tensor], torch.Tensor]:
    def hook(_: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        x = forward_ad.unpack_dual(arguments[0]).primal
        V = matrix.to(output.device, output.dtype)
        change = torch.zeros_like(forward_ad.unpack_dual(output).primal)
        if module.weight:
            change += x @ V[:, : x.shape[-1]].T
        if module.bias:
            change += V[:, -1]
        moved: torch.Tensor = output + forward_ad.make_dual(torch.zeros_like(change), change)
        return moved

    return hook


def _derivative(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor | None = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if found is None else found
