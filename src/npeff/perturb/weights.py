"""A model's weights, changed for a while and then put back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType

import torch

from npeff.models.select import CapturedModule


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self._originals = {}

    def add(self, vector: Mapping[str, torch.Tensor], scale: float) -> None:
        """Set every parameter to its original plus scale times its part of `vector`; absent modules stay original."""
        with torch.no_grad():
            parameters = dict(self._parameters())
            changes = {
                name: change
                for module, matrix in vector.items()
                for name, change in self.modules[module].unpack(matrix).items()
            }
            for name, parameter in parameters.items():
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
        with torch.no_grad():
            for name, parameter in self._parameters():
                parameter.copy_(self._originals[name])

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and tensor of every parameter that a vector can change."""
        for module in self.modules.values():
            for kind in ("weight", "bias"):
                if getattr(module, kind):
                    yield f"{module.name}.{kind}", getattr(module.module, kind)
