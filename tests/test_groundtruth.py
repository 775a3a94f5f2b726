"""The toy models of the benchmark: their rows are derivatives, and what is scored is what is meant."""

import pytest
import torch

from bench.advice import FREQUENCIES, found_share, planted, users_needed
from bench.groundtruth import cosines, follow
from bench.toys import CompressedComputation, Superposition, sparse_features


@pytest.fixture(scope="module")
def superposition():
    return Superposition(5, 2, seed=0, steps=300)


@pytest.fixture(scope="module")
def compressed():
    return CompressedComputation(features=12, neurons=6, embedding=40, steps=200, density=0.1)


def test_rows_of_superposition_are_those_of_autograd(superposition):
    examples = superposition.examples(60, 0.3, seed=1)
    starts = examples.fisher.ranks.cumsum() - examples.fisher.ranks
    for x, start, rank, gradient in zip(
        examples.features, starts, examples.fisher.ranks, examples.gradient.rows, strict=True
    ):
        J = torch.func.jacrev(lambda W, x=x: superposition.output(x[None], W)[0])(superposition.W)
        J = J.transpose(1, 2).flatten(1)  # columns of W one after another
        rows = examples.fisher.rows[start : start + rank]
        torch.testing.assert_close(rows.T @ rows, J.T @ J)
        y = superposition.output(x[None], superposition.W)[0]
        torch.testing.assert_close(gradient, y @ J)


def test_a_mechanism_is_a_column_at_its_place(superposition):
    truth = superposition.mechanisms().view(5, 5, 2)
    for i in range(5):
        column = superposition.W[:, i]
        torch.testing.assert_close(truth[i, i], column / column.norm())
        assert truth[i].count_nonzero() == 2


def test_rows_of_compressed_computation_are_the_leading_ones(compressed):
    examples = compressed.examples(40, seed=3, most=6)
    starts = examples.fisher.ranks.cumsum() - examples.fisher.ranks
    for x, start, rank, gradient in zip(
        examples.features, starts, examples.fisher.ranks, examples.gradient.rows, strict=True
    ):
        J = torch.func.jacrev(lambda A, x=x: compressed.output(x[None], A)[0])(compressed.A).flatten(1)
        rows = examples.fisher.rows[start : start + rank].double()  # as many as neurons: nothing is left out
        torch.testing.assert_close(rows.T @ rows, (J.T @ J).double(), atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(gradient, compressed.output(x[None], compressed.A)[0] @ J, atol=1e-5, rtol=1e-4)


def test_what_reads_one_feature_and_covers_it(compressed):
    feature, neurons = 4, 6
    reads = torch.einsum("ka,b->kab", torch.eye(neurons), torch.linalg.inv(compressed.R)[feature]).flatten(1)
    assert compressed.share_of_feature(reads)[:, feature].min() > 0.999
    whole = torch.einsum("ka,b->kab", torch.eye(neurons), compressed.R[:, feature]).flatten(1)
    assert compressed.covered(whole, feature) == pytest.approx(1, abs=1e-4)
    assert compressed.covered(whole[:1], feature) < 1


def test_scores():
    truth = torch.eye(3)
    found = torch.tensor([[0.0, 2, 0], [-3, 0, 0], [0, 0.6, 0.8]])
    assert cosines(truth, found) == {"mean": pytest.approx((1 + 1 + 0.8) / 3), "worst": pytest.approx(0.8)}
    x = sparse_features(500, 3, 0.3, seed=0)
    assert set(x.unique().tolist()) > {0.0}
    scored = follow(truth, found, x[:, [1, 0, 2]] * 2, x)
    assert scored["follows"] == pytest.approx(1, abs=1e-5)
    assert abs(scored["chance"]) < 0.2


def test_users_of_planted_mechanisms_are_counted():
    U, rows, users = planted(300, seed=0)
    assert len(rows.rows) == 300
    frequent = int(users.argmax())
    assert abs(users[frequent] - 300 * FREQUENCIES[frequent]) < 40
    used = (rows.rows @ U[frequent]).abs() > 0.5  # what one of 512 entries of noise hardly reaches
    assert abs(int(used.sum()) - users[frequent]) < 20
    pairs = [[3, 0.1], [10, 0.95], [20, 0.95], [40, 0.99], [40, 0.2], [100, 1.0]]
    assert found_share(pairs, 32, 64) == 0.5
    assert users_needed(pairs) == 64
    assert users_needed([[users, 0.95] for users in (3, 5, 9, 17, 33, 65)]) == 2
