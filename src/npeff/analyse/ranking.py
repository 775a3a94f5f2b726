"""What to show first: the examples that a component is about, and the components of a decomposition."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from npeff.analyse.records import ComponentAnalysis
from npeff.utils import Array

_COLUMNS = 64
_LOW = np.uint64(0xFFFFFFFF)
_OVERLAP = 0.25


def columns(matrix: torch.Tensor) -> Iterator[Array]:
    """The columns of `matrix` [m, C] one after another, each contiguous float32 [m], holding a few at a time."""
    for start in range(0, matrix.shape[1], _COLUMNS):
        yield from matrix[:, start : start + _COLUMNS].T.contiguous().float().cpu().numpy()


def ranked(scores: Array) -> Array:
    """Examples with a score above zero, best first; equal scores in order of the examples.

    Args:
        scores: float32 [m].

    Returns:
        Numbers of the examples, int64 [examples above zero].
    """
    active = np.flatnonzero(scores > 0)
    # Positive floats sort like their bits. With the example number in the lower half, one sort of whole numbers gives
    # a stable order several times faster than a stable argsort.
    bits = np.ascontiguousarray(scores[active], dtype=np.float32).view(np.uint32).astype(np.uint64)
    keys = ((_LOW - bits) << np.uint64(32)) | active.astype(np.uint64)
    keys.sort()
    return (keys & _LOW).astype(np.int64)


def top_examples(scores: Array, usable: Array | None = None, count: int | None = None) -> Array:
    """The examples that use a component most: the only place that says which they are.

    Args:
        scores: What to rank by, float [m]; an example with 0 or less does not use the component.
        usable: Which examples may be ranked, bool [m]; all if not given.
        count: How many to give at most; all if not given.

    Returns:
        Numbers of the examples, best first, int64 [at most count].
    """
    return ranked(scores if usable is None or usable.all() else np.where(usable, scores, 0))[:count]


def distinct(order: Array, texts: Array, count: int | None = None) -> Array:
    """The first example of each text.

    Args:
        order: Numbers of examples, best first.
        texts: Number of the text of every example, [m].
        count: How many to give at most; all if not given.

    Returns:
        Those of `order` whose text has not come before, in the same order.
    """
    look = len(order) if count is None else min(len(order), 4 * count)
    while True:
        first = np.sort(np.unique(texts[order[:look]], return_index=True)[1])
        if count is None or len(first) >= count or look == len(order):
            return order[first[:count]]
        look = min(len(order), 4 * look)


def bands(active: int, top: int, size: int, fractions: tuple[float, ...]) -> list[tuple[float, range]]:
    """Places in a ranking of `active` examples where to look below the top: (fraction, places), without overlap.

    A band at fraction f starts at place f · active, or behind the top or the band before it if that is later.

    Args:
        active: Examples in the ranking.
        top: Places that are looked at anyway.
        size: Places of a band.
        fractions: Where bands start, ascending.

    Returns:
        Fraction and places of each band that is not empty.
    """
    places, free = [], top
    for fraction in fractions:
        start = max(free, int(fraction * active))
        stop = min(active, start + size)
        if start < stop:
            places.append((fraction, range(start, stop)))
            free = stop
    return places


def quantiles(ordered: Array, at: tuple[float, ...]) -> list[float]:
    """Quantiles of values, linear between neighbours.

    Args:
        ordered: Values from largest to smallest.
        at: Which quantiles, each from 0 to 1.

    Returns:
        One for each of `at`; none of no values.
    """
    if not len(ordered):
        return []
    places = (1 - np.array(at)) * (len(ordered) - 1)
    return np.interp(places, np.arange(len(ordered)), ordered).tolist()


def highlights(components: Sequence[ComponentAnalysis], count: int = 5) -> list[ComponentAnalysis]:
    """The components to show first: LnP-tuned before label-tuned before others, then by purity of labels, then energy.

    Where recurrence is known, those that recur come before all others.

    So that the list shows different things, a component is passed over if it shares more than a quarter of its top
    examples with one chosen before, or if half of the list is about its most frequent label already.

    Args:
        components: Those of an analysis.
        count: How many to choose at most.

    Returns:
        The chosen ones, first to show first.
    """
    eligible = [component for component in components if component.prediction_tuned is not None]

    def order(component: ComponentAnalysis) -> tuple[bool, bool, bool, float, float]:
        purity = component.label_purity or component.prediction_purity or 0.0
        return not component.recurs, not component.lnp_tuned, not component.label_tuned, -purity, -component.energy

    eligible.sort(key=order)
    chosen: list[ComponentAnalysis] = []
    about: Counter[str] = Counter()
    for component in eligible:
        first = component.orderings[0]
        top, label = set(first.top), next(iter(first.labels or first.predictions), "")
        twin = any(len(top & set(other.orderings[0].top)) > _OVERLAP * len(top) for other in chosen)
        if not twin and about[label] < (count + 1) // 2 and len(chosen) < count:
            chosen.append(component)
            about[label] += 1
    return chosen
