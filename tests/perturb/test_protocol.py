"""Who is measured."""

from __future__ import annotations

import numpy as np
import pytest

from npeff.decompose.run import open_decomposition
from npeff.perturb.protocol import make_plan
from npeff.utils.errors import UserError


def test_random_examples_do_not_depend_on_the_components(run):
    decomposition = open_decomposition(run, "npeff")
    plans = [make_plan(run, decomposition, chosen, 3, 4, 16, 0) for chosen in ((4,), (1, 4), ())]
    for plan in plans:
        np.testing.assert_array_equal(plan.random, plans[0].random)
        np.testing.assert_array_equal(np.union1d(plan.random, plan.background), np.arange(40))
    np.testing.assert_array_equal(plans[0].tops[4][0].top, plans[1].tops[4][0].top)
    more = make_plan(run, decomposition, (), 5, 4, 16, 0)
    assert set(plans[2].components) <= set(more.components)


def test_top_examples_have_the_largest_coefficients(run):
    decomposition = open_decomposition(run, "npeff")
    (tops,) = make_plan(run, decomposition, (2,), 1, 4, 16, 0).tops[2]
    coefficients = decomposition.coefficients[:, 2].numpy()
    expected = sorted(np.flatnonzero(coefficients > 0).tolist(), key=lambda i: -coefficients[i])
    assert [*tops.top.tolist(), *tops.related.tolist()] == expected[:8]


def test_too_few_examples_are_refused(run):
    with pytest.raises(UserError, match="40 usable examples: too few"):
        make_plan(run, open_decomposition(run, "npeff"), (1,), 1, 4, 37, 0)
