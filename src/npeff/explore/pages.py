"""What the page shows of a decomposition, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npeff.analyse.ranking import bands, top_examples
from npeff.analyse.records import KINDS, Analysis, ComponentAnalysis
from npeff.analyse.tunings import Classes, Examples
from npeff.decompose.base import Decomposition
from npeff.utils.text import cut, rounded, short
from npeff.utils.types import Array

TOP = 32
"""Examples in the first list of a component."""
BAND = 8
FRACTIONS = (0.1, 0.25, 0.5, 0.75)
"""Where in the ranking of active examples the further lists start."""
BINS = 24
LISTED = 16
"""Components listed for an example."""
PREVIEW = 160
LONGEST = 1200
"""Characters of a text in the lists of a component; an example's own page has all of it."""
_CLASSES = 8


def table_of_components(analysis: Analysis, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Columns of the overview table."""
    rows = analysis.component
    firsts = [row.orderings[0] for row in rows]
    return {
        **{kind: [row.tuned(kind) for row in rows] for kind in KINDS},
        "energy": [short(row.energy) for row in rows],
        "density": [short(row.density) for row in rows],
        "prediction_purity": [short(row.prediction_purity) for row in rows],
        "label_purity": [short(row.label_purity) for row in rows],
        "active": [max(ordering.active for ordering in row.orderings) for row in rows],
        "labels": [_most_frequent(first.labels) for first in firsts],
        "predictions": [_most_frequent(first.predictions) for first in firsts],
        "first": [cut(texts[first.top[0]], PREVIEW) if first.top else "" for first in firsts],
    }


def map_of(places: torch.Tensor) -> dict[str, list[float]]:
    """Columns x and y of the map of components, from `places` [C, 2]."""
    return {name: rounded(column.tolist()) for name, column in zip("xy", places.T, strict=True)}


def _most_frequent(counts: dict[str, int], shown: int = 3) -> list[list[Any]]:
    return [[name, count] for name, count in list(counts.items())[:shown]]


def component_page(
    row: ComponentAnalysis,
    scores: dict[str, Array],
    decomposition: Decomposition,
    examples: Examples,
    top: int,
) -> tuple[dict[str, Any], set[int]]:
    """A component's page without the texts, and the examples that it shows.

    `row` is the component's entry in the analysis, `scores` its column [m] for each ordering.
    """
    number = row.number
    orderings, shown = [], set()
    for order, column in scores.items():
        column = np.where(examples.usable, column, 0)
        ranking = top_examples(column)
        places = [(0.0, range(min(TOP, len(ranking)))), *bands(len(ranking), TOP, BAND, FRACTIONS)]
        lists = []
        for fraction, span in places:
            chosen = ranking[span.start : span.stop]
            lists.append(
                {
                    "from": fraction,
                    "place": span.start,
                    "examples": chosen.tolist(),
                    "coefficients": rounded(decomposition.coefficients[chosen, number].tolist()),
                    "shares": _shares_of(decomposition, chosen, number),
                }
            )
            shown |= set(chosen.tolist())
        orderings.append(
            {
                "order": order,
                "active": len(ranking),
                "lists": lists,
                "cross": cross_table(ranking, top, examples),
            }
        )
    page = {
        **{f"{kind}_tuned": row.tuned(kind) for kind in KINDS},
        "number": number,
        "energy": row.energy,
        "density": row.density,
        "prediction_purity": row.prediction_purity,
        "label_purity": row.label_purity,
        "quantiles": row.orderings[0].quantiles,
        "correlated": row.correlated,
        "correlation": row.correlation,
        "histogram": histogram(decomposition.coefficients[:, number].numpy()[examples.usable]),
        "orderings": orderings,
    }
    return page, shown


def _shares_of(decomposition: Decomposition, examples: Array, number: int) -> list[float] | None:
    """Share of component `number` in each of these examples."""
    shares = decomposition.shares(decomposition.coefficients[examples], number)
    return None if shares is None else rounded(shares.tolist())


def histogram(coefficients: Array) -> dict[str, Any]:
    """Counts of the coefficients that are not zero, in equal bins, and how many are zero."""
    used = coefficients[coefficients != 0].astype(np.float64)  # float32 has no bins between two neighbouring numbers
    counts, edges = np.histogram(used, bins=BINS) if len(used) else (np.zeros(0, int), np.zeros(0))
    return {"zero": len(coefficients) - len(used), "counts": counts.tolist(), "edges": rounded(edges.tolist())}


def cross_table(ranking: Array, top: int, examples: Examples) -> dict[str, Any]:
    """Label × prediction, counted in the top and in all active examples; classes that are rare here are put together.

    Without labels the table has one row.
    """
    rows, row_names = _few(examples.labels, ranking, top)
    columns, column_names = _few(examples.predictions, ranking, top)
    shape = (len(row_names), len(column_names))
    active = np.zeros(shape, int)
    np.add.at(active, (rows, columns), 1)
    first = np.zeros(shape, int)
    np.add.at(first, (rows[:top], columns[:top]), 1)
    return {
        "labels": row_names if examples.labels.known else None,
        "predictions": column_names,
        "top": first.tolist(),
        "active": active.tolist(),
    }


def _few(classes: Classes, ranking: Array, top: int) -> tuple[Array, list[str]]:
    """Classes of the ranked examples, renumbered so that the most frequent ones in the top come first."""
    codes = classes.codes[ranking] + 1  # 0 is UNKNOWN now
    everywhere = np.bincount(codes, minlength=len(classes.names) + 1)
    frequent = np.bincount(codes[:top], minlength=len(classes.names) + 1)
    order = np.lexsort((-everywhere, -frequent))
    kept = [code for code in order.tolist() if code and everywhere[code]][:_CLASSES]
    rest = [code for code in np.flatnonzero(everywhere).tolist() if code not in kept]
    names = [classes.names[code - 1] for code in kept]
    if rest:
        names.append("no label" if rest == [0] else "other")
    place = np.full(len(everywhere), len(names) - 1)
    place[kept] = np.arange(len(kept))
    return place[codes], names


def example_rows(
    coefficients: torch.Tensor, residuals: torch.Tensor, shares: torch.Tensor | None
) -> dict[str, list[Any]]:
    """For each example of a block the components that explain most of it; `coefficients` and `shares` are [n, C]."""
    weight = coefficients.abs() if shares is None else shares
    best = weight.topk(min(LISTED, weight.shape[1]), dim=1).indices
    used = coefficients.gather(1, best)
    found: dict[str, list[Any]] = {
        "components": [],
        "coefficients": [],
        "shares": [],
        "used": (coefficients != 0).sum(dim=1).tolist(),
        "residual": rounded(residuals.tolist()),
    }
    for n in range(len(coefficients)):
        kept = used[n] != 0
        found["components"].append(best[n][kept].tolist())
        found["coefficients"].append(rounded(used[n][kept].tolist()))
        found["shares"].append(None if shares is None else rounded(shares[n, best[n][kept]].tolist()))
    return found
