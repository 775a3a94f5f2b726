"""Rankings against plain sorting, and the components to show first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from npeff.analyse.ranking import bands, columns, distinct, highlights, quantiles, ranked
from npeff.analyse.records import ComponentAnalysis, Ordering

# few distinct values, so that there are ties, zeros and negative numbers
FEW = st.sampled_from([-2.0, -0.0, 0.0, 1e-30, 0.5, 0.5001, 1.0, 7.0])
SCORES = arrays(np.float32, st.integers(0, 60), elements=FEW)


@given(SCORES)
def test_ranked_is_a_stable_sort_of_the_active_examples(scores: np.ndarray) -> None:
    plain = sorted((i for i in range(len(scores)) if scores[i] > 0), key=lambda i: (-scores[i], i))
    assert ranked(scores).tolist() == plain


def test_ranked_leaves_out_what_is_not_a_number() -> None:
    assert ranked(np.array([np.nan, 1, np.inf, 2], np.float32)).tolist() == [2, 3, 1]


@given(SCORES, st.integers(1, 8))
def test_distinct_keeps_the_first_of_each_text(scores: np.ndarray, count: int) -> None:
    order = ranked(scores)
    texts = np.arange(len(scores)) % 5
    seen: dict[int, int] = {}
    for example in order.tolist():
        seen.setdefault(int(texts[example]), example)
    assert distinct(order, texts).tolist() == list(seen.values())
    assert distinct(order, texts, count).tolist() == list(seen.values())[:count]


@given(arrays(np.float32, st.integers(1, 40), elements=st.integers(0, 1000).map(lambda n: n / 7)))
def test_quantiles_equal_numpys(values: np.ndarray) -> None:
    at = (0.0, 0.25, 0.5, 0.9, 1.0)
    ordered = np.sort(values)[::-1]
    assert quantiles(ordered, at) == pytest.approx(np.quantile(values.astype(np.float64), at), abs=1e-4)


def test_quantiles_of_nothing() -> None:
    assert quantiles(np.zeros(0, np.float32), (0.5,)) == []


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 20))
def test_bands_lie_below_the_top_and_do_not_overlap(active: int, top: int, size: int) -> None:
    places = [place for _, band in bands(active, top, size, (0.1, 0.25, 0.5, 0.75)) for place in band]
    assert places == sorted(set(places))
    assert all(top <= place < active for place in places)
    if active > top:
        assert places


def test_bands_start_at_their_fraction() -> None:
    assert bands(1000, 16, 4, (0.1, 0.5)) == [(0.1, range(100, 104)), (0.5, range(500, 504))]


def test_columns_come_in_order_whatever_the_type() -> None:
    matrix = torch.randn(7, 150, dtype=torch.float64)
    found = np.stack(list(columns(matrix)), axis=1)
    assert found.dtype == np.float32
    assert np.array_equal(found, matrix.float().numpy())


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
