"""How alike two decompositions of the same examples are: matched components, splits, mean best similarity.

Similarities of components are absolute cosines, of their coefficients over examples or of the components themselves
(the pseudo-Fisher vectors), as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from npeff.utils.types import Array

NOBODY = -1
"""Parent of a component without one."""
_ROUNDING = 1e-5
"""Cosines of float32 coefficients that are zero but for rounding are below this."""
_ROWS = 8192


def coefficient_similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """|cos| between the columns of `first` [m, C] and `second` [m, D], [C, D]; a zero column is like none."""
    if len(first) != len(second):
        raise ValueError(f"coefficients of {len(first)} and of {len(second)} examples")
    return column_similarity(zip(torch.split(first, _ROWS), torch.split(second, _ROWS), strict=True))


def column_similarity(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """|cos| between the columns of two matrices that come in chunks of rows.

    Args:
        parts: Chunks of both, ([n, C], [n, D]) each.

    Returns:
        Similarities, [C, D]; a zero column is like none.
    """
    products: torch.Tensor | float = 0.0
    squares: list[torch.Tensor | float] = [0.0, 0.0]
    for a, b in parts:
        products += (a.T @ b).double()
        for side, chunk in enumerate((a, b)):
            squares[side] += chunk.square().sum(dim=0, dtype=torch.float64)
    left, right = (torch.as_tensor(value).sqrt() for value in squares)
    norms = left[:, None] * right
    return torch.where(norms > 0, torch.as_tensor(products).abs() / norms.clamp(min=1e-300), 0.0).clamp(max=1.0)


def component_similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """|cos| between the rows of `first` [C, p] and `second` [D, p], [C, D]."""
    return column_similarity([(first.double().T, second.double().T)])


def match(similarity: torch.Tensor) -> tuple[Array, Array]:
    """The one-to-one matching of rows and columns with the largest sum: row numbers and their columns."""
    rows, columns = linear_sum_assignment(similarity.numpy(), maximize=True)
    return rows, columns


def matched_similarity(similarity: torch.Tensor) -> float:
    """Mean similarity of matched pairs; 1 for the same decomposition in whatever order."""
    rows, columns = match(similarity)
    return float(similarity.numpy()[rows, columns].mean()) if len(rows) else 0.0


def mean_best_similarity(similarity: torch.Tensor) -> float:
    """Mean over the components of both of the largest similarity with one of the other: is each found again?"""
    if not similarity.numel():
        return 0.0
    best = [similarity.max(dim=1).values, similarity.max(dim=0).values]
    return float(torch.cat(best).mean())


def parents(similarity: torch.Tensor) -> Array:
    """For each of D fine components the most similar of C coarse ones, [D], from their similarities [C, D].

    One that is like none of them has the parent NOBODY: a dead one, or the next singular vector.
    """
    best, parent = similarity.max(dim=0)
    return torch.where(best > _ROUNDING, parent, NOBODY).numpy()


def preserved(parent: Array, coarse: Sequence[str | None], fine: Sequence[str | None]) -> tuple[int, int]:
    """How many splits of tuned coarse components are tuned to the same class, and how many such splits there are.

    `parent` [D] is from `parents`; `coarse` [C] and `fine` [D] say to which class a component is tuned, or None.
    """
    known = [(coarse[i], now) for i, now in zip(parent.tolist(), fine, strict=True) if i != NOBODY]
    splits = [(before, now) for before, now in known if before is not None]
    return sum(before == now for before, now in splits), len(splits)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
