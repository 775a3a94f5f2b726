"""Slow and obvious versions of what the package computes, and small data to compare on."""

from __future__ import annotations

import numpy as np
import torch

from npeff.store.rows import ArrayRows


def ragged(seed: int = 0, examples: int = 20, dim: int = 12, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> ArrayRows:
    """Random rows, examples of different ranks."""
    rng = np.random.default_rng(seed)
    counts = rng.choice(ranks, size=examples)
    rows = torch.from_numpy(rng.standard_normal((int(counts.sum()), dim)).astype(np.float32))
    return ArrayRows(rows, counts)


def planted(
    seed: int, examples: int = 300, dim: int = 64, factors: int = 8, each: int = 2, noise: float = 0.02
) -> tuple[torch.Tensor, ArrayRows]:
    """Unit factors [factors, dim], and examples that are sums of `each` of them."""
    generator = torch.Generator().manual_seed(seed)
    U = torch.nn.functional.normalize(torch.randn(factors, dim, generator=generator), dim=1)
    which = torch.stack([torch.randperm(factors, generator=generator)[:each] for _ in range(examples)])
    rows = (0.2 + torch.rand(examples, each, generator=generator)).sqrt()[..., None] * U[which]
    rows = rows + noise * torch.randn(rows.shape, generator=generator) * rows.norm(dim=2, keepdim=True) / dim**0.5
    return U, ArrayRows(rows.reshape(-1, dim), [each] * examples)


def pefs(source: ArrayRows) -> np.ndarray:
    """GᵢᵀGᵢ of every example at unit Frobenius norm, float64 [m, p, p]."""
    matrices = []
    for i in range(len(source.ranks)):
        G = source.read(i, i + 1).double().numpy()
        F = G.T @ G
        norm = np.linalg.norm(F)
        matrices.append(F / norm if norm > 0 else F)
    return np.array(matrices)


def losses(F: np.ndarray, W: np.ndarray, H: np.ndarray) -> np.ndarray:
    """‖Fᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² from dense matrices, [m]."""
    return ((F - np.einsum("ij,jp,jq->ipq", W, H, H)) ** 2).sum(axis=(1, 2))
