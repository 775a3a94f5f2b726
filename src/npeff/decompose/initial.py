"""Where components start."""

from __future__ import annotations

import numpy as np
import torch

from npeff.decompose.blocks import leading_directions
from npeff.store.rows import RowSource

# k-means++ looks at this many examples per component, not at all: it would cost a pass over the rows per component.
SAMPLE = 4


def start_components(source: RowSource, components: int, init: str, seed: int, signed: bool = False) -> torch.Tensor:
    """Leading directions of some examples; every rank finds the same ones. Memory: 4C rows, their (4C)² products.

    Args:
        source: The rows.
        components: Number C of components.
        init: `kmeans++` draws examples one after another, each with probability proportional to its squared distance
            from those drawn before; `random` draws all with the same probability.
        seed: Seed of the draws.
        signed: Whether the distance is that of the vectors, or that of the matrices hhᵀ, in which h and −h are equal.

    Returns:
        Unit vectors, float32 [C, p].
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = np.asarray(source.ranks)
    filled = np.flatnonzero(ranks > 0)
    order = filled[torch.randperm(len(filled), generator=generator).numpy()]
    wanted = components if init == "random" else SAMPLE * components
    directions = torch.empty(0, source.dim)
    while len(directions) < components and len(order):  # zero PEFs have no direction; look further
        some, order = np.sort(order[:wanted]), order[wanted:]
        new = (leading_directions(source.read(i, i + 1), ranks[i : i + 1]) for i in some)
        directions = torch.cat([directions, *new])
    if init == "random":
        return directions[torch.randperm(len(directions), generator=generator)[:components]]
    return directions[spread_out(directions, components, generator, signed)]


def spread_out(vectors: torch.Tensor, count: int, generator: torch.Generator, signed: bool = False) -> torch.Tensor:
    """Draw vectors as k-means++ does.

    Args:
        vectors: Unit vectors, [n, p].
        count: How many to draw.
        generator: Source of randomness.
        signed: As for `start_components`.

    Returns:
        Indices of the drawn ones, int64 [count].
    """
    similarity = vectors @ vectors.T
    distance = (1 - (similarity if signed else similarity.square())).clamp_(min=0)
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    nearest = distance[chosen[0]].double()
    while len(chosen) < count:
        nearest[chosen] = 0
        if float(nearest.sum()) == 0:  # only copies of chosen ones are left
            nearest = torch.ones_like(nearest)
            nearest[chosen] = 0
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
        nearest = torch.minimum(nearest, distance[chosen[-1]].double())
    return torch.tensor(chosen)


def replacements(source: RowSource, losses: list[tuple[float, int]], count: int) -> torch.Tensor:
    """Directions of badly explained examples that differ from each other.

    Args:
        source: The rows.
        losses: Pairs (loss, example).
        count: Most directions.

    Returns:
        Unit vectors, float32 [n, p].
    """
    ranks = np.asarray(source.ranks)
    directions = torch.empty(0, source.dim)
    for _, example in sorted(losses, reverse=True):
        direction = leading_directions(source.read(example, example + 1), ranks[example : example + 1])
        if len(direction) and not bool(((directions @ direction[0]).square() > 0.9).any()):
            directions = torch.cat([directions, direction])
        if len(directions) == count:
            break
    return directions
