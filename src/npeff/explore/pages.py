"""What the page shows of a decomposition: the records in its data files. C is the number of components."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npeff.analyse import matching
from npeff.analyse.ranking import bands, highlights, top_examples
from npeff.analyse.records import Analysis, ComponentAnalysis, Group
from npeff.analyse.relations import Relatives
from npeff.analyse.tunings import Classes, Examples
from npeff.decompose.base import Decomposition
from npeff.explore.evidence import About, Effect, Measured, Perturbation, heldout_effects
from npeff.explore.inside import Inside, InsideColumns
from npeff.utils import Array, Record, cut, rounded

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
_FREQUENT = 3
_COLUMNS = (
    *("prediction_tuned", "label_tuned", "lnp_tuned", "prediction_purity", "label_purity"),
    *("density", "energy", "recurrence"),
)
"""What the table says of a component from its analysis; the rest is on the component's own page."""
Shown = tuple[str, str | None, str, float | None]
"""Text, label, prediction and its probability, of an example in a list."""


class ComponentTable(Record):
    """Columns of the overview table, each [C] (data/D/components.js)."""

    components: dict[str, list[Any]]
    """What the analysis says of each: entry of `ComponentAnalysis` → its values."""
    active: list[int]
    """Examples that use it, in the ordering with most of them."""
    labels: list[list[tuple[str, int]]]
    """Most frequent labels of its top examples, with counts."""
    predictions: list[list[tuple[str, int]]]
    """Most frequent predictions."""
    first: list[str]
    """Its first example, shortened."""
    x: list[float]
    """Where it is on the map."""
    y: list[float]
    """Where it is on the map."""
    highlights: list[int]
    """Components to open first."""
    stability: list[float] | None
    """Mean similarity with its matches in other seeds, if there are any."""
    effects: list[Effect | None] | None
    """Effects on held-out examples; None if no component was perturbed so."""
    perturbations: list[About]
    """Every perturbation of the decomposition in a line."""
    groups: list[Group]
    """Components to which the same examples respond."""
    inside: InsideColumns | None
    """What `npeff explain` found; None if it was not run."""


class ExampleList(Record):
    """Examples of a component that follow each other in its ranking."""

    place: int
    """Place of the first one, from 0."""
    examples: list[int]
    """Their numbers."""
    coefficients: list[float]
    """The component's coefficients."""
    shares: list[float] | None
    """How much of each the component explains; None for methods without shares."""


class CrossTable(Record):
    """Label × prediction; classes that are rare here are put together."""

    labels: list[str] | None
    """Names of the rows; None without labels, where there is one row."""
    predictions: list[str]
    """Names of the columns."""
    top: list[list[int]]
    """Counts in the top examples."""
    active: list[list[int]]
    """Counts in all active examples."""


class Ranking(Record):
    """A component's examples under one way of ranking them."""

    order: str
    """Ranked by positive, negative or absolute coefficients."""
    active: int
    """Examples that use the component."""
    lists: list[ExampleList]
    """The top, and bands further down."""
    cross: CrossTable
    """Labels and predictions."""


class Histogram(Record):
    """Coefficients in equal bins."""

    zero: int
    """Coefficients that are 0 and in no bin."""
    counts: list[int]
    """Coefficients in each bin."""
    edges: list[float]
    """Ends of the bins."""


class ComponentPage(Record):
    """One component (data/D/component/J.js)."""

    component: ComponentAnalysis
    """Its entry in the analysis."""
    histogram: Histogram
    """Its coefficients."""
    orderings: list[Ranking]
    """Its examples."""
    relations: list[Relatives]
    """What it is in other decompositions."""
    perturbations: list[Measured]
    """What its perturbations measured."""
    shown: dict[int, Shown]
    """Example → what the lists say about it."""
    inside: Inside | None
    """What `npeff explain` found; None if it was not run."""


class ExampleParts(Record):
    """Which components explain the examples of a block (data/D/examples/N.js)."""

    components: list[list[int]]
    """The components that explain most of each example, the largest share first."""
    coefficients: list[list[float]]
    """Their coefficients."""
    shares: list[list[float] | None]
    """How much of the example each explains; None for methods without shares."""
    used: list[int]
    """Components with a coefficient that is not zero."""
    residual: list[float]
    """How much of the example no component explains."""


def component_table(
    analysis: Analysis,
    texts: Sequence[str],
    decomposition: Decomposition,
    stability: list[float] | None,
    perturbations: Sequence[Perturbation],
    inside: InsideColumns | None = None,
) -> ComponentTable:
    """The overview table of a decomposition.

    Args:
        analysis: Its analysis.
        texts: Texts of all examples.
        decomposition: The decomposition.
        stability: Mean similarity with matches in other seeds, [C].
        perturbations: Its perturbations.
        inside: What is inside its components.

    Returns:
        The table.
    """
    rows = analysis.component
    firsts = [row.orderings[0] for row in rows]
    x, y = (rounded(column) for column in matching.embed(decomposition.coefficients).T.tolist())
    return ComponentTable(
        components={name: [getattr(row, name) for row in rows] for name in _COLUMNS},
        active=[max(ordering.active for ordering in row.orderings) for row in rows],
        labels=[list(first.labels.items())[:_FREQUENT] for first in firsts],
        predictions=[list(first.predictions.items())[:_FREQUENT] for first in firsts],
        first=[cut(texts[first.top[0]], PREVIEW) if first.top else "" for first in firsts],
        x=x,
        y=y,
        highlights=[row.number for row in highlights(rows)],
        stability=stability,
        effects=heldout_effects(perturbations, len(rows)),
        perturbations=[about for about, _ in perturbations],
        groups=analysis.groups,
        inside=inside,
    )


def rank_examples(
    number: int, scores: Sequence[Array], decomposition: Decomposition, examples: Examples, top: int
) -> list[Ranking]:
    """The examples of a component, under each way of ranking them.

    Args:
        number: The component.
        scores: The component's scores [m] under each of the decomposition's orderings.
        decomposition: The decomposition.
        examples: Labels, predictions, and which examples are usable.
        top: Top examples that are counted in the cross table.

    Returns:
        Lists of examples: the top, and bands further down.
    """
    rankings = []
    for order, column in zip(decomposition.orders, scores, strict=True):
        ranking = top_examples(column, examples.usable)
        spans = [range(min(TOP, len(ranking))), *(span for _, span in bands(len(ranking), TOP, BAND, FRACTIONS))]
        lists = [_list(span.start, ranking[span.start : span.stop], number, decomposition) for span in spans]
        rankings.append(Ranking(order, len(ranking), lists, cross_table(ranking, top, examples)))
    return rankings


def _list(place: int, examples: Array, number: int, decomposition: Decomposition) -> ExampleList:
    coefficients = decomposition.coefficients[examples]
    shares = decomposition.shares(coefficients, number)
    explained = None if shares is None else rounded(shares.tolist())
    return ExampleList(place, examples.tolist(), rounded(coefficients[:, number].tolist()), explained)


def histogram(coefficients: Array) -> Histogram:
    """Counts of the coefficients that are not zero, in equal bins, and how many are zero."""
    used = coefficients[coefficients != 0].astype(np.float64)  # float32 has no bins between two neighbouring numbers
    counts, edges = np.histogram(used, bins=BINS) if len(used) else (np.zeros(0, int), np.zeros(0))
    return Histogram(len(coefficients) - len(used), counts.tolist(), rounded(edges.tolist()))


def cross_table(ranking: Array, top: int, examples: Examples) -> CrossTable:
    """Label × prediction, counted in the top and in all active examples.

    Args:
        ranking: Active examples, best first.
        top: How many of them are the top.
        examples: Labels and predictions of all examples.

    Returns:
        The counts.
    """
    rows, row_names = _few(examples.labels, ranking, top)
    columns, column_names = _few(examples.predictions, ranking, top)
    counts = np.zeros((2, len(row_names), len(column_names)), int)
    np.add.at(counts[0], (rows[:top], columns[:top]), 1)
    np.add.at(counts[1], (rows, columns), 1)
    return CrossTable(row_names if examples.labels.known else None, column_names, *counts.tolist())


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


def example_parts(decomposition: Decomposition, block: slice) -> ExampleParts:
    """The components that explain most of each example of a block.

    Args:
        decomposition: The decomposition.
        block: Which examples.

    Returns:
        At most `LISTED` components for each of them.
    """
    coefficients = decomposition.coefficients[block]
    shares = decomposition.shares(coefficients)
    listed = strongest(coefficients, coefficients.abs() if shares is None else shares)
    return ExampleParts(
        components=listed,
        coefficients=[rounded(coefficients[i, row].tolist()) for i, row in enumerate(listed)],
        shares=[None if shares is None else rounded(shares[i, row].tolist()) for i, row in enumerate(listed)],
        used=(coefficients != 0).sum(dim=1).tolist(),
        residual=rounded(torch.nan_to_num(decomposition.residuals[block].float()).tolist()),
    )


def strongest(coefficients: torch.Tensor, weight: torch.Tensor) -> list[list[int]]:
    """The `LISTED` components of each example that matter most, by weight, and are not zero; both are [n, C]."""
    best = weight.topk(min(LISTED, weight.shape[1]), dim=1).indices
    return [row[coefficients[i, row] != 0].tolist() for i, row in enumerate(best)]
