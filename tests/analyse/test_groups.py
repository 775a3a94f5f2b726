import numpy as np
import pytest
import torch

from npeff.analyse.groups import chance_correlation, group_mix, group_scores, groups, responses
from npeff.decompose.baselines import GradientSvd
from npeff.decompose.config import FitConfig
from npeff.decompose.npeff import Npeff


def made_of(H, W):
    """A decomposition with these components and coefficients."""
    made = Npeff(FitConfig(components=len(H)))
    made.components = torch.nn.functional.normalize(torch.as_tensor(H, dtype=torch.float32), dim=1)
    made.coefficients = torch.as_tensor(W, dtype=torch.float32)
    return made


@pytest.fixture
def split():
    """Mechanism A is two directions used together, B one direction under two numbers, C and D are single."""
    rng = np.random.default_rng(0)
    H = np.eye(30)[[0, 1, 2, 2, 3, 4]]
    H[3] += 0.2 * np.eye(30)[5]
    uses = rng.random((600, 4)) < 0.2
    sizes = 0.5 + rng.random((600, 4))
    a, b, c, d = (uses * sizes).T
    first = rng.random(600) < 0.5
    return made_of(H, np.stack([a, 0.5 * a * (0.9 + 0.2 * rng.random(600)), b * first, b * ~first, c, d], axis=1))


def test_both_ways_of_splitting_make_a_group(split):
    found = groups(split)
    assert sorted(group.members for group in found) == [[0, 1], [2, 3]]
    assert all(group.correlation > 0.8 and group.parent is None for group in found)
    correlation = np.corrcoef(responses(split).T.numpy())
    for group in found:
        assert group.correlation == pytest.approx(correlation[*group.members], abs=1e-5)


def test_the_halves_of_a_direction_are_never_used_together_but_respond_together(split):
    assert np.corrcoef(split.coefficients[:, 2], split.coefficients[:, 3])[0, 1] < 0
    expected = split.coefficients @ (split.components @ split.components.T).square()
    torch.testing.assert_close(responses(split), expected)


def test_groups_are_nested_and_independent_components_have_none():
    rng = np.random.default_rng(1)
    base, part = rng.random((2, 400)) ** 4
    W = np.stack([base + 0.02 * rng.random(400), base, base + part, rng.random(400) ** 4, rng.random(400) ** 4], axis=1)
    found = groups(made_of(np.eye(9)[:5], W))
    assert [group.members for group in found] == [[0, 1], [0, 1, 2]]
    assert [group.parent for group in found] == [1, None]
    assert [group.number for group in found] == [0, 1]
    by_chance = [bool(groups(made_of(np.eye(9)[:5], rng.random((400, 5)) ** 4))) for _ in range(40)]
    assert sum(by_chance) <= 6  # one in twenty is expected


def test_chance_is_what_shuffled_columns_give():
    respond = torch.rand(300, 6, generator=torch.Generator().manual_seed(0))
    respond[:, 1] = respond[:, 0]
    largest = [
        max(abs(np.corrcoef(np.random.default_rng(s).permuted(respond.numpy(), axis=0).T)[np.triu_indices(6, 1)]))
        for s in range(20)
    ]
    assert 0 < chance_correlation(respond) <= 1.5 * max(largest)
    assert chance_correlation(respond) < 0.3


def test_a_zero_column_and_too_few_components_are_no_group():
    W = np.random.default_rng(2).random((50, 3))
    W[:, 2] = 0
    assert all(2 not in group.members for group in groups(made_of(np.eye(5)[:3], W)))
    assert groups(made_of(np.eye(5)[:1], W[:, :1])) == []


def test_the_direction_of_a_group_is_the_leading_eigenvector_of_its_part_of_the_mean_fisher():
    rng = np.random.default_rng(3)
    made = made_of(rng.standard_normal((4, 7)), rng.random((40, 4)) * [1, 3, 1, 2])
    members = [0, 1, 3]
    H = made.components.double().numpy()
    part = sum(float(made.energy[j]) * np.outer(H[j], H[j]) for j in members)
    expected = np.linalg.eigh(part)[1][:, -1]
    mix = group_mix(made, members).numpy()
    assert mix[2] == 0
    assert abs(mix @ H @ expected) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(mix @ H) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(group_scores(made.coefficients, members), made.coefficients.numpy()[:, members].sum(1))


def test_signed_coefficients_count_by_their_size():
    made = GradientSvd(FitConfig(method="svd-gradients", components=3))
    made.components = torch.eye(3)
    x = torch.randn(200, generator=torch.Generator().manual_seed(0))
    made.coefficients = torch.stack([x, -x.abs(), torch.rand(200, generator=torch.Generator().manual_seed(1))], dim=1)
    assert [group.members for group in groups(made)] == [[0, 1]]
