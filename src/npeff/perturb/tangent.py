"""Derivatives of a model's answers along a change of its parameters, exact: by forward-mode differentiation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from npeff.models.select import CapturedModule
from npeff.perturb.lift import Parameters

forward_ad: Any = _forward_ad  # torch leaves it untyped


@contextlib.contextmanager
def moving(modules: Iterable[CapturedModule], vector: Parameters) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, whatever the model computes carries its derivative along `vector`; yields what reads it.

    with moving(selection.modules, vector) as derivative:
        dz = derivative(answer logits)      # J v

    Modules hold dual numbers of their parameters and the vector meanwhile; the parameters themselves stay as they are.
    """
    held: list[tuple[torch.nn.Module, str, torch.nn.Parameter | None]] = []
    try:
        # only the plain form of attention can be differentiated forwards
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            for module in modules:
                parts = module.unpack(vector[module.name]) if module.name in vector else {}
                for name, part in parts.items():
                    kind = name.rpartition(".")[2]
                    parameter = getattr(module.module, kind)
                    held.append((module.module, kind, parameter))
                    # not by assignment, which takes nothing but a Parameter, and that would lose the derivative
                    module.module._parameters[kind] = forward_ad.make_dual(parameter.detach(), part.to(parameter))
            yield _derivative
    finally:
        for owner, kind, before in held:
            owner._parameters[kind] = before


def _derivative(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor | None = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if found is None else found
