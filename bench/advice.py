"""How many examples must use a mechanism for NPEFF to find it: planted directions that more or fewer examples use.

`python -m bench.advice` draws docs/images/groundtruth-advice.svg from what the benchmark has measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import Npeff
from npeff.store.rows import ArrayRows
from npeff.utils.report import draw_figure

MECHANISMS, DIM = 32, 512
FREQUENCIES = np.geomspace(0.0025, 0.25, MECHANISMS)
"""Share of the examples that use each mechanism."""
OWN = 1.0
"""Squared length of what each example has for itself, in units of a mechanism's mean."""
EXAMPLES, COMPONENTS, SEEDS = (500, 1000, 2000), (16, 32, 64), (0, 1, 2)
FOUND = 0.9
BINS = (2, 4, 8, 16, 32, 64, 512)
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "groundtruth-advice"


def planted(examples: int, seed: int) -> tuple[torch.Tensor, ArrayRows, np.ndarray]:
    """Directions [n, p], one row an example, and how many examples use each direction [n]."""
    rng = np.random.default_rng(seed)
    U = rng.standard_normal((MECHANISMS, DIM))
    U /= np.linalg.norm(U, axis=1, keepdims=True)
    uses = rng.random((examples, MECHANISMS)) < FREQUENCIES
    sizes = rng.choice([-1.0, 1.0], uses.shape) * np.sqrt(0.5 + rng.random(uses.shape)) * uses
    rows = sizes @ U + np.sqrt(OWN) * rng.standard_normal((examples, DIM)) / np.sqrt(DIM)
    return torch.from_numpy(U).float(), ArrayRows(torch.from_numpy(rows).float()), uses.sum(axis=0)


def measure() -> dict[str, list[list[float]]]:
    """For every number of components, pairs (examples that use a mechanism, largest cosine with it)."""
    pairs: dict[str, list[list[float]]] = {str(count): [] for count in COMPONENTS}
    for examples, seed in itertools.product(EXAMPLES, SEEDS):
        U, rows, users = planted(examples, seed)
        for count in COMPONENTS:
            fitted = Npeff(FitConfig(components=count, seed=seed)).fit(rows)
            cosines = (U @ fitted.components.T).abs().amax(dim=1)
            pairs[str(count)] += [[float(n), float(cosine)] for n, cosine in zip(users, cosines, strict=True)]
    return pairs


def found_share(pairs: Sequence[Sequence[float]], low: int, high: int) -> float:
    """Share of the mechanisms with low ≤ users < high that are found; NaN if there are none."""
    inside = [cosine >= FOUND for users, cosine in pairs if low <= users < high]
    return float(np.mean(inside)) if inside else float("nan")


def users_needed(pairs: Sequence[Sequence[float]], share: float = 0.85) -> float:
    """Fewest users from which on, in every bin, this share of the mechanisms is found; infinite if there are none."""
    shares = [found_share(pairs, *ends) for ends in itertools.pairwise(BINS)]
    enough = [all(s >= share for s in shares[n:]) for n in range(len(shares))]
    return float(BINS[enough.index(True)]) if any(enough) else float("inf")


def _draw(axes: Any, pairs: dict[str, list[list[float]]]) -> None:
    for count, values in pairs.items():
        shares = [100 * found_share(values, *ends) for ends in itertools.pairwise(BINS)]
        axes.plot(range(len(shares)), shares, marker="o", label=f"C = {count}")
    labels = [f"{low} to {high - 1}" for low, high in itertools.pairwise(BINS)]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="fitted examples that use a mechanism", ylabel=f"% of {MECHANISMS} mechanisms found", ylim=(0, 105))
    axes.legend(frameon=False)


if __name__ == "__main__":
    from bench.groundtruth import advice

    draw_figure(FIGURE, _draw, advice())
    FIGURE.with_suffix(".png").unlink()
