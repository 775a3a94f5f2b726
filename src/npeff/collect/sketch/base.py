"""What every sketch offers, and the random bits they are made of."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from npeff.collect.config import SketchConfig
from npeff.models.select import CapturedModule
from npeff.utils.random import random_bits


class Sketch(abc.ABC):
    """A linear map R^n → R^p over the matrices of the captured modules; all modules add into the same p numbers.

    Collection never forms a module's gradient Σ_t δ_t x_tᵀ if it need not: `fold_input` sees the module's inputs once,
    `accumulate` sees the output gradients once for every row, `finish` gives the rows. `matvec` and `rmatvec` are the
    same map and its adjoint on whole gradients.
    """

    def __init__(self, config: SketchConfig, modules: Iterable[CapturedModule], device: torch.device | str = "cpu"):
        self.config = config
        self.dim = config.dim
        self.device = torch.device(device)
        self.modules = {module.name: module for module in modules}

    def fold_input(self, module: CapturedModule, x: torch.Tensor) -> torch.Tensor:
        """What to keep of a module's inputs until its output gradients arrive: all of it, unless less is enough.

        Args:
            module: The module.
            x: Its inputs, [B, T, d_in].

        Returns:
            What `accumulate` takes as `folded`.
        """
        return x

    @abc.abstractmethod
    def accumulator(self, batch: int) -> torch.Tensor:
        """Zeros that `accumulate` adds to, for `batch` examples."""

    def accumulate(
        self, module: CapturedModule, delta: torch.Tensor, folded: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Add the sketch of Σ_t δ_t x_tᵀ of every example to `total`.

        Args:
            module: The module.
            delta: Its output gradients, [B, T, d_out].
            folded: What `fold_input` kept of its inputs.
            total: From `accumulator`; changed in place.
        """
        self.add(module, gradients(module, delta, folded), total)

    @abc.abstractmethod
    def add(self, module: CapturedModule, gradient: torch.Tensor, total: torch.Tensor) -> None:
        """Add the sketch of a module's whole gradients to `total`.

        Args:
            module: The module.
            gradient: Per-example gradients, float32 [B, d_out, columns].
            total: From `accumulator`; changed in place.
        """

    @abc.abstractmethod
    def finish(self, total: torch.Tensor) -> torch.Tensor:
        """Projected gradients.

        Args:
            total: What `accumulate` added up.

        Returns:
            float32 [B, p].
        """

    def matvec(self, gradient: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Project one gradient.

        Args:
            gradient: Module name → [d_out, columns]; modules that are absent count as zero.

        Returns:
            float32 [p].
        """
        total = self.accumulator(1)
        for name, matrix in gradient.items():
            self.add(self.modules[name], matrix.to(self.device, torch.float32)[None], total)
        return self.finish(total)[0]

    @abc.abstractmethod
    def rmatvec_module(self, module: CapturedModule, y: torch.Tensor) -> torch.Tensor:
        """The part of the adjoint that belongs to one module.

        Args:
            module: The module.
            y: A vector of the sketch, [p].

        Returns:
            float32 [d_out, columns].
        """

    def rmatvec(self, y: torch.Tensor) -> Iterator[tuple[CapturedModule, torch.Tensor]]:
        """The adjoint R^p → R^n, one module at a time."""
        for module in self.modules.values():
            yield module, self.rmatvec_module(module, y)


def with_bias(module: CapturedModule, x: torch.Tensor) -> torch.Tensor:
    """The inputs as the columns of the module's matrix see them: x, then a one for the bias."""
    parts = ([x] if module.weight else []) + ([x.new_ones((*x.shape[:-1], 1))] if module.bias else [])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def gradients(module: CapturedModule, delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Per-example gradients Σ_t δ_t x_tᵀ of a module, [B, d_out, columns] in float32."""
    return torch.einsum("bto,bti->boi", delta.float(), with_bias(module, x).float())


def random_signs(count: int, *key: object) -> torch.Tensor:
    """`count` signs, +1 or -1 as int8."""
    bits = np.unpackbits(random_bits(-(-count // 8), *key), count=count)
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)
