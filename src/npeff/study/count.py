"""What answers add up to: shares of groups with a theme, agreement of two annotators. Nothing here reads files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from npeff.analyse.tunings import wilson
from npeff.study.answers import Sheet
from npeff.study.kit import Key
from npeff.utils.version import __version__


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    count: int
    """How many."""
    of: int
    """Of how many."""
    share: float | None
    """count / of; None of no groups."""
    low: float | None
    """Lower end of the 95% interval over groups; None where it would mean nothing."""
    high: float | None
    """Upper end."""


@dataclass(frozen=True)
class Annotator:
    """What one annotator saw, or all people together."""

    who: str | None
    """Name; None for all people together."""
    title: str
    """Name as tables show it."""
    source: str | None
    """`person` or `judge:MODEL`; None for all people together."""
    automatic: bool
    """Whether it is a language model."""
    answered: int
    """Groups with an answer."""
    unanswered: int
    """Groups without one."""
    themed: dict[str, Share]
    """Name of a decomposition → groups of its components with yes or maybe."""
    false_positives: Share
    """Random groups with yes or maybe."""


@dataclass(frozen=True)
class Pair:
    """Agreement of two annotators on the groups that both have answered; maybe counts as yes."""

    first: str
    """Title of one annotator."""
    second: str
    """Title of the other."""
    automatic: bool
    """Whether one of them is a language model."""
    agreement: Share
    """Groups with the same answer."""
    kappa: float | None
    """Cohen's kappa; None where it is not defined."""


@dataclass(frozen=True)
class Statement:
    """What one annotator said about a component."""

    who: str
    """Title of the annotator."""
    automatic: bool
    """Whether it is a language model."""
    theme: str
    """yes, maybe or no."""
    words: str
    """The theme in a few words."""


@dataclass(frozen=True)
class Component:
    """What annotators said about a component of the study."""

    decomposition: str
    """Name of its decomposition."""
    component: int
    """The component."""
    group: int
    """Number of the group that shows it."""
    answers: list[Statement]
    """In the order of the annotators."""


@dataclass(frozen=True)
class Scores:
    """Everything that is reported about a study."""

    kit: str
    """Id of the kit."""
    annotators: list[Annotator]
    """In the order of the forms; last all people together, if they are several."""
    pairs: list[Pair]
    """Every two annotators."""
    themes: list[Component]
    """By decomposition and component."""
    npeff: str = __version__
    """Version that scored."""


def count(sheets: Sequence[Sheet], key: Key) -> Scores:
    """Add up what was answered.

    Args:
        sheets: The answers of each annotator.
        key: Which group is which.

    Returns:
        All scores.
    """
    people = [sheet for sheet in sheets if not sheet.automatic]
    annotators = [_annotator([sheet], key, sheet.who, sheet.title, sheet.source) for sheet in sheets]
    if len(people) > 1:
        annotators.append(_annotator(people, key, None, "people together", None))
    pairs = [_pair(first, second, key) for first, second in combinations(sheets, 2)]
    return Scores(key.kit, annotators, pairs, _themes(sheets, key))


def _annotator(sheets: list[Sheet], key: Key, who: str | None, title: str, source: str | None) -> Annotator:
    """Answers of one annotator, or of several as one, the way the paper's table has them.

    Those of several are without an interval: answers to the same group are not independent of each other.
    """

    def themed(decomposition: str | None) -> Share:
        numbers = [entry.number for entry in key.groups if entry.decomposition == decomposition]
        answers = (sheet.answers.get(number) for sheet in sheets for number in numbers)
        return share((answer.themed for answer in answers if answer is not None), interval=len(sheets) == 1)

    answered = sum(len(sheet.answers) for sheet in sheets)
    unanswered = len(sheets) * len(key.groups) - answered
    by_name = {name: themed(name) for name in key.decompositions}
    return Annotator(who, title, source, sheets[0].automatic, answered, unanswered, by_name, themed(None))


def share(values: Iterable[bool], interval: bool = True) -> Share:
    """How many of `values` are true, with the 95% interval unless it would mean nothing."""
    listed = list(values)
    true, of = sum(listed), len(listed)
    low, high = wilson(true, of) if interval and of else (None, None)
    return Share(true, of, true / of if of else None, low, high)


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Cohen's kappa: agreement beyond what the annotators' shares of yes give by chance.

    Args:
        first: Whether one annotator saw a theme in each group.
        second: The same of the other, for the same groups.

    Returns:
        None where it is not defined: no groups, or both gave one and the same answer to all of them.
    """
    n = len(first)
    if not n:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    p, q = sum(first) / n, sum(second) / n
    chance = p * q + (1 - p) * (1 - q)
    return None if chance == 1 else (observed - chance) / (1 - chance)


def _pair(first: Sheet, second: Sheet, key: Key) -> Pair:
    both = [entry.number for entry in key.groups if entry.number in first.answers and entry.number in second.answers]
    a = [first.answers[number].themed for number in both]
    b = [second.answers[number].themed for number in both]
    agreement = share(x == y for x, y in zip(a, b, strict=True))
    return Pair(first.title, second.title, first.automatic or second.automatic, agreement, kappa(a, b))


def _themes(sheets: Sequence[Sheet], key: Key) -> list[Component]:
    components = []
    for entry in key.groups:
        if entry.decomposition is None or entry.component is None:
            continue
        statements = [
            Statement(sheet.title, sheet.automatic, answer.theme, answer.words)
            for sheet in sheets
            if (answer := sheet.answers.get(entry.number)) is not None
        ]
        components.append(Component(entry.decomposition, entry.component, entry.number, statements))
    return sorted(components, key=lambda each: (each.decomposition, each.component))
