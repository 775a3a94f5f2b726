"""Where in the model a vector of parameter space lives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from npeff.models.select import CapturedModule, Selection
from npeff.perturb.lift import Parameters, norm

RANKS = (1, 4, 16)
"""Ranks for which the share of a matrix's energy is told."""
_SEED = 0


@dataclass(frozen=True)
class Place:
    """A module's part of a vector."""

    module: str
    layer: int
    """Number of the block; -1 outside of any."""
    kind: str
    """What the module is in its block, as mlp.down_proj."""
    share: float
    """Its part of the vector's squared length."""
    ranks: dict[int, float]
    """Rank → share of the matrix's squared length that its leading singular vectors keep."""


def split_name(name: str) -> tuple[int, str]:
    """(layer, kind) of a module: model.layers.3.mlp.up_proj is (3, mlp.up_proj)."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    if match is None:
        return -1, name
    rest = name[match.end() - 1 :]
    return int(match[1]), rest or name


def find_places(vector: Parameters) -> list[Place]:
    """The modules of a vector, in the model's order."""
    whole = norm(vector) ** 2 or 1.0
    places = []
    for name, matrix in vector.items():
        layer, kind = split_name(name)
        energy = float(matrix.double().square().sum())
        places.append(Place(name, layer, kind, energy / whole, _rank_shares(matrix, energy)))
    return places


def _rank_shares(matrix: torch.Tensor, energy: float) -> dict[int, float]:
    """Shares that the leading singular values keep; by a randomised SVD, which is exact to a few digits here."""
    smaller = min(matrix.shape)
    if energy == 0:
        return dict.fromkeys(RANKS, 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        values = torch.svd_lowrank(matrix, q=min(smaller, RANKS[-1] + 16), niter=3)[1].double().square()
    return {rank: min(1.0, float(values[:rank].sum()) / energy) for rank in RANKS}


def by_layer_and_kind(places: list[Place]) -> tuple[list[int], list[str], list[list[float]]]:
    """Layers, kinds, and the share of each pair, [layers][kinds]."""
    layers = sorted({place.layer for place in places})
    kinds = list(dict.fromkeys(place.kind for place in places))
    shares = [[0.0] * len(kinds) for _ in layers]
    for place in places:
        shares[layers.index(place.layer)][kinds.index(place.kind)] += place.share
    return layers, kinds, shares


def largest_entries(selection: Selection, vector: Parameters, count: int = 20) -> list[dict[str, Any]]:
    """The largest entries of a vector by size: parameter name, index in the parameter's own shape, value."""
    found: list[tuple[float, CapturedModule, int]] = []
    for module in selection.modules:
        flat = vector[module.name].reshape(-1)
        sizes, places = flat.abs().topk(min(count, flat.numel()))
        found += [(float(flat[int(place)]), module, int(place)) for place in places[: len(sizes)]]
    found.sort(key=lambda entry: -abs(entry[0]))
    return [
        {"parameter": name, "index": index, "value": value}
        for value, module, place in found[:count]
        for name, index in [_entry_name(module, place)]
    ]


def _entry_name(module: CapturedModule, place: int) -> tuple[str, list[int]]:
    """Parameter and index of an entry of the module's flattened matrix."""
    row, column = divmod(place, module.shape[1])
    if module.bias and column == module.shape[1] - 1:
        return f"{module.name}.bias", [row]
    return f"{module.name}.weight", [column, row] if module.transposed else [row, column]


def low_rank(matrix: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """B [d_out, r] and A [r, d_in] of the smallest rank r whose product keeps `share` of the energy, and how much."""
    U, S, Vh = torch.linalg.svd(matrix.float(), full_matrices=False)
    energy = S.double().square()
    kept = energy.cumsum(0) / energy.sum().clamp_min(1e-300)
    rank = min(int((kept < share).sum()) + 1, len(S))
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vh[:rank], float(kept[rank - 1])
