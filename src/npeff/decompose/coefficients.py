"""The coefficient step: non-negative least squares for many examples that share one C × C system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GROUP = 8
"""Coefficients that are updated one by one after a matrix product has brought in all the others."""
SMALL = 2**27
"""Multiplications below which a second thread costs more than it brings."""


def fit_coefficients(
    W: torch.Tensor, N: torch.Tensor, Q: torch.Tensor, max_sweeps: int, tolerance: float = 0.0
) -> torch.Tensor:
    """Lower Σᵢ wᵢᵀQwᵢ − 2 wᵢᵀnᵢ over W ≥ 0 by exact minimisation over one coefficient after another.

    This is hierarchical alternating least squares (HALS). A coefficient at zero may leave it again.

    Args:
        W: Coefficients to start from, [C, n]; changed in place.
        N: N_ji = ‖Gᵢhⱼ‖², [C, n].
        Q: (HHᵀ)∘(HHᵀ), [C, C].
        max_sweeps: Most sweeps over all coefficients.
        tolerance: Stop when a sweep changes less than this share of what the first one did.

    Returns:
        W.
    """
    first = 0.0
    diagonal = Q.diagonal().tolist()
    change, zero = torch.zeros_like(W[:GROUP]), torch.zeros_like(W[0])
    with _one_thread_if(len(W) * N.numel() < SMALL):
        for sweep in range(max_sweeps):
            moved = 0.0
            for start in range(0, len(W), GROUP):
                group = slice(start, start + GROUP)
                slopes = torch.addmm(N[group], Q[group], W, alpha=-1)
                _update_group(W[group], slopes, Q[group, group], diagonal[group], change, zero)
                moved += float(change.square().sum()) if tolerance else 0.0
            if sweep == 0:
                first = moved
            elif moved < tolerance**2 * first:
                break
    return W


def _update_group(
    W: torch.Tensor,
    slopes: torch.Tensor,
    Q: torch.Tensor,
    diagonal: list[float],
    change: torch.Tensor,
    zero: torch.Tensor,
) -> None:
    """Update the rows of `W` [g, n] in turn, with `slopes` [g, n] = N − QW before; writes the change to `change`."""
    # On the CPU these are NumPy views: its call overhead is a third of torch's, and most of what this costs.
    on_cpu = W.device.type == "cpu"
    xp: Any = np if on_cpu else torch
    arrays: Any = (W, slopes, Q, change, zero)
    w, r, q, d, none = (array.numpy() for array in arrays) if on_cpu else arrays
    for j, size in enumerate(diagonal):
        if size <= 0.0:  # a zero component: any coefficient is as good, zero says so
            w[j] = 0.0
            d[j] = 0.0
            continue
        new = r[j]
        if j:
            new -= q[j, :j] @ d[:j]
        new *= 1.0 / size
        new += w[j]
        xp.maximum(new, none, out=new)
        xp.subtract(new, w[j], out=d[j])
        w[j] = new


@contextmanager
def _one_thread_if(small: bool) -> Iterator[None]:
    threads = torch.get_num_threads()
    if not small or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def example_losses(W: torch.Tensor, N: torch.Tensor, Q: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """‖GᵢᵀGᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² of each example, [n]; `norms` [n] are ‖GᵢᵀGᵢ‖²."""
    return norms + (W * (Q @ W - 2 * N)).sum(dim=0)
