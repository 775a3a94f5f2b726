"""Toy models whose mechanisms are known, trained on the spot, and the exact rows of their Fishers.

An output with Gaussian noise of unit variance has the Fisher F = JᵀJ, with J the derivative of the outputs by the
parameters: the rows of an example are those of J, without a sketch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npeff.store.rows import ArrayRows

DENSITY = 0.05
"""Share of the features that are present in an example while a model of superposition is trained."""
SPECTRAL = 2
"""Rows of an example of `CompressedComputation`, which would have one for each active neuron: the leading ones."""


@dataclass(frozen=True)
class Examples:
    """Examples of a toy model, with what every method is made of; examples that nothing responds to are left out."""

    features: Tensor
    """Which features are present and how much, [m, n]."""
    fisher: ArrayRows
    """Rows of J."""
    gradient: ArrayRows
    """Jᵀy: the derivative of half the squared length of the output y, which takes the place of a predicted class."""
    activation: ArrayRows
    """What the hidden layer holds."""


def sparse_features(m: int, n: int, density: float, seed: int, signed: bool = False) -> Tensor:
    """Features uniform on [0, 1], or on [−1, 1], each present with probability `density`, [m, n]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(m, n, generator=generator)
    present = torch.rand(m, n, generator=generator) < density
    return (2 * sizes - 1 if signed else sizes) * present


def optimise(parameters: list[Tensor], loss: Callable[[int], Tensor], steps: int, rate: float) -> None:
    """Adam with a cosine schedule; `loss` gets the number of the step."""
    optimiser = torch.optim.Adam([each.requires_grad_() for each in parameters], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for step in range(steps):
        optimiser.zero_grad()
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    for each in parameters:
        each.requires_grad_(False)


class Superposition:
    """x̂ = ReLU(WᵀWx + b) (Elhage et al., "Toy models of superposition", 2022). Parameters that count: W [d, n]."""

    def __init__(self, features: int, hidden: int, seed: int, steps: int = 5000) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.W = torch.randn(hidden, features, generator=generator) / hidden**0.5
        self.b = torch.zeros(features)

        def loss(step: int) -> Tensor:
            x = sparse_features(1024, features, DENSITY, 1_000_000 * (seed + 1) + step)
            return (self.output(x, self.W) - x).square().mean()

        optimise([self.W, self.b], loss, steps, 5e-3)

    def output(self, x: Tensor, W: Tensor) -> Tensor:
        """x̂ [m, n] of examples x [m, n]."""
        return torch.relu(x @ W.T @ W + self.b)

    def mechanisms(self) -> Tensor:
        """Column i of W at its place and zero elsewhere, at unit length, [n, n·d]."""
        return torch.nn.functional.normalize(torch.diag_embed(self.W).permute(1, 2, 0).flatten(1), dim=1)

    def examples(self, m: int, density: float, seed: int) -> Examples:
        """Examples with everything that methods need; the columns of W lie one after another in a row."""
        x = sparse_features(m, self.W.shape[1], density, seed)
        y = self.output(x, self.W)
        x, y = (values[(y > 0).any(dim=1) & (x > 0).any(dim=1)] for values in (x, y))
        hidden = x @ self.W.T
        example, output = (y > 0).nonzero(as_tuple=True)
        # ∂x̂ₖ / ∂(column a of W) = xₐ Wₖ, and for a = k also Wx
        rows = x[example][:, :, None] * self.W.T[output][:, None, :]
        rows[torch.arange(len(rows)), output] += hidden[example]
        rows = rows.flatten(1)
        gradient = torch.zeros(len(x), rows.shape[1]).index_add_(0, example, y[example, output][:, None] * rows)
        return Examples(x, ArrayRows(rows, (y > 0).sum(dim=1).numpy()), ArrayRows(gradient), ArrayRows(hidden))


class CompressedComputation:
    """y = Eᵀ(Ex + W_out ReLU(W_in Ex)) with a fixed random embedding E, trained towards x + ReLU(x).

    One hundred functions through fifty neurons (Braun et al., "Attribution-based parameter decomposition", 2025).
    Parameters that count: W_in. With E = QR only A = W_in Q [neurons, n] and B = QᵀW_out [n, neurons] matter, and
    lengths and angles of directions of W_in are those of A.
    """

    def __init__(
        self,
        features: int = 100,
        neurons: int = 50,
        embedding: int = 1000,
        seed: int = 0,
        steps: int = 5000,
        density: float = 0.01,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        E = torch.nn.functional.normalize(torch.randn(embedding, features, generator=generator), dim=0)
        self.R = torch.linalg.qr(E)[1]
        self.A = torch.randn(neurons, features, generator=generator) / features**0.5
        self.B = torch.randn(features, neurons, generator=generator) / neurons**0.5
        self.density = density

        def loss(step: int) -> Tensor:
            x = sparse_features(2048, features, density, 1_000_000 * (seed + 1) + step, signed=True)
            return (self.output(x, self.A) - x - x.relu()).square().mean()

        optimise([self.A, self.B], loss, steps, 3e-3)

    def output(self, x: Tensor, A: Tensor) -> Tensor:
        """y [m, n] of examples x [m, n]."""
        embedded = x @ self.R.T
        return (embedded + torch.relu(embedded @ A.T) @ self.B.T) @ self.R

    def share_of_feature(self, components: Tensor) -> Tensor:
        """How much of each component's squared length reads each feature, [C, n]; embeddings are nearly orthogonal."""
        matrices = components.view(len(components), *self.A.shape)
        read = (matrices @ self.R).square().sum(dim=1)
        return read / read.sum(dim=1, keepdim=True).clamp(min=1e-30)

    def covered(self, span: Tensor, feature: int) -> float:
        """Share of the trace of a feature's own Fisher that orthonormal directions [k, neurons·n] cover.

        It is that of an example with this feature alone, mean over both signs.
        """
        read = span.view(len(span), *self.A.shape) @ self.R[:, feature]
        totals = [0.0, 0.0]
        for sign in (1.0, -1.0):
            masked = (self.R.T @ self.B) * (sign * (self.A @ self.R[:, feature]) > 0)
            totals[0] += float((read @ masked.T).square().sum())
            totals[1] += float(masked.square().sum())
        return totals[0] / totals[1]

    def examples(self, m: int, seed: int, most: int = SPECTRAL) -> Examples:
        """Examples, each with at most so many rows, the leading ones of its Fisher."""
        x = sparse_features(m, self.A.shape[1], self.density, seed, signed=True)
        hidden = x @ self.R.T @ self.A.T
        kept = (hidden > 0).any(dim=1) & (x != 0).any(dim=1)
        x, hidden = x[kept], hidden[kept]
        read_out = self.R.T @ self.B  # J of W_in is (read_out · on) ⊗ Rx
        rows, ranks = [], []
        for each, on in zip(x @ self.R.T, hidden > 0, strict=True):
            masked = read_out * on
            values, vectors = torch.linalg.eigh((masked.T @ masked).double())
            leading = (vectors * values.clamp(min=0).sqrt())[:, -most:].float()
            rows.append(torch.einsum("ak,b->kab", leading, each).flatten(1))
            ranks.append(leading.shape[1])
        y = self.output(x, self.A)
        gradients = torch.einsum("ma,mb->mab", (y @ read_out) * (hidden > 0), x @ self.R.T).flatten(1)
        return Examples(x, ArrayRows(torch.cat(rows), np.array(ranks)), ArrayRows(gradients), ArrayRows(hidden.relu()))
