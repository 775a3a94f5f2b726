"""Fishers of lower rank."""

from __future__ import annotations

import torch

from npeff.paper.measures import ReducedRows
from npeff.store.rows import ArrayRows


def test_reduced_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = [3, 0, 1, 2]
    source = ArrayRows(torch.randn(6, 10, generator=generator), ranks)
    reduced = ReducedRows(source, 2)
    assert reduced.ranks.tolist() == [2, 0, 1, 2]
    rows = reduced.read(0, 4)
    assert rows.shape == (5, 10)
    # the best two rows of the first example, at unit norm
    whole = source.read(0, 1)
    values, vectors = torch.linalg.eigh(whole.T @ whole)
    best = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
    assert torch.allclose(rows[:2].T @ rows[:2], best / best.norm(), atol=1e-5)
    assert torch.equal(torch.cat([reduced.read(0, 2), reduced.read(2, 4)]), rows)
