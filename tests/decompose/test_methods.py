import itertools
import json

import numpy as np
import pytest
import torch

from npeff.decompose.baselines import Clusters, GradientSvd, Sae
from npeff.decompose.config import METHODS, FitConfig, SaeConfig
from npeff.decompose.methods import create, load
from npeff.decompose.npeff import Npeff
from npeff.store.rows import ArrayRows
from npeff.utils.errors import UserError
from tests.decompose.reference import planted

QUICK = SaeConfig(top_k=3, sae_steps=60, sae_batch=64, sae_patience=20)


def rank_one(seed=0, examples=80, dim=20):
    """One row per example, the third example set aside."""
    rows = torch.randn(examples - 1, dim, generator=torch.Generator().manual_seed(seed))
    ranks = [1] * examples
    ranks[2] = 0
    return ArrayRows(rows, ranks)


def unit(source):
    rows = torch.zeros(len(source.ranks), source.dim)
    rows[torch.from_numpy(source.ranks > 0)] = torch.nn.functional.normalize(source.rows, dim=1)
    return rows.double().numpy()


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_share_one_interface(method, tmp_path):
    source = rank_one()
    config = FitConfig(method=method, components=5, max_passes=30, sae=QUICK, chunk=16)
    fitted = create(config).fit(source)
    assert fitted.components.shape == (5, 20)
    assert fitted.coefficients.shape == (80, 5)
    assert fitted.residuals.shape == (80,)
    assert (fitted.coefficients[2] == 0).all()
    assert float(fitted.energy.sum()) == pytest.approx(1)
    torch.testing.assert_close(fitted.transform(source), fitted.coefficients, atol=2e-3, rtol=0)
    for order in fitted.orders:
        assert fitted.scores(order).shape == (80, 5)

    fitted.save(tmp_path / "one")
    again = load(tmp_path / "one")
    assert type(again) is type(fitted)
    assert again.config == config
    assert torch.equal(again.components, fitted.components)
    assert torch.equal(again.coefficients, fitted.coefficients)
    assert torch.equal(again.transform(source), fitted.transform(source))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [
        "config.json",
        "diagnostics.json",
        "history.csv",
        "history.png",
        "history.svg",
        "tensors.safetensors",
    ]
    diagnostics = json.loads((tmp_path / "one" / "diagnostics.json").read_text())
    assert "loss per example" in diagnostics["verdict"]
    assert len(diagnostics["component_energy"]) == 5
    lines = (tmp_path / "one" / "history.csv").read_text().splitlines()
    assert len(lines) == len(fitted.history.steps) + 1


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_refuse_the_same(method):
    config = FitConfig(method=method, components=6, sae=QUICK)
    with pytest.raises(UserError, match=r"6 components need as many examples; there are 5 \(and 2 that are zero\)"):
        create(config).fit(ArrayRows(torch.cat([torch.eye(5, 8), torch.zeros(1, 8)]), [1] * 6 + [0]))
    with pytest.raises(UserError, match="Every example is zero"):
        create(config).fit(ArrayRows(torch.zeros(9, 8)))
    rows = torch.randn(9, 8)
    rows[4, 2] = float("nan")
    with pytest.raises(UserError, match="Example 4 has entries that are not finite"):
        create(config).fit(ArrayRows(rows))
    fitted = create(config).fit(ArrayRows(torch.randn(12, 8)))
    with pytest.raises(UserError, match="The rows have 9 entries, the components 8"):
        fitted.transform(ArrayRows(torch.randn(3, 9)))


def test_gradients_of_either_sign_are_the_same_pef():
    source = rank_one()
    flipped = ArrayRows(source.rows * torch.where(torch.arange(79) % 3 == 0, -1.0, 1.0)[:, None], source.ranks)
    one, two = (create(FitConfig(method="gnpeff", components=4, max_passes=5)).fit(rows) for rows in (source, flipped))
    torch.testing.assert_close(one.coefficients, two.coefficients, atol=1e-4, rtol=0)


def test_kmeans_finds_the_best_clustering_of_a_few_points():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.standard_normal((3, 4)) * 0.1 + 3 * np.eye(4)[i] for i in range(3)])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    best = min(
        sum(((points[np.array(labels) == k] - points[np.array(labels) == k].mean(0)) ** 2).sum() for k in set(labels))
        for labels in itertools.product(range(3), repeat=9)
    )
    fitted = Clusters(FitConfig(method="clusters", components=3)).fit(ArrayRows(torch.from_numpy(points).float()))
    assert float(fitted.residuals.sum()) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("memory_gb", [0.0, 1.0])
def test_kmeans_is_lloyds_algorithm(chunk, memory_gb):
    source = rank_one(dim=200)
    x = unit(source)
    x = x[np.linalg.norm(x, axis=1) > 0]
    config = FitConfig(method="clusters", components=6, max_passes=3, chunk=chunk, memory_gb=memory_gb)
    fitted = Clusters(config).fit(source)
    losses = [step.loss for step in fitted.history.steps]
    assert losses == sorted(losses, reverse=True)
    distances = ((x[:, None] - fitted.components.double().numpy()) ** 2).sum(axis=2)
    kept = fitted.coefficients[torch.from_numpy(source.ranks > 0)].numpy()
    assert (kept.argmax(axis=1) == distances.argmin(axis=1)).all()
    assert ((kept > 0).sum(axis=1) == 1).all()
    np.testing.assert_allclose(kept.max(axis=1), 1 / (1 + np.sqrt(distances.min(axis=1))), atol=1e-3)


def test_an_empty_cluster_starts_again():
    rows = torch.eye(3, 6).repeat(4, 1)
    fitted = Clusters(FitConfig(method="clusters", components=5, seed=1, max_passes=20)).fit(ArrayRows(rows))
    assert float(fitted.residuals.sum()) < 1e-5


@pytest.mark.parametrize(("dim", "exact", "memory_gb"), [(20, True, 1.0), (300, True, 1.0), (300, False, 0.0)])
def test_svd_agrees_with_numpy(dim, exact, memory_gb, monkeypatch):
    if not exact:
        monkeypatch.setattr("npeff.decompose.baselines.EXACT", 1)
    source = rank_one(dim=dim)
    source.rows *= torch.linspace(3, 0.1, dim) ** 2  # singular values that differ
    U, s, Vt = np.linalg.svd(unit(source), full_matrices=False)
    config = FitConfig(method="svd-gradients", components=4, chunk=9, memory_gb=memory_gb, tolerance=1e-9)
    fitted = GradientSvd(config).fit(source)
    signs = np.sign((fitted.components.numpy() * Vt[:4]).sum(axis=1))
    np.testing.assert_allclose(fitted.components.numpy(), signs[:, None] * Vt[:4], atol=2e-3)
    np.testing.assert_allclose(fitted.coefficients.numpy(), (U * s)[:, :4] * signs, atol=2e-3)
    assert fitted.history.ending == ("exact" if exact else "converged")


def test_svd_ranks_in_three_ways_and_has_no_more_components_than_numbers():
    fitted = GradientSvd(FitConfig(method="svd-gradients", components=2)).fit(rank_one())
    assert torch.equal(fitted.scores("negative"), -fitted.scores("positive"))
    assert torch.equal(fitted.scores("absolute"), fitted.coefficients.abs())
    with pytest.raises(UserError, match="at most 20 components, not 21"):
        GradientSvd(FitConfig(method="svd-gradients", components=21)).fit(rank_one())
    with pytest.raises(UserError, match="can be ranked by positive"):
        create(FitConfig(components=2)).fit(rank_one()).scores("absolute")


def test_sae_keeps_its_constraints_and_learns():
    U, _ = planted(0, factors=12, dim=16)
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([U[torch.randperm(12, generator=generator)[:2]].sum(dim=0) for _ in range(200)])
    options = SaeConfig(top_k=2, sae_steps=600, sae_batch=100, sae_patience=100, sae_rate=1e-2)
    fitted = Sae(FitConfig(method="sae", components=12, sae=options)).fit(ArrayRows(rows))
    for matrix in (fitted.components, fitted.encoder):
        torch.testing.assert_close(matrix.norm(dim=1), torch.ones(12))
    assert ((fitted.coefficients > 0).sum(dim=1) <= 2).all()
    assert (fitted.coefficients >= 0).all()
    assert fitted.history.loss < 0.5 * fitted.history.steps[0].loss


def test_k_of_the_sae_scales_with_its_width():
    """The paper has 32 of 512 and 32 of 2,048."""
    assert [SaeConfig().active(count) for count in (4, 16, 31, 62, 132, 512, 2048)] == [1, 1, 2, 4, 8, 32, 32]
    assert SaeConfig(top_k=5).active(2048) == 5
    x = ArrayRows(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)))
    config = FitConfig(method="sae", components=32, sae=SaeConfig(sae_steps=20, sae_patience=10))
    assert (Sae(config).fit(x).coefficients > 0).sum(dim=1).max() == 2
    with pytest.raises(UserError, match="--top-k is 0; it should be at least 1"):
        SaeConfig(top_k=0)


def test_sae_steps_are_adam_on_the_sphere():
    """Against torch's Adam fed with tangent gradients."""
    x = torch.nn.functional.normalize(torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    options = SaeConfig(top_k=2, sae_steps=5, sae_patience=10, sae_rate=1e-2)
    ours = Sae(FitConfig(method="sae", components=4, sae=options))
    ours._train(x)
    E = torch.nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    E, D, b = (value.clone().requires_grad_() for value in (E, E, x.mean(dim=0)))
    adam = torch.optim.Adam([E, D, b], lr=1e-2)
    for _ in range(5):
        latents = (x - b) @ E.T
        mask = latents >= latents.topk(2, dim=1).values[:, -1:]
        adam.zero_grad()
        (x - b - (latents * mask).relu() @ D).square().sum(dim=1).mean().backward()
        with torch.no_grad():
            for value in (E, D):
                value.grad -= (value.grad * value).sum(dim=1, keepdim=True) * value
            adam.step()
            for value in (E, D):
                value.copy_(torch.nn.functional.normalize(value, dim=1))
    torch.testing.assert_close(ours.encoder, E.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.components, D.detach(), atol=1e-5, rtol=0)


def test_a_damaged_or_foreign_decomposition_is_refused(tmp_path):
    fitted = create(FitConfig(components=2, max_passes=2)).fit(rank_one())
    fitted.notes.run = "this"
    fitted.save(tmp_path)
    load(tmp_path, "this")
    with pytest.raises(UserError, match="belongs to another run"):
        load(tmp_path, "that")
    with pytest.raises(UserError, match="no finished decomposition"):
        load(tmp_path / "elsewhere")
    tensors = tmp_path / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(UserError, match="missing or damaged"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="damaged, or was written by another version"):
        load(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"components": 0}, {"tolerance": -1.0}, {"chunk": 0}, {"memory_gb": -0.1}, {"max_passes": 0}, {"seed": -1}],
)
def test_options_out_of_range_are_refused(values):
    with pytest.raises(UserError):
        FitConfig(**({"components": 2} | values))


def test_a_fit_leaves_denormal_numbers_as_they_were():
    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    Npeff(FitConfig(components=2, max_passes=3)).fit(ArrayRows(rows))
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    assert float((tiny * 0.5)[0]) > 0
