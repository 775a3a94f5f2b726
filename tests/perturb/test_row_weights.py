"""Components as sums of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.decompose.run import open_decomposition
from npeff.perturb.row_weights import check_component, check_method, component_sums, truncate
from npeff.utils.errors import UserError
from tests.perturb.test_lift import METHODS, cosine


@pytest.mark.parametrize("method", METHODS)
def test_components_are_sums_of_rows(run, method):
    decomposition = open_decomposition(run, method)
    sums = component_sums(decomposition, run.source(decomposition.kind), torch.eye(6, dtype=torch.float64))
    rows = run.source(decomposition.kind).read(0, 40)
    rebuilt = sums.weights[decomposition.kind] @ rows
    torch.testing.assert_close(rebuilt, sums.vectors, rtol=1e-4, atol=1e-5)
    for j in range(6):
        assert cosine(sums.vectors[j], decomposition.components[j]) > 0.999, method


def test_truncation_reaches_the_fidelity_and_leaves_examples_out(run, prepared, lifter):
    decomposition = open_decomposition(run, "npeff")
    source = run.source("fisher")
    sums = component_sums(decomposition, source, torch.eye(6)[:3])
    cut, kept, cosines = truncate(sums, {"fisher": source}, 0.8, chunk=7)
    rows = source.read(0, 40)
    for j in range(3):
        used = int((cut.weights["fisher"][j] != 0).sum())
        assert used == kept[j] < 40
        assert cosines[j] >= 0.8
        torch.testing.assert_close(cut.weights["fisher"][j] @ rows, cut.vectors[j], rtol=1e-4, atol=1e-5)
        assert cosine(cut.vectors[j], sums.vectors[j]) == pytest.approx(cosines[j], abs=1e-4)
        kept_sizes = (sums.weights["fisher"][j].abs() * rows.norm(dim=1))[cut.weights["fisher"][j] != 0]
        left_sizes = (sums.weights["fisher"][j].abs() * rows.norm(dim=1))[cut.weights["fisher"][j] == 0]
        assert kept_sizes.min() >= left_sizes.max()
    assert set(lifter.examples(cut)) == set(np.flatnonzero((cut.weights["fisher"] != 0).any(0)))
    whole, kept, cosines = truncate(sums, {"fisher": source}, 1.1)
    assert min(cosines) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(whole.weights["fisher"], sums.weights["fisher"])


def test_held_out_examples_carry_no_weight(run):
    decomposition = open_decomposition(run, "npeff")
    decomposition.notes.held_out = [0, 5]
    sums = component_sums(decomposition, run.source("fisher"), torch.eye(6))
    assert not sums.weights["fisher"][:, [0, 5]].any()
    assert sums.weights["fisher"].any()


def test_wrong_components_and_methods_are_refused(run):
    decomposition = open_decomposition(run, "npeff")
    with pytest.raises(UserError, match="no component 6"):
        check_component(decomposition, 6)
    decomposition.coefficients = decomposition.coefficients.clone()
    decomposition.coefficients[:, 2] = 0
    with pytest.raises(UserError, match="Component 2 is dead"):
        check_component(decomposition, 2)
    object.__setattr__(decomposition.config, "method", "sae")
    with pytest.raises(UserError, match="activations"):
        check_method(decomposition)
