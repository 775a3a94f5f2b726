"""Components that belong together: a hierarchy of groups, made of coefficients alone.

One mechanism may become several components: two directions that are used together, or one direction that some examples
use under one number and some under another. In both cases the same examples respond to them. The response of example i
to component j is the inner product of its reconstruction with the component, Σₗ Wᵢₗ ⟨component l, component j⟩; for
methods that do not add components up it is the coefficient.
"""

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from npeff.analyse import matching
from npeff.analyse.records import Group
from npeff.decompose.base import Decomposition

_SAMPLE = 8192
"""Examples that chance is judged by, at most: with fewer, it gives larger correlations."""
_SHUFFLES = 20
"""How often responses are shuffled: one in so many sets of unrelated components would have a group by chance."""


def groups(decomposition: Decomposition) -> list[Group]:
    """The groups of a decomposition's components, by average linkage of the correlations of their responses.

    A group counts if its correlation is above the largest between any two components whose responses were shuffled
    over the examples. No label, prediction or number of groups goes in.

    Args:
        decomposition: The decomposition of m examples into C components.

    Returns:
        All groups, the closest first; each is a part of its parent, if it has one.
    """
    respond = responses(decomposition)
    C = respond.shape[1]
    if C < 2 or len(respond) < 2:
        return []
    distances = 1.0 - matching.correlations(respond).double().numpy()
    tree = linkage(squareform((distances + distances.T).clip(0) / 2 * (1 - np.eye(C)), checks=False), "average")
    least = chance_correlation(respond)
    members: list[list[int]] = [[j] for j in range(C)]
    found: list[Group] = []
    parents: dict[int, int] = {}
    for number, (first, second, distance, _) in enumerate(tree):
        members.append(sorted(members[int(first)] + members[int(second)]))
        if 1.0 - distance > least:  # distances never fall, so neither do those of what a group is made of
            parents |= {int(part) - C: number for part in (first, second)}
            found.append(Group(number, members[-1], round(1.0 - float(distance), 6), None))
    return [Group(each.number, each.members, each.correlation, parents.get(each.number)) for each in found]


def responses(decomposition: Decomposition) -> torch.Tensor:
    """How strongly every example responds to every component, [m, C]."""
    overlap = decomposition.overlap()
    coefficients = decomposition.coefficients
    return (coefficients if overlap is None else coefficients @ overlap.to(coefficients)).abs()


def chance_correlation(respond: torch.Tensor) -> float:
    """The largest correlation between two columns of `respond` [m, C] after each was shuffled over the examples."""
    rng = np.random.default_rng(0)
    some = respond[torch.from_numpy(np.sort(rng.permutation(len(respond))[:_SAMPLE]))].numpy()
    shuffled = (torch.from_numpy(rng.permuted(some, axis=0)) for _ in range(_SHUFFLES))
    return max(float(matching.correlations(each).fill_diagonal_(-1.0).max()) for each in shuffled)


def group_scores(scores: torch.Tensor, members: list[int]) -> torch.Tensor:
    """What examples of a group are ranked by: the sum over its `members` of the sizes of `scores` [m, C]; [m]."""
    return scores[:, members].abs().sum(dim=1)


def group_mix(decomposition: Decomposition, members: list[int]) -> torch.Tensor:
    """The direction of a group as a mixture of components.

    It is the leading eigenvector of the members' part of the mean Fisher, Σⱼ energyⱼ hⱼhⱼᵀ: the direction that the
    examples of the group are most sensitive to, on average.

    Args:
        decomposition: A decomposition of C components [C, p].
        members: Numbers of some of them.

    Returns:
        Weights of all components, zero for others than members, float64 [C]; a mixture of several has length 1.
    """
    mix = torch.zeros(len(decomposition.components), dtype=torch.float64)
    if len(members) == 1:
        mix[members] = 1.0
        return mix
    H = decomposition.components[members].double()
    sizes = decomposition.energy[members].to(H).sqrt()
    # Hᵀ diag(s²) H has the leading eigenvector Hᵀ diag(s) v, with v that of the small matrix diag(s) HHᵀ diag(s)
    small = sizes[:, None] * (H @ H.T) * sizes
    leading = sizes * torch.linalg.eigh(small)[1][:, -1]
    mix[members] = leading / (leading @ H).norm().clamp(min=1e-300) * torch.sign(leading.sum())
    return mix
