"""What needs the coefficient matrix as a whole, in chunks so that memory stays bounded."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import eigh

_ROWS = 8192
_BLOCK = 2048


def strongest_correlations(coefficients: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each component the others with the largest |Pearson correlation| over examples.

    Takes one product m × C × C, and memory for a chunk of rows and 2,048 × C.

    Args:
        coefficients: [m, C].
        count: How many others to give for each.

    Returns:
        Numbers of components and correlations, both [C, min(count, C − 1)], strongest first. A component that is the
        same in all examples correlates with nothing (0).
    """
    m, C = coefficients.shape
    count = min(count, C - 1)
    if m == 0 or count < 1:
        return torch.zeros(C, 0, dtype=torch.int64), torch.zeros(C, 0)
    mean = (
        sum((chunk.sum(dim=0, dtype=torch.float64) for chunk in torch.split(coefficients, _ROWS)), torch.zeros(C)) / m
    )
    mean32 = mean.float()
    squares = torch.zeros(C, dtype=torch.float64)
    for chunk in torch.split(coefficients, _ROWS):
        squares += (chunk - mean32).square_().sum(dim=0, dtype=torch.float64)
    # below this a column only differs from its mean by rounding
    flat = squares <= m * (1e-6 * mean) ** 2
    scale = torch.where(flat, 0.0, squares.clamp(min=1e-300).rsqrt()).float()
    numbers, values = [], []
    for start in range(0, C, _BLOCK):
        stop = min(start + _BLOCK, C)
        products = torch.zeros(stop - start, C)
        for chunk in torch.split(coefficients, _ROWS):
            scaled = (chunk - mean32).mul_(scale)
            products.addmm_(scaled[:, start:stop].T, scaled)
        products.clamp_(-1, 1)
        size = products.abs()
        size[torch.arange(stop - start), torch.arange(start, stop)] = -1  # not itself
        best = size.topk(count, dim=1).indices
        numbers.append(best)
        values.append(products.gather(1, best))
    return torch.cat(numbers), torch.cat(values)


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
    products = torch.zeros(C, C)
    for chunk in torch.split(coefficients, _ROWS):
        products.addmm_(chunk.T, chunk)
    norms = products.diagonal().sqrt().clamp(min=1e-30)
    cosines = (products / norms / norms[:, None]).double()
    centred = cosines - cosines.mean(dim=0) - cosines.mean(dim=1, keepdim=True) + cosines.mean()
    values, vectors = eigh(centred.numpy(), subset_by_index=[C - 2, C - 1])
    places = torch.from_numpy(vectors[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0)))
    largest = places.gather(0, places.abs().argmax(dim=0, keepdim=True))
    return (places * torch.where(largest < 0, -1.0, 1.0)).float()
