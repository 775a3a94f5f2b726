"""Where components start."""

from __future__ import annotations

import numpy as np
import torch

from npeff.decompose.blocks import leading_directions
from npeff.store.rows import RowSource

# k-means++ looks at this many examples per component, not at all: it would cost a pass over the rows per component.
SAMPLE = 4


def start_components(source: RowSource, components: int, init: str, seed: int, signed: bool = False) -> torch.Tensor:
    """Unit leading directions of `components` examples, float32 [C, p]; every rank finds the same ones.

    `kmeans++` draws them one after another, an example with probability proportional to its squared distance from
    those drawn before; `random` draws them alike. The distance is that of the matrices hhᵀ, in which h and −h are the
    same, or of the vectors themselves if `signed`. Memory: 4C rows and their (4C)² products.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = np.asarray(source.ranks)
    filled = np.flatnonzero(ranks > 0)
    order = filled[torch.randperm(len(filled), generator=generator).numpy()]
    wanted = components if init == "random" else SAMPLE * components
    found = torch.empty(0, source.dim)
    while len(found) < components and len(order):  # zero PEFs have no direction; look further
        some, order = np.sort(order[:wanted]), order[wanted:]
        found = torch.cat([found, *(leading_directions(source.read(i, i + 1), ranks[i : i + 1]) for i in some)])
    if init == "random":
        return found[torch.randperm(len(found), generator=generator)[:components]]
    return found[spread_out(found, components, generator, signed)]


def spread_out(vectors: torch.Tensor, count: int, generator: torch.Generator, signed: bool = False) -> torch.Tensor:
    """Indices of `count` of the unit `vectors` [n, p], drawn as k-means++ does."""
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
    """Directions of up to `count` badly explained examples that differ from each other, float32 [n, p].

    `losses` holds (loss, example) pairs.
    """
    ranks = np.asarray(source.ranks)
    found = torch.empty(0, source.dim)
    for _, example in sorted(losses, reverse=True):
        direction = leading_directions(source.read(example, example + 1), ranks[example : example + 1])
        if len(direction) and not bool(((found @ direction[0]).square() > 0.9).any()):
            found = torch.cat([found, direction])
        if len(found) == count:
            break
    return found
