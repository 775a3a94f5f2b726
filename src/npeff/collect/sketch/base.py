"""What every sketch offers, and the random bits they are made of."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from npeff.collect.config import SketchConfig
from npeff.models.experts import Routing
from npeff.models.select import CapturedModule
from npeff.utils import Record
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

    def fold_input(self, module: Captured, x: torch.Tensor) -> torch.Tensor:
        """What to keep of a module's inputs until its output gradients arrive: all of it, unless less is enough.

        Args:
            module: The module, or the experts of a layer.
            x: Its inputs, [B, T, d_in]; those of experts, [S, d_in].

        Returns:
            What `accumulate` takes as `folded`.
        """
        return x

    @abc.abstractmethod
    def accumulator(self, batch: int) -> torch.Tensor:
        """Zeros that `accumulate` adds to, for `batch` examples."""

    def accumulate(self, module: Captured, delta: torch.Tensor, folded: torch.Tensor, total: torch.Tensor) -> None:
        """Add the sketch of Σ_t δ_t x_tᵀ of every example to `total`.

        Args:
            module: The module, or the experts of a layer.
            delta: Its output gradients, [B, T, d_out]; those of experts, [S, d_out].
            folded: What `fold_input` kept of its inputs.
            total: From `accumulator`; changed in place.
        """
        for matrix, outputs, inputs in by_matrix(module, delta, folded):
            self.add(matrix, gradients(matrix, outputs, inputs).to(total.device), total)

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

    def part(self, vectors: torch.Tensor) -> tuple[Sketch, torch.Tensor]:
        """A cheaper map that is a part of this one, where there is such, and what vectors are in it.

        Args:
            vectors: Vectors of the sketch, [n, p].

        Returns:
            The map to q entries, and vectors [n, q] whose inner products with what it gives estimate those of `vectors`
            with what this map gives.
        """
        return self, vectors

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


class RoutedExperts(Record):
    """The matrices that the experts of a layer have in one place, and which tokens of a batch go to which of them."""

    experts: tuple[CapturedModule, ...]
    routing: Routing
    examples: int
    """B, the examples in the batch; each has as many of the S pairs of token and expert."""

    @property
    def name(self) -> str:
        """Name of the parameter that holds the matrices."""
        return self.experts[0].name.rpartition(".")[0]

    def by_example(self, lines: torch.Tensor) -> torch.Tensor:
        """Lines [S, d], sorted by expert, sorted by example: [B, S / B, d]."""
        return lines[self.routing.back].view(self.examples, -1, lines.shape[1])


Captured = CapturedModule | RoutedExperts


def by_matrix(
    module: Captured, delta: torch.Tensor, x: torch.Tensor
) -> Iterator[tuple[CapturedModule, torch.Tensor, torch.Tensor]]:
    """Output gradients and inputs of every matrix, by example.

    Args:
        module: A module, or the experts of a layer.
        delta: Output gradients [B, T, d_out], or of experts [S, d_out].
        x: Inputs, alike.

    Yields:
        The matrix, its output gradients [B, T, d_out] and its inputs [B, T, d_in]; where examples have fewer than T
        tokens, the gradients of the others are zero. Experts without a token are passed over.
    """
    if isinstance(module, CapturedModule):
        yield module, delta, x
        return
    routing = module.routing
    owners = routing.order // (len(routing.order) // module.examples)
    parts = (torch.split(tensor, routing.counts.tolist()) for tensor in (owners, delta, x))
    for expert, owner, *lines in zip(module.experts, *parts, strict=True):
        if not len(owner):
            continue
        counts = torch.bincount(owner, minlength=module.examples)
        turn = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        padded = [part.new_zeros(module.examples, int(counts.max()), part.shape[1]) for part in lines]
        for whole, part in zip(padded, lines, strict=True):
            whole[owner, turn] = part
        yield expert, padded[0], padded[1]


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
