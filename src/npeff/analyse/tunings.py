"""Which components are tuned: all of their top examples have the same prediction, or the same label.

A component that is label-tuned but not prediction-tuned ("LnP") is the paper's sign of a factor that works together
with others. All functions take arrays; nothing here knows about files.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
from scipy import stats

from npeff.analyse.ranking import columns, distinct, quantiles, top_examples
from npeff.analyse.records import KINDS, Kind, Ordering, Rate
from npeff.decompose.base import Decomposition
from npeff.utils import Array, Record, rounded

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Of a component's scores above zero."""
UNKNOWN = -1
T = TypeVar("T")


class Classes(Record):
    """A class for every example."""

    codes: Array
    """int64 [m]: index into `names`, or -1 where the class is not known."""
    names: Sequence[str]

    @property
    def known(self) -> bool:
        return bool((self.codes != UNKNOWN).any())


class Examples(Record):
    """What is known about the m examples of a run, beside their coefficients."""

    predictions: Classes
    labels: Classes
    texts: Array
    """int64 [m]: the same number for the same text."""
    usable: Array
    """bool [m]: false where the example was set aside."""


def tuned(orderings: Sequence[Ordering]) -> dict[Kind, bool | None]:
    """What a component counts as over all its orderings.

    As in the paper, tuned is what is tuned in any ordering. So a component with several may be both prediction-tuned
    (in one) and LnP-tuned (in another).

    Args:
        orderings: The component's examples under each way of ranking them.

    Returns:
        For each of KINDS: yes, no, or None where it cannot be said.
    """
    return {kind: overall(any, (_is_tuned(ordering, kind) for ordering in orderings)) for kind in KINDS}


def _is_tuned(ordering: Ordering, kind: Kind) -> bool | None:
    prediction, label = ordering.prediction_tuned, ordering.label_tuned
    if kind == "lnp":
        return None if prediction is None or label is None else label and not prediction
    return prediction if kind == "prediction" else label


def overall(fold: Callable[[list[T]], T], values: Iterable[T | None]) -> T | None:
    """What `fold` (any, max) makes of the values of several orderings that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fold(known) if known else None


def find_tunings(
    scores: Iterable[tuple[str, torch.Tensor]], examples: Examples, top: int = 16, unique: bool = False
) -> list[list[Ordering]]:
    """Rank the examples of every component and see what its top has in common.

    Args:
        scores: Name of each way of ranking and a matrix [m, C]; only examples above zero belong to a component. An
            iterator is read one by one, so that the matrices need not be in memory together.
        examples: What is known about the m examples.
        top: How many examples make a top.
        unique: Count only the first of several examples with the same text.

    Returns:
        For each of C components, its examples under each way of ranking.
    """
    by_order = [
        [_ordering(order, column, examples, top, unique) for column in columns(matrix)] for order, matrix in scores
    ]
    return [list(orderings) for orderings in zip(*by_order, strict=True)]


def _ordering(order: str, scores: Array, examples: Examples, top: int, unique: bool) -> Ordering:
    ranking = top_examples(scores, examples.usable)
    active = len(np.unique(examples.texts[ranking])) if unique else len(ranking)
    best = distinct(ranking, examples.texts, top) if unique else ranking[:top]
    predictions, prediction_purity = _count(examples.predictions, best)
    labels, label_purity = _count(examples.labels, best)
    enough = active >= top
    return Ordering(
        order=order,
        active=active,
        top=best.tolist(),
        scores=rounded(scores[best].tolist(), 6),
        quantiles=rounded(quantiles(scores[ranking], QUANTILES), 6),
        predictions=predictions,
        labels=labels,
        prediction_purity=prediction_purity,
        label_purity=label_purity,
        prediction_tuned=prediction_purity == 1 if enough else None,
        label_tuned=label_purity == 1 if enough and examples.labels.known else None,
    )


def _count(classes: Classes, best: Array) -> tuple[dict[str, int], float | None]:
    """How often each class occurs in a top, most frequent first, and the share of the most frequent one."""
    codes = Counter(classes.codes[best].tolist())
    del codes[UNKNOWN]
    counts = {classes.names[code]: count for code, count in codes.most_common()}
    known = classes.known and len(best) > 0
    return counts, max(counts.values(), default=0) / len(best) if known else None


# --- how much of it is chance -------------------------------------------------------------------------------------


def chance_of_agreement(counts: Iterable[int], total: int, top: int) -> Fraction:
    """Probability that `top` of `total` examples, drawn without replacement, are all of one class; exact.

    `counts` are the sizes of the classes; they may add up to less than `total`, the rest agrees with nothing.
    """
    if total < top:
        return Fraction(0)
    return Fraction(sum(math.comb(count, top) for count in counts if count >= top), math.comb(total, top))


def expected_rates(examples: Examples, top: int, orderings: int = 1, unique: bool = False) -> dict[Kind, float | None]:
    """Share of components that would be tuned if a top were drawn at random from the examples.

    Exact for one ordering; for several an upper bound, the sum over them. LnP is "labels agree" less "labels and
    predictions agree".

    Args:
        examples: What is known about the examples.
        top: How many examples make a top.
        orderings: How many ways of ranking there are.
        unique: Draw distinct texts.

    Returns:
        The share for each of KINDS; None without labels.
    """
    pool = np.flatnonzero(examples.usable)
    if unique:
        pool = distinct(pool, examples.texts)
    predictions, labels = examples.predictions.codes[pool], examples.labels.codes[pool]
    known = labels != UNKNOWN
    both = Counter(zip(labels[known].tolist(), predictions[known].tolist(), strict=True))
    prediction = chance_of_agreement(Counter(predictions.tolist()).values(), len(pool), top)
    label = chance_of_agreement(Counter(labels[known].tolist()).values(), len(pool), top)
    lnp = label - chance_of_agreement(both.values(), len(pool), top)
    rates: dict[Kind, Fraction] = {"prediction": prediction, "label": label, "lnp": lnp}
    absent = () if examples.labels.known else ("label", "lnp")
    return {kind: None if kind in absent else min(1.0, float(orderings * rate)) for kind, rate in rates.items()}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% confidence interval of a share.

    Args:
        successes: How often it was so.
        trials: How often it was tried.

    Returns:
        Lower and upper end.
    """
    if not trials:
        return 0.0, 1.0
    low, high = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(low), float(high)


def compare_rates(first: Rate | None, second: Rate | None) -> float | None:
    """Whether two methods differ in how many of their components are tuned, by Fisher's exact test.

    It takes components for independent of each other, so a p that is not small says "not told apart"; one that is small
    is a little too small, because components of one method share examples.

    Args:
        first: Of one method.
        second: Of the other.

    Returns:
        Two-sided p; None where a rate is not known.
    """
    if first is None or second is None or not first.of or not second.of:
        return None
    counts = [[rate.tuned, rate.of - rate.tuned] for rate in (first, second)]
    return float(stats.fisher_exact(counts).pvalue)


def rates(components: Sequence[Sequence[Ordering]], expected: Mapping[Kind, float | None]) -> dict[Kind, Rate | None]:
    """How many components are tuned in each way, beside what chance would give; None where labels are missing.

    Args:
        components: What `find_tunings` gives.
        expected: What `expected_rates` gives.

    Returns:
        The rate of each of KINDS.
    """
    by_kind: dict[Kind, Rate | None] = {}
    for kind in KINDS:
        chance = expected[kind]
        known = [flag for orderings in components if (flag := tuned(orderings)[kind]) is not None]
        count, of = sum(known), len(known)
        share = count / of if of else None
        by_kind[kind] = None if chance is None else Rate(count, of, *wilson(count, of), chance, share)
    return by_kind


def tunings_of(
    decomposition: Decomposition, examples: Examples, top: int, unique: bool = False
) -> tuple[list[list[Ordering]], dict[Kind, Rate | None]]:
    """What the components of a decomposition are tuned to.

    Args:
        decomposition: The decomposition of m examples into C components.
        examples: What is known about the m examples.
        top: How many examples make a top.
        unique: Count only the first of several examples with the same text.

    Returns:
        What `find_tunings` and `rates` give.
    """
    orders = decomposition.orders
    components = find_tunings(((order, decomposition.scores(order)) for order in orders), examples, top, unique)
    return components, rates(components, expected_rates(examples, top, len(orders), unique))
