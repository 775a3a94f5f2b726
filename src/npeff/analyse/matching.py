"""How alike components are: those of two decompositions of the same examples, and those of one.

Similarities are absolute cosines, of coefficients over examples or of the components themselves (the pseudo-Fisher
vectors), as in the paper. Matrices are read in chunks so that memory stays bounded.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment

from npeff.utils import Array

NOBODY = -1
"""Parent of a component without one."""
_ROUNDING = 1e-5
"""Cosines of float32 coefficients that are zero but for rounding are below this."""
_ROWS = 8192
_COLUMNS = 2048


def _cosines(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Cosines between the columns of two matrices that come in chunks of rows, ([n, C], [n, D]) each; [C, D].

    The cosine with a column of zeros is 0.
    """
    sums: tuple[torch.Tensor, ...] = (torch.zeros((), dtype=torch.float64),) * 3
    for a, b in parts:
        squares = (chunk.square().sum(dim=0, dtype=torch.float64) for chunk in (a, b))
        sums = tuple(total + new for total, new in zip(sums, ((a.T @ b).double(), *squares), strict=True))
    products, left, right = sums
    norms = torch.outer(left.sqrt(), right.sqrt())
    return torch.where(norms > 0, products / norms.clamp(min=1e-300), 0.0).clamp(-1, 1)


# --- two decompositions -------------------------------------------------------------------------------------------


def coefficient_similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """|cos| between the columns of `first` [m, C] and `second` [m, D], [C, D]; a zero column is like none."""
    if len(first) != len(second):
        raise ValueError(f"coefficients of {len(first)} and of {len(second)} examples")
    return _cosines(zip(torch.split(first, _ROWS), torch.split(second, _ROWS), strict=True)).abs()


def component_similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """|cos| between the rows of `first` [C, p] and `second` [D, p], [C, D]."""
    parts = zip(torch.split(first, _COLUMNS, dim=1), torch.split(second, _COLUMNS, dim=1), strict=True)
    return _cosines((a.T.double(), b.T.double()) for a, b in parts).abs()


def match(similarity: torch.Tensor) -> tuple[Array, Array]:
    """The one-to-one matching of rows and columns with the largest sum: row numbers and columns, most similar first."""
    rows, columns = linear_sum_assignment(similarity.numpy(), maximize=True)
    order = (-similarity.numpy()[rows, columns]).argsort(kind="stable")
    return rows[order], columns[order]


def matched_similarity(similarity: torch.Tensor) -> float:
    """Mean similarity of matched pairs; 1 for the same decomposition in whatever order."""
    rows, columns = match(similarity)
    return float(similarity.numpy()[rows, columns].mean()) if len(rows) else 0.0


def mean_best_similarity(similarity: torch.Tensor) -> float:
    """Mean over the components of both of the largest similarity with one of the other: is each found again?"""
    if not similarity.numel():
        return 0.0
    return float(torch.cat([similarity.amax(dim=1), similarity.amax(dim=0)]).mean())


def parents(similarity: torch.Tensor) -> list[int]:
    """For each of D fine components the most similar of C coarse ones, [D], from their similarities [C, D].

    One that is like none of them has the parent NOBODY: a dead one, or the next singular vector.
    """
    best, parent = similarity.max(dim=0)
    return torch.where(best > _ROUNDING, parent, NOBODY).tolist()


def preserved(parent: Sequence[int], coarse: Sequence[str | None], fine: Sequence[str | None]) -> tuple[int, int]:
    """How many splits of tuned coarse components are tuned to the same class, and how many such splits there are.

    `parent` [D] is from `parents`; `coarse` [C] and `fine` [D] say to which class a component is tuned, or None.
    """
    known = [(coarse[i], now) for i, now in zip(parent, fine, strict=True) if i != NOBODY]
    splits = [(before, now) for before, now in known if before is not None]
    return sum(before == now for before, now in splits), len(splits)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


# --- one decomposition --------------------------------------------------------------------------------------------


def correlations(coefficients: torch.Tensor) -> torch.Tensor:
    """Pearson correlations over examples between the columns of `coefficients` [m, C], [C, C].

    A column that is the same in all examples correlates with nothing (0). Memory: a chunk of rows, and C × C.
    """
    deviation, mean = torch.std_mean(coefficients, dim=0, correction=0)
    varies = deviation > 1e-6 * mean.abs()  # else a column only differs from its mean by rounding
    centred = ((chunk - mean) * varies for chunk in torch.split(coefficients, _ROWS))
    return _cosines((chunk, chunk) for chunk in centred).float()


def strongest_correlations(coefficients: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each component the others with the largest |Pearson correlation| over examples.

    Args:
        coefficients: [m, C].
        count: How many others to give for each.

    Returns:
        Numbers of components and correlations, both [C, min(count, C − 1)], strongest first.
    """
    m, C = coefficients.shape
    count = min(count, C - 1)
    if m == 0 or count < 1:
        return torch.zeros(C, 0, dtype=torch.int64), torch.zeros(C, 0)
    values = correlations(coefficients)
    best = values.abs().fill_diagonal_(-1).topk(count, dim=1).indices
    return best, values.gather(1, best)


def embed(coefficients: torch.Tensor) -> torch.Tensor:
    """A place in the plane for each component, [C, 2]: near to each other if their coefficients are alike.

    Classical scaling: the two leading eigenvectors of the centred matrix of cosines between coefficients. The largest
    entry of each coordinate is positive, so that the same coefficients give the same map.

    Args:
        coefficients: [m, C].

    Returns:
        Places, [C, 2].
    """
    C = coefficients.shape[1]
    if C < 3:
        return torch.eye(2).repeat(2, 1)[:C]
    cosines = _cosines((chunk, chunk) for chunk in torch.split(coefficients, _ROWS))
    centred = cosines - cosines.mean(dim=0) - cosines.mean(dim=1, keepdim=True) + cosines.mean()
    values, vectors = eigh(centred.numpy(), subset_by_index=[C - 2, C - 1])
    places = torch.from_numpy(vectors[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0)))
    largest = places.gather(0, places.abs().argmax(dim=0, keepdim=True))
    return (places * torch.where(largest < 0, -1.0, 1.0)).float()
