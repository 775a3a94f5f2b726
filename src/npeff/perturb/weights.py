"""A model's weights: changed for a while and then put back bit for bit, and derivatives along a change of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from npeff.models.select import CapturedModule
from npeff.perturb.lift import Parameters

forward_ad: Any = _forward_ad  # torch leaves it untyped


class EditedWeights:
    """Context manager that keeps a copy of the selected parameters and gives it back however the block ends.

    with EditedWeights(selection.modules) as weights:
        weights.add(vector, 2.0)     # parameters are now the original + 2 · vector
        ...
    """

    def __init__(self, modules: Iterable[CapturedModule]) -> None:
        self.modules = {module.name: module for module in modules}
        self._originals: dict[str, torch.Tensor] = {}

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
            name: change
            for module, matrix in vector.items()
            for name, change in self.modules[module].unpack(matrix).items()
        }
        with torch.no_grad():
            for name, parameter in self._parameters():
                original = self._originals[name]
                if name in changes and changes[name].shape != original.shape:
                    raise ValueError(f"{name} has shape {tuple(original.shape)}, not {tuple(changes[name].shape)}")
                if name in changes:
                    # summed in float32: half precision would round the change away before it is added
                    parameter.copy_(original.float() + scale * changes[name].to(original.device, torch.float32))
                else:
                    parameter.copy_(original)

    def restore(self) -> None:
        """Put the original parameters back."""
        self.add({}, 0.0)

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and tensor of every parameter that a vector can change."""
        for module in self.modules.values():
            for kind in ("weight", "bias"):
                if getattr(module, kind):
                    yield f"{module.name}.{kind}", getattr(module.module, kind)


@contextlib.contextmanager
def moving(modules: Iterable[CapturedModule], vector: Parameters) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
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
    tangent: torch.Tensor | None = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if tangent is None else tangent
