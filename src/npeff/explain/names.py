"""Names of components without a language model: the words that their examples have and others have not.

Words and pairs of words are weighed by log-odds with an informative Dirichlet prior (Monroe, Colaresi and Quinn,
"Fightin' words", 2008), counted in fitted examples. Whether a name says something is checked on held-out ones:
can users of the component be told from others by the words alone?
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise

import numpy as np
from scipy import sparse

from npeff.analyse.ranking import top_examples
from npeff.analyse.tunings import UNKNOWN, Classes, Examples
from npeff.explain.words import WORD
from npeff.utils import Array, Record, rounded

USERS = 128
"""Examples with the largest coefficients that words are counted in, at most; and at most half of those that use it."""
TOLD = 16
"""Held-out examples with the largest coefficients that are to be told from those that do not use the component."""
RAREST = 3
"""Fitted examples that a word must occur in."""
MOST = 16
"""Words of a name."""
PRIOR = 100.0
"""Examples that the prior counts as."""
CLEAR = 2.0
"""Standard errors that a word's log-odds must be above zero."""


class Skew(Record):
    """A class, or length, that is commoner among the users of a component."""

    what: str
    """`label`, `prediction` or `length`."""
    value: str
    """The class; `shorter` or `longer`."""
    users: float
    """Share of it among the users; mean number of words."""
    others: float
    """The same among the others."""


class Name(Record):
    """What a component's examples have in common in their words."""

    component: int
    """Its number."""
    words: list[str] = field(default_factory=list)
    """Words and pairs of words, the clearest first."""
    odds: list[float] = field(default_factory=list)
    """Log-odds of each: its odds among users ÷ those among others."""
    clarity: list[float] = field(default_factory=list)
    """Each in standard errors."""
    detection: float | None = None
    """Balanced accuracy of the words on held-out examples; 0.5 by chance. None if there are too few of them."""
    skews: list[Skew] = field(default_factory=list)
    """Labels, predictions and lengths that differ most."""

    @property
    def text(self) -> str:
        return " · ".join(self.words[:4])


class Lexicon:
    """Which examples have which words; counted once for all components."""

    def __init__(self, texts: Sequence[str], fitted: Array) -> None:
        grams = [_grams(text) for text in texts]
        counts = Counter(gram for i in fitted.tolist() for gram in grams[i])
        self.words = sorted(gram for gram, count in counts.items() if count >= RAREST)
        place = {gram: n for n, gram in enumerate(self.words)}
        pairs = [(i, place[gram]) for i, own in enumerate(grams) for gram in own if gram in place]
        rows, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.has = sparse.csr_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(texts), len(self.words)))
        self.lengths = np.array([len(WORD.findall(text)) for text in texts])

    def log_odds(self, users: Array, others: Array) -> tuple[Array, Array]:
        """How much commoner each word is among users than among others.

        Args:
            users: Numbers of examples.
            others: Numbers of other examples.

        Returns:
            Log-odds, and the same in standard errors, both [words].
        """
        first, second = (np.asarray(self.has[part].sum(0))[0] for part in (users, others))
        prior = PRIOR * (first + second + 0.5) / (len(users) + len(others) + 1)
        parts = [
            (count + prior, len(part) + PRIOR - count - prior) for count, part in ((first, users), (second, others))
        ]
        odds = np.log(parts[0][0] / parts[0][1]) - np.log(parts[1][0] / parts[1][1])
        return odds, odds / np.sqrt(1 / parts[0][0] + 1 / parts[1][0])


def _grams(text: str) -> set[str]:
    words = [word.lower() for word in WORD.findall(text)]
    return {*words, *(f"{a} {b}" for a, b in pairwise(words))}


def give_name(number: int, scores: Array, lexicon: Lexicon, examples: Examples, held_out: Array) -> Name:
    """Name a component by its words.

    Args:
        number: The component.
        scores: Its scores, [m].
        lexicon: Words of all examples.
        examples: Labels, predictions, and which examples are usable.
        held_out: Examples to check the name on, which take no part in finding it; may be empty.

    Returns:
        The name.
    """
    usable = np.flatnonzero(examples.usable)
    fitted = np.setdiff1d(usable, held_out)
    ranking = fitted[top_examples(scores[fitted])]
    users = ranking[: min(USERS, -(-len(ranking) // 2))]
    others = np.setdiff1d(fitted, ranking[: len(ranking) // 2])
    if not len(users) or not len(others):
        return Name(number)
    odds, clarity = lexicon.log_odds(users, others)
    chosen = np.argsort(-clarity, kind="stable")[:MOST]
    chosen = chosen[clarity[chosen] > CLEAR]
    weights = np.zeros(len(odds))
    weights[chosen] = odds[chosen]
    skews = [
        _skew(what, classes, users, others)
        for what, classes in (("label", examples.labels), ("prediction", examples.predictions))
    ]
    lengths = [float(lexicon.lengths[part].mean()) for part in (users, others)]
    skews.append(Skew("length", "shorter" if lengths[0] < lengths[1] else "longer", *lengths))
    return Name(
        component=number,
        words=[lexicon.words[n] for n in chosen],
        odds=rounded(odds[chosen].tolist()),
        clarity=rounded(clarity[chosen].tolist()),
        detection=_detect(lexicon.has @ weights, scores, users, others, np.intersect1d(usable, held_out)),
        skews=[skew for skew in skews if skew is not None],
    )


def _detect(found: Array, scores: Array, users: Array, others: Array, held_out: Array) -> float | None:
    """Balanced accuracy of "has at least so much of the name", with the limit chosen on fitted examples."""
    told, none = held_out[top_examples(scores[held_out], count=TOLD)], held_out[scores[held_out] <= 0]
    if len(told) < TOLD or len(none) < TOLD:
        return None
    limits = np.unique(found[users])
    best = max(limits, key=lambda limit: (found[users] >= limit).mean() - (found[others] >= limit).mean())
    return float((found[told] >= best).mean() + (found[none] < best).mean()) / 2


def _skew(what: str, classes: Classes, users: Array, others: Array) -> Skew | None:
    """The class whose share differs most."""
    if not classes.known:
        return None
    counts = [
        np.bincount(classes.codes[part][classes.codes[part] != UNKNOWN], minlength=len(classes.names))
        for part in (users, others)
    ]
    shares = [count / max(count.sum(), 1) for count in counts]
    most = int(np.argmax(shares[0] - shares[1]))
    return Skew(what, classes.names[most], float(shares[0][most]), float(shares[1][most]))
