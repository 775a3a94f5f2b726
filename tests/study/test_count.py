"""Scores against hand-made tables and brute force."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from npeff.study.count import count, kappa
from npeff.study.kit import read_key, read_kit
from tests.study.conftest import drawn


def test_kappa_by_hand() -> None:
    # both yes 20, first only 5, second only 10, both no 15: agreement 0.7, by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5
    first = [True] * 25 + [False] * 25
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert kappa(first, second) == pytest.approx(0.4)
    assert kappa(second, first) == pytest.approx(0.4)
    assert kappa([True, False], [True, False]) == 1
    assert kappa([True, False], [False, True]) == -1
    assert kappa([True, True], [True, True]) is None
    assert kappa([True, True], [False, True]) == 0
    assert kappa([], []) is None


def test_scores_against_brute_force(made: Path) -> None:
    kit = read_kit(made)
    key = read_key(made, kit)
    where = json.loads((made / "key" / "key.json").read_text())["groups"]
    sheets = [drawn(0, key, "Ada"), drawn(1, key, "Bob"), drawn(2, key, "m", source="judge:m")]
    scores = count(sheets, key)
    *singles, together = scores.annotators
    assert [row.title for row in singles] == ["Ada", "Bob", "m (automatic)"]
    sums: dict[str | None, list[int]] = {}
    for sheet, row in zip(sheets, singles, strict=True):
        assert row.unanswered == 20 - len(sheet.answers)
        for name in ("npeff", "clusters", None):
            hits = [
                sheet.answers[entry["number"]].theme in ("yes", "maybe")
                for entry in where
                if entry["decomposition"] == name and entry["number"] in sheet.answers
            ]
            got = row.false_positives if name is None else row.themed[name]
            assert (got.count, got.of) == (sum(hits), len(hits))
            assert got.share == pytest.approx(np.mean(hits))
            assert 0 <= got.low <= got.share <= got.high <= 1
            if not sheet.automatic:
                total = sums.setdefault(name, [0, 0])
                total[0] += sum(hits)
                total[1] += len(hits)
    assert together.title == "people together"
    assert [getattr(together.false_positives, name) for name in ("count", "of", "low")] == [*sums[None], None]
    assert [getattr(together.themed["npeff"], name) for name in ("count", "of")] == sums["npeff"]
    assert len(scores.pairs) == 3
    for pair, (a, b) in zip(scores.pairs, [(0, 1), (0, 2), (1, 2)], strict=True):
        both = sorted(set(sheets[a].answers) & set(sheets[b].answers))
        table = np.zeros((2, 2))
        for number in both:
            table[int(sheets[a].answers[number].theme != "no"), int(sheets[b].answers[number].theme != "no")] += 1
        observed = np.trace(table) / len(both)
        chance = (table.sum(0) * table.sum(1)).sum() / len(both) ** 2
        assert (pair.agreement.share, pair.agreement.of) == (pytest.approx(observed), len(both))
        assert pair.kappa == pytest.approx((observed - chance) / (1 - chance))
    for row in scores.themes:
        assert where[row.group - 1]["component"] == row.component
        assert where[row.group - 1]["decomposition"] == row.decomposition
