"""Recurrence: how often other seeds and other examples find a component again.

The decomposition is made again, half of the times from other seeds, half of the times of one half of the fitted
examples. A component is found again if its match, one to one by |cos|, has half of its squared length or more. Chance
is told by the same rule: components of the other fit are mixed by a random rotation, which keeps the space that they
span and loses the single directions.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from npeff.analyse import matching
from npeff.decompose.base import Decomposition
from npeff.decompose.methods import create
from npeff.store.rows import RowSource, SubsetRows
from npeff.store.run import Run
from npeff.utils import Array, UserError, read_object
from npeff.utils.progress import progress

REFITS = 4
"""How often a decomposition is made again, if that is cheap and nobody says."""
CHEAP = 120.0
"""Seconds that this may take then."""
FOUND = 0.5
"""Squared cosine with its match from which a component is found again."""
RECURRING = ("npeff", "gnpeff")
"""Methods whose components have a recurrence."""


def usual_refits(run: Run, folder: Path) -> int:
    """How often to make a decomposition again if nobody says.

    Args:
        run: The run.
        folder: Where the decomposition is.

    Returns:
        `REFITS`, or 0 where the method has no recurrence, the rows are gone, or it would take too long.

    Raises:
        UserError: The history of the fit cannot be read.
    """
    history, method = folder / "history.csv", read_object(folder / "config.json").get("method")
    if method not in RECURRING or not history.is_file() or not run.has_rows:
        return 0
    try:
        with history.open(encoding="utf-8", newline="") as file:
            seconds = max((float(row["seconds"]) for row in csv.DictReader(file)), default=0.0)
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        hint = "Make the decomposition again, or say how often with --refits."
        raise UserError(f"{history} is damaged, so nobody knows how long a fit takes. {hint}") from error
    if REFITS * seconds <= CHEAP:
        return REFITS
    print(f"Whether components recur would take about {REFITS * seconds / 60:.0f} minutes: --refits {REFITS} tells.")
    return 0


def recurrence(run: Run, decomposition: Decomposition, refits: int) -> tuple[list[float], float]:
    """How often each component is found again.

    Args:
        run: The run.
        decomposition: One of its decompositions, of C components.
        refits: How often it is made again.

    Returns:
        For every component the share of these fits that find it, [C], and the share of components that chance finds.
    """
    source, H = run.source(decomposition.kind), decomposition.components
    found, chance = torch.zeros(len(H)), 0.0
    fitted = np.setdiff1d(np.arange(len(source.ranks)), decomposition.notes.held_out)
    fits = again(SubsetRows(source, fitted), decomposition, refits)
    for number, fit in enumerate(progress(fits, desc="Recurrence", unit="fit", total=refits)):
        other = fit.components
        found += find(H, other)
        generator = torch.Generator().manual_seed(number)
        rotation = torch.linalg.qr(torch.randn(len(other), len(other), generator=generator))[0]
        chance += float(find(H, rotation @ other).mean())
    return (found / refits).tolist(), chance / refits


def again(source: RowSource, decomposition: Decomposition, refits: int) -> Iterator[Decomposition]:
    """Decompositions of other seeds and of halves of the examples.

    Args:
        source: The examples that the decomposition was fitted to.
        decomposition: The decomposition.
        refits: How many to give; where half of the examples are too few for C components, all are of other seeds.

    Yields:
        One fit after another.
    """
    config = decomposition.config
    usable = np.flatnonzero(np.asarray(source.ranks) > 0)
    halving = len(usable) // 2 >= config.components
    for number in range(refits):
        part: RowSource = source
        if halving and number % 2:  # both halves of a split, then those of the next
            part = SubsetRows(source, half(usable, number // 4, number // 2 % 2))
        yield create(replace(config, seed=config.seed + 1 + number)).fit(part)


def half(examples: Array, split: int, which: int) -> Array:
    """One of the two halves of a random split of the examples, ascending."""
    return np.sort(np.array_split(np.random.default_rng([split, 5]).permutation(examples), 2)[which])


def find(components: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """1 for components [C, p] that are found among others [D, p], 0 for the rest; float32 [C]."""
    similarity = matching.component_similarity(components, others)
    rows, columns = matching.match(similarity)
    found = torch.zeros(len(components))
    found[rows] = (similarity[rows, columns].square() >= FOUND).float()
    return found
