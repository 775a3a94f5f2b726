"""Rows of some of the examples of a source."""

import numpy as np
import torch

from npeff.store.rows import SubsetRows, hold_out
from tests.decompose.reference import ragged


def test_a_subset_reads_like_its_examples():
    source = ragged(examples=30)
    chosen = np.array([0, 3, 4, 11, 12, 13, 29])
    subset = SubsetRows(source, chosen)
    assert subset.ranks.tolist() == source.ranks[chosen].tolist()
    for start in range(len(chosen) + 1):
        for stop in range(start, len(chosen) + 1):
            expected = torch.cat([torch.empty(0, 12), *(source.read(i, i + 1) for i in chosen[start:stop])])
            assert torch.equal(subset.read(start, stop), expected)


def test_held_out_examples_are_the_same_every_time():
    held_in, held_out = hold_out(100, 0.3)
    assert len(held_out) == 30
    assert sorted([*held_in, *held_out]) == list(range(100))
    assert (hold_out(100, 0.3)[1] == held_out).all()
    assert set(hold_out(100, 0.2)[1]) < set(held_out)
