"""Where in the model a vector of parameter space lives."""

import re
from collections.abc import Sequence
from dataclasses import field

import torch

from npeff.models.select import CapturedModule, Selection
from npeff.perturb.lift import Parameters, norm
from npeff.utils import Record

RANKS = (1, 4, 16)
"""Ranks for which the share of a matrix's energy is computed."""
_SEED = 0


class Place(Record):
    """A module's part of a vector."""

    module: str
    """Name of the module."""
    layer: int
    """Number of the block; -1 outside of any."""
    kind: str
    """What the module is in its block, as mlp.down_proj."""
    share: float
    """Its part of the vector's squared length."""
    ranks: dict[str, float] = field(default_factory=dict)
    """Rank → share of the matrix's squared length that its leading singular vectors keep, if that was asked for."""


class Entry(Record):
    """An entry of a vector."""

    parameter: str
    """Name of the parameter."""
    index: list[int]
    """Where it is in the parameter's own shape."""
    value: float
    """Its value, for a vector of length 1."""


def split_name(name: str) -> tuple[int, str]:
    """(layer, kind) of a module: model.layers.3.mlp.up_proj is (3, mlp.up_proj)."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    if match is None:
        return -1, name
    return int(match[1]), name[match.end() - 1 :] or name


def find_places(vector: Parameters, ranks: bool = False) -> list[Place]:
    """The modules of a vector, in the model's order.

    Args:
        vector: Module name → [d_out, columns].
        ranks: Also compute what low ranks keep, which takes an SVD of every matrix.

    Returns:
        One place for each module; their shares sum to 1.
    """
    whole = norm(vector) ** 2 or 1.0
    places = []
    for name, matrix in vector.items():
        energy = float(matrix.double().square().sum())
        kept = _rank_shares(matrix, energy) if ranks else {}
        places.append(Place(name, *split_name(name), energy / whole, kept))
    return places


def _rank_shares(matrix: torch.Tensor, energy: float) -> dict[str, float]:
    """Shares that the leading singular values keep; by a randomised SVD, which is exact to a few digits here."""
    if energy == 0:
        return dict.fromkeys(map(str, RANKS), 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        values = torch.svd_lowrank(matrix, q=min(*matrix.shape, RANKS[-1] + 16), niter=3)[1].double().square()
    return {str(rank): min(1.0, float(values[:rank].sum()) / energy) for rank in RANKS}


def by_layer_and_kind(places: Sequence[Place]) -> tuple[list[int], list[str], list[list[float]]]:
    """Sum the shares of places by layer and kind; the experts of a layer are put together.

    Args:
        places: Parts of one vector.

    Returns:
        Layers, kinds, and the share of each pair, [layers][kinds].
    """
    layers = sorted({place.layer for place in places})
    kind_of = [re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place.kind) for place in places]
    kinds = list(dict.fromkeys(kind_of))
    shares = [[0.0] * len(kinds) for _ in layers]
    for place, kind in zip(places, kind_of, strict=True):
        shares[layers.index(place.layer)][kinds.index(kind)] += place.share
    return layers, kinds, shares


def largest_entries(selection: Selection, vector: Parameters, count: int = 20) -> list[Entry]:
    """The largest entries of a vector.

    Args:
        selection: The parameters that the vector is about.
        vector: Module name → [d_out, columns].
        count: How many entries to give.

    Returns:
        Entries by their size, largest first.
    """
    candidates: list[tuple[float, CapturedModule, int]] = []
    for module in selection.modules:
        flat = vector[module.name].reshape(-1)
        places = flat.abs().topk(min(count, flat.numel())).indices.tolist()
        candidates += [(float(flat[place]), module, place) for place in places]
    candidates.sort(key=lambda candidate: -abs(candidate[0]))
    return [Entry(*_entry_name(module, place), value) for value, module, place in candidates[:count]]


def _entry_name(module: CapturedModule, place: int) -> tuple[str, list[int]]:
    """Parameter and index of an entry of the module's flattened matrix."""
    row, column = divmod(place, module.shape[1])
    names, expert = list(module.parameters), [] if module.expert is None else [module.expert]
    if module.bias and column == module.shape[1] - 1:
        return names[-1], [*expert, row]
    return names[0], [*expert, *([column, row] if module.transposed else [row, column])]


def low_rank(matrix: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A product BA of the smallest rank r that keeps a share of a matrix's energy.

    Args:
        matrix: [d_out, d_in].
        share: Share of the squared length to keep.

    Returns:
        B [d_out, r], A [r, d_in], and the share that they keep.
    """
    U, S, Vh = torch.linalg.svd(matrix.float(), full_matrices=False)
    energy = S.double().square()
    kept = energy.cumsum(0) / energy.sum().clamp_min(1e-300)
    rank = min(int((kept < share).sum()) + 1, len(S))
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vh[:rank], float(kept[rank - 1])
