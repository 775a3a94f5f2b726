"""The components to show first."""

from __future__ import annotations

from typing import Any

from npeff.analyse.highlights import highlights
from npeff.analyse.records import ComponentAnalysis, Ordering


def component(number: int, top: list[int], label: str = "yes", **values: Any) -> ComponentAnalysis:
    tallies = {"predictions": {"no": len(top)}, "labels": {label: len(top)}}
    unknown = {"prediction_purity": None, "label_purity": None, "prediction_tuned": None, "label_tuned": None}
    ordering = Ordering("positive", len(top), top, [], [], **tallies, **unknown)
    default = {"prediction_tuned": False, "label_tuned": False, "lnp_tuned": False, "label_purity": 0.5, "energy": 0.1}
    default |= {"prediction_purity": 0.5, "used": 0, "density": 0.0, "correlated": [], "correlation": []}
    return ComponentAnalysis(number=number, orderings=[ordering], **{**default, **values})


def test_highlights_are_tuned_pure_strong_and_different() -> None:
    chosen = highlights(
        [
            component(0, [0, 1, 2, 3], energy=0.9),
            component(1, [4, 5, 6, 7], label_purity=0.9),
            component(2, [8, 9, 10, 11], "no", label_tuned=True, label_purity=1.0, energy=0.2),
            component(3, [12, 13, 14, 15], "no", label_tuned=True, label_purity=1.0, energy=0.3),
            component(4, [16, 17, 18, 19], label_tuned=True, lnp_tuned=True, label_purity=1.0, energy=0.0),
            component(5, [12, 13, 20, 21], label_tuned=True, label_purity=1.0, energy=0.25),  # half of it is in 3
            component(6, [30], prediction_tuned=None, label_tuned=None, lnp_tuned=None, energy=1.0),  # too few examples
        ]
    )
    assert [c.number for c in chosen] == [4, 3, 2, 1, 0]


def test_no_label_takes_more_than_half_of_the_list() -> None:
    many = [component(n, [2 * n, 2 * n + 1], "yes" if n < 8 else "no", energy=1 / (n + 1)) for n in range(10)]
    assert [c.number for c in highlights(many)] == [0, 1, 2, 8, 9]
    assert highlights([]) == []
