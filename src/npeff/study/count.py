"""What answers add up to: shares of groups with a theme, agreement of two annotators. Nothing here reads files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from npeff.analyse.tunings import wilson
from npeff.study.answers import Sheet
from npeff.study.kit import Key


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    count: int
    of: int

    @property
    def share(self) -> float | None:
        return self.count / self.of if self.of else None

    def to_json(self, interval: bool = True) -> dict[str, Any]:
        """As JSON values, with the 95% interval over groups unless it would mean nothing."""
        low, high = wilson(self.count, self.of) if interval and self.of else (None, None)
        return {"count": self.count, "of": self.of, "share": self.share, "low": low, "high": high}


def share(values: Iterable[bool]) -> Share:
    """How many of `values` are true."""
    listed = list(values)
    return Share(sum(listed), len(listed))


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Cohen's kappa of two annotators' answers to the same groups: agreement beyond what their shares give by chance.

    None where it is not defined: no groups, or both gave one and the same answer to all of them.
    """
    n = len(first)
    if not n:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    p, q = sum(first) / n, sum(second) / n
    chance = p * q + (1 - p) * (1 - q)
    return None if chance == 1 else (observed - chance) / (1 - chance)


def count(sheets: Sequence[Sheet], key: Key) -> dict[str, Any]:
    """Everything that is reported about a study, as JSON values."""
    people = [sheet for sheet in sheets if not sheet.automatic]
    together = [_together(people, key)] if len(people) > 1 else []
    return {
        "kit": key.kit,
        "annotators": [_annotator(sheet, key) for sheet in sheets] + together,
        "pairs": [_pair(first, second, key) for first, second in combinations(sheets, 2)],
        "themes": _themes(sheets, key),
    }


def _groups(key: Key, decomposition: str | None) -> list[int]:
    return [entry.number for entry in key.groups if entry.decomposition == decomposition]


def _themed(sheet: Sheet, numbers: list[int]) -> Share:
    return share(sheet.answers[number].themed for number in numbers if number in sheet.answers)


def _annotator(sheet: Sheet, key: Key) -> dict[str, Any]:
    return {
        "who": sheet.who,
        "title": sheet.title,
        "source": sheet.source,
        "automatic": sheet.automatic,
        "answered": len(sheet.answers),
        "unanswered": len(key.groups) - len(sheet.answers),
        "themed": {name: _themed(sheet, _groups(key, name)).to_json() for name in key.decompositions},
        "false_positives": _themed(sheet, _groups(key, None)).to_json(),
    }


def _together(people: list[Sheet], key: Key) -> dict[str, Any]:
    """Answers of all people as one, the way the paper's table has them.

    Without an interval: several answers to the same group are not independent of each other.
    """

    def added(numbers: list[int]) -> dict[str, Any]:
        parts = [_themed(sheet, numbers) for sheet in people]
        return Share(sum(part.count for part in parts), sum(part.of for part in parts)).to_json(interval=False)

    answered = sum(len(sheet.answers) for sheet in people)
    return {
        "who": None,
        "title": "people together",
        "source": None,
        "automatic": False,
        "answered": answered,
        "unanswered": len(people) * len(key.groups) - answered,
        "themed": {name: added(_groups(key, name)) for name in key.decompositions},
        "false_positives": added(_groups(key, None)),
    }


def _pair(first: Sheet, second: Sheet, key: Key) -> dict[str, Any]:
    """Agreement on the groups that both have answered; maybe counts as yes."""
    both = [entry.number for entry in key.groups if entry.number in first.answers and entry.number in second.answers]
    a = [first.answers[number].themed for number in both]
    b = [second.answers[number].themed for number in both]
    agreed = share(x == y for x, y in zip(a, b, strict=True))
    automatic = first.automatic or second.automatic
    names = {"first": first.title, "second": second.title, "automatic": automatic}
    return {**names, "agreement": agreed.to_json(), "kappa": kappa(a, b)}


def _themes(sheets: Sequence[Sheet], key: Key) -> list[dict[str, Any]]:
    """What annotators said about each component of the study."""
    found = []
    for entry in sorted(
        (entry for entry in key.groups if entry.decomposition is not None),
        key=lambda entry: (entry.decomposition or "", entry.component or 0),
    ):
        said = [
            {"who": sheet.title, "automatic": sheet.automatic, "theme": answer.theme, "words": answer.words}
            for sheet in sheets
            if (answer := sheet.answers.get(entry.number)) is not None
        ]
        names = {"decomposition": entry.decomposition, "component": entry.component, "group": entry.number}
        found.append({**names, "answers": said})
    return found
