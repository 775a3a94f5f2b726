import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npeff.decompose.blocks import Blocks, Rotation, chunks, leading_direction, pef_norms, share, spread_out
from npeff.store.rows import ArrayRows
from npeff.utils.errors import UserError
from tests.decompose.reference import pefs, ragged

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 9), st.integers(1, 5))
def test_shares_and_chunks_cover_every_example_once(ranks, rows, world):
    ends = np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)
    pieces = [piece for rank in range(world) for piece in chunks(ends, *share(ends, rank, world), rows)]
    assert [i for first, last in pieces for i in range(first, last)] == list(range(len(ranks)))
    assert all(ends[last] - ends[first] <= rows or last - first == 1 for first, last in pieces)


@pytest.mark.parametrize("keep", [0.0, 1e9])
@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_rows_come_scaled_to_unit_pefs(keep, chunk):
    source = ragged()
    matrices = np.zeros((20, 12, 12))
    for block, rows in Blocks(source, chunk, CPU, keep):
        scaled = rows if block.scale is None else rows * block.scale[:, None]
        owner = torch.arange(block.examples) if block.owner is None else block.owner
        for i, row in zip(owner.tolist(), scaled.numpy(), strict=True):
            matrices[block.start + i] += np.outer(row, row)
    np.testing.assert_allclose(matrices, pefs(source), atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("ranks", [None, [2] * 6])
def test_rows_of_any_size_are_scaled(size, ranks):
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    plain, large = ArrayRows(rows, ranks), ArrayRows(rows * size, ranks)
    for (one, a), (other, b) in zip(Blocks(plain, 4, CPU), Blocks(large, 4, CPU), strict=True):
        torch.testing.assert_close(one.scaled(a.T.clone()), other.scaled(b.T.clone()), rtol=1e-4, atol=1e-6)


def test_sums_and_spreads_over_the_rows_of_an_example():
    block = next(iter(Blocks(ArrayRows(torch.ones(4, 3), [1, 0, 3]), 10, CPU)))[0]
    assert block.sum_rows(torch.tensor([[1.0, 2, 3, 4]])).tolist() == [[1, 0, 9]]
    assert block.spread(torch.tensor([[5.0, 6, 7]])).tolist() == [[5, 7, 7, 7]]
    assert block.norms.tolist() == [1, 0, 1]


def test_names_the_example_that_is_not_finite():
    source = ragged(ranks=(1, 2))
    ends = np.cumsum(source.ranks)
    source.rows[ends[7] - 1, 3] = float("inf")
    with pytest.raises(UserError, match="Example 7 has entries that are not finite"):
        Blocks(source, 5, CPU)


def test_norms_and_leading_directions_match_numpy():
    source = ragged(seed=3)
    starts = np.concatenate([[0], np.cumsum(source.ranks)])
    norms = pef_norms(source.rows, source.ranks)
    for i, rank in enumerate(source.ranks):
        G = source.rows[starts[i] : starts[i + 1]].numpy()
        assert norms[i] == pytest.approx(np.linalg.norm(G.T @ G), rel=1e-5)
        directions = leading_direction(source, i).numpy()
        assert directions.shape == (min(rank, 1), source.dim)
        for direction in directions:
            assert abs(np.linalg.svd(G)[2][0] @ direction) == pytest.approx(1, abs=1e-5)


def test_rotation_keeps_inner_products_and_lifts_back():
    source = ragged(examples=15, dim=100)
    source.rows[2] = source.rows[1]  # rows that depend on each other
    rotation = Rotation(source, 4, torch.device("cpu"))
    scaled = np.concatenate([np.zeros((0, 100)), *(_unit(source, i) for i in range(15))])
    short = rotation.source.rows.double().numpy()
    np.testing.assert_allclose(short @ short.T, scaled @ scaled.T, atol=1e-5)
    np.testing.assert_allclose(rotation.lift(rotation.source.rows[3:5]), scaled[3:5], atol=1e-4)


def _unit(source, i):
    G = source.read(i, i + 1).double().numpy()
    return G / np.sqrt(np.linalg.norm(G.T @ G)) if len(G) else G


def test_kmeans_plus_plus_spreads_out():
    vectors = torch.eye(4).repeat_interleave(25, dim=0)
    vectors[::2] *= -1  # the sign of a direction means nothing
    chosen = spread_out(vectors, 4, torch.Generator().manual_seed(0))
    assert sorted((chosen // 25).tolist()) == [0, 1, 2, 3]
    assert len(set(spread_out(vectors, 10, torch.Generator().manual_seed(0)).tolist())) == 10
