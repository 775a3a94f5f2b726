"""Tunings, their chance and their intervals against brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npeff.analyse.records import Rate
from npeff.analyse.tunings import (
    Classes,
    Examples,
    chance_of_agreement,
    compare_rates,
    expected_rates,
    find_tunings,
    rates,
    tuned,
    wilson,
)


def make_examples(
    predictions: list[int], labels: list[int | None], texts: list[int] | None = None, aside: set[int] = frozenset()
) -> Examples:
    m = len(predictions)
    return Examples(
        Classes(np.array(predictions), ["no", "yes", "maybe"]),
        Classes(np.array([-1 if label is None else label for label in labels]), ["no", "yes", "maybe"]),
        np.arange(m) if texts is None else np.array(texts),
        np.array([i not in aside for i in range(m)]),
    )


def column(*scores: float) -> torch.Tensor:
    return torch.tensor(scores)[:, None]


def test_the_three_tunings_by_hand() -> None:
    examples = make_examples([0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0])
    scores = torch.tensor(
        [  # prediction, LnP, both, neither, too few
            [0.0, 0.9, 0.9, 0.5, 0.9],
            [0.0, 0.8, 0.8, 0.0, 0.0],
            [0.9, 0.7, 0.0, 0.0, 0.0],
            [0.8, 0.0, 0.0, 0.9, 0.0],
            [0.7, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.8, 0.0],
        ]
    )
    found = find_tunings([("positive", scores)], examples, top=2)
    assert [tuple(tuned(orderings).values()) for orderings in found] == [
        (True, False, False),
        (True, True, False),
        (True, True, False),
        (False, True, True),
        (None, None, None),
    ]
    assert found[0][0].top == [2, 3]
    three = find_tunings([("positive", scores)], examples, top=3)
    assert tuple(tuned(three[1]).values()) == (False, True, True)
    assert three[1][0].predictions == {"no": 2, "yes": 1}
    assert three[1][0].labels == {"yes": 3}
    assert three[1][0].prediction_purity == pytest.approx(2 / 3)
    assert three[1][0].label_purity == 1.0
    assert tuned(three[2])["prediction"] is None


def brute_force(scores: np.ndarray, examples: Examples, top: int, unique: bool) -> tuple[bool | None, ...]:
    """Prediction-, label- and LnP-tuned of one component, by plain Python over three orderings."""
    prediction, label = [], []
    for values in (scores, -scores, abs(scores)):
        order = sorted(range(len(scores)), key=lambda i: (-values[i], i))
        order = [i for i in order if values[i] > 0 and examples.usable[i]]
        if unique:
            order = list({examples.texts[i]: i for i in reversed(order)}.values())
            order.sort(key=lambda i: (-values[i], i))
        if len(order) >= top:
            group = order[:top]
            prediction.append(len({examples.predictions.codes[i] for i in group}) == 1)
            labels = {examples.labels.codes[i] for i in group}
            label.append(len(labels) == 1 and -1 not in labels)
    if not prediction:
        return None, None, None
    known = examples.labels.known
    lnp = [own and not other for own, other in zip(label, prediction, strict=True)]
    return any(prediction), any(label) if known else None, any(lnp) if known else None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(2, 4), st.booleans())
def test_signed_tunings_equal_brute_force(seed: int, unique: bool, top: int, labelled: bool) -> None:
    random = np.random.default_rng(seed)
    m = 14
    examples = make_examples(
        random.integers(0, 2, m).tolist(),
        [int(x) if labelled and x >= 0 else None for x in random.integers(-1, 2, m)],
        random.integers(0, 9, m).tolist(),
        set(random.integers(0, m, 2).tolist()),
    )
    W = torch.from_numpy(random.integers(-3, 4, (m, 6)).astype(np.float32))
    orders = {"positive": W, "negative": -W, "absolute": W.abs()}
    found = find_tunings(orders.items(), examples, top, unique)
    for number, orderings in enumerate(found):
        expected = brute_force(W[:, number].numpy(), examples, top, unique)
        assert tuple(tuned(orderings).values()) == expected


def test_an_svd_component_may_be_tuned_to_a_prediction_and_lnp() -> None:
    """As in the paper: each of three orderings may produce a tuned component."""
    examples = make_examples([0, 0, 0, 1], [0, 1, 1, 1])
    W = column(2, 1, -1, -2)
    (component,) = find_tunings([("positive", W), ("negative", -W)], examples, top=2)
    assert tuned(component) == {"prediction": True, "label": True, "lnp": True}


def test_counts_of_two_methods_are_compared_by_the_hypergeometric_distribution() -> None:
    def rate(count: int, of: int) -> Rate:
        return Rate(count, of, 0, 1, 0, count / of if of else None)

    for a, n, b, m in ((5, 132, 1, 132), (5, 132, 0, 88), (9, 20, 2, 30), (0, 7, 0, 9)):
        ways = {k: math.comb(n, k) * math.comb(m, a + b - k) for k in range(a + b + 1)}
        p = sum(count for count in ways.values() if count <= ways[a] * (1 + 1e-9)) / sum(ways.values())
        assert compare_rates(rate(a, n), rate(b, m)) == pytest.approx(p)
    assert compare_rates(rate(5, 132), rate(1, 132)) == pytest.approx(0.2137, abs=1e-3)
    assert compare_rates(rate(1, 2), rate(0, 0)) is compare_rates(None, rate(1, 2)) is None


def test_without_labels_only_predictions_count() -> None:
    examples = make_examples([0, 0, 1], [None, None, None])
    (component,) = find_tunings([("positive", column(3, 2, 1))], examples, top=2)
    assert tuned(component) == {"prediction": True, "label": None, "lnp": None}
    assert component[0].label_purity is None
    expected = expected_rates(examples, 2)
    assert expected["label"] is None
    assert rates([component], expected)["lnp"] is None


def test_a_top_with_an_unlabelled_example_is_not_label_tuned() -> None:
    examples = make_examples([0, 0, 1], [1, None, 1])
    (component,) = find_tunings([("positive", column(3, 2, 1))], examples, top=2)
    assert tuned(component)["label"] is False
    assert component[0].label_purity == 0.5


def test_examples_set_aside_do_not_rank() -> None:
    examples = make_examples([0, 1, 1], [0, 1, 1], aside={0})
    (component,) = find_tunings([("positive", column(3, 2, 1))], examples, top=2)
    assert component[0].top == [1, 2]


@pytest.mark.parametrize("unique", [False, True])
def test_expected_rates_equal_the_count_over_all_groups(unique: bool) -> None:
    predictions, labels = [0, 0, 1, 0, 2, 1, 0, 0], [1, 1, 1, 0, 0, None, 1, 1]
    examples = make_examples(predictions, labels, [0, 1, 2, 3, 4, 5, 6, 0], aside={3})
    pool = [0, 1, 2, 4, 5, 6] if unique else [0, 1, 2, 4, 5, 6, 7]
    groups = list(itertools.combinations(pool, 3))
    same_prediction = [len({predictions[i] for i in g}) == 1 for g in groups]
    same_label = [len({labels[i] for i in g}) == 1 and labels[g[0]] is not None for g in groups]
    lnp = [b and not a for a, b in zip(same_prediction, same_label, strict=True)]
    found = expected_rates(examples, 3, unique=unique)
    assert found["prediction"] == pytest.approx(np.mean(same_prediction), abs=1e-12)
    assert found["label"] == pytest.approx(np.mean(same_label), abs=1e-12)
    assert found["lnp"] == pytest.approx(np.mean(lnp), abs=1e-12)
    assert expected_rates(examples, 3, orderings=3, unique=unique)["lnp"] == pytest.approx(3 * np.mean(lnp))


def test_chance_is_exact_and_holds_for_large_data() -> None:
    assert chance_of_agreement([5, 5], 10, 3) == Fraction(2 * 10, 120)
    assert chance_of_agreement([3], 3, 4) == 0
    assert float(chance_of_agreement([50_000, 50_000], 100_000, 16)) == pytest.approx(2**-15, rel=3e-3)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 10), (1, 1000), (0, 0)])
def test_wilson_solves_its_equation(successes: int, trials: int) -> None:
    low, high = wilson(successes, trials)
    if not trials:
        assert (low, high) == (0, 1)
        return
    share, z = successes / trials, 1.959964
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):  # the score test is just significant at the bounds
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(z * np.sqrt(bound * (1 - bound) / trials), rel=1e-6)


def test_rates_count_only_components_with_enough_examples() -> None:
    examples = make_examples([0, 0, 1, 1], [0, 1, 1, 0])
    scores = torch.tensor([[3.0, 1.0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 1]])
    found = rates(find_tunings([("positive", scores)], examples, 2), expected_rates(examples, 2))
    prediction = found["prediction"]
    assert prediction is not None
    assert (prediction.tuned, prediction.of, prediction.share) == (1, 2, 0.5)
    assert prediction.expected == pytest.approx(2 / 6)
