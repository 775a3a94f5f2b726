"""The sparse sketch alone: its blocks."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch import sparse
from npeff.collect.sketch.make import make_sketch
from npeff.utils.errors import UserError
from tests.collect.sketch.layers import linear, random_gradient


@pytest.mark.parametrize("dim", [1, 16, 100, 16385])
def test_sparse_needs_a_dimension_that_32_divides(dim: int) -> None:
    with pytest.raises(UserError, match="32"):
        SketchConfig("sparse", dim=dim)


def test_sparse_is_the_same_kept_or_made_again_and_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear("layer", 23, 31)
    config = SketchConfig("sparse", dim=160)
    gradient = random_gradient([module])
    y = torch.randn(160, generator=torch.Generator().manual_seed(1))
    results, kept_picks = [], []
    for kept, block in ((2**28, 2**19), (0, 2**19), (0, 160 * 7), (2**28, 1)):
        monkeypatch.setattr(sparse, "KEPT_BYTES", kept)
        monkeypatch.setattr(sparse, "BLOCK_PICKS", block)
        sketch = make_sketch(config, [module])
        for _ in range(2):
            results.append((sketch.matvec(gradient), sketch.rmatvec_module(module, y)))
        kept_picks.append(bool(sketch._kept))  # type: ignore[attr-defined]
    for projected, lifted in results[1:]:
        torch.testing.assert_close(projected, results[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lifted, results[0][1], atol=1e-6, rtol=1e-5)
    assert kept_picks == [True, False, False, True]
    assert torch.equal(results[0][0], results[1][0])  # and to the last bit when nothing differs
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("batch", [1, 3])
def test_sparse_sums_rows_without_embedding_bag_too(batch: int) -> None:
    table = torch.randn(40, batch, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sparse._sum_rows(table, rows), table[rows].sum(1))
