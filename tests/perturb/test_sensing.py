"""Fixed-point continuation: planted vectors, optimality, and sketches that cannot be inverted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.make import make_sketch
from npeff.models.select import CapturedModule
from npeff.perturb.config import SensingConfig
from npeff.perturb.lift import norm
from npeff.perturb.sensing import (
    THOROUGH,
    Scaled,
    _iterate,
    _State,
    check_sketch,
    gram_product,
    plant,
    planted_cosine,
    sense,
)
from npeff.utils.errors import UserError


def modules():
    layers = {"first": nn.Linear(48, 40), "second": nn.Linear(32, 64, bias=False)}
    return [CapturedModule(name, layer, True, layer.bias is not None) for name, layer in layers.items()]


def scaled(kind="sparse", dim=512, copies=1):
    return Scaled(make_sketch(SketchConfig(sketch=kind, dim=dim, copies=copies), modules()))


def dense(s):
    """The scaled sketch as a matrix [p, n]."""
    columns = []
    for row in torch.eye(s.sketch.dim):
        columns.append(torch.cat([part.reshape(-1) for _, part in s.rmatvec(row)]))
    return torch.stack(columns)


@pytest.mark.parametrize(("kind", "copies"), [("sparse", 1), ("kron", 1), ("kron", 4), ("blocks", 4), ("dense", 1)])
def test_planted_vectors_are_found(kind, copies):
    s = scaled(kind, 256 if kind == "dense" else 512, copies)
    if kind == "sparse":
        assert planted_cosine(s, 8, THOROUGH) > 0.99
    found = sense(s, s.sketch.matvec(plant(s.sketch, 8)), THOROUGH)
    planted = plant(s.sketch, 8)
    assert sum(float((planted[name] * part).sum()) for name, part in found.vector.items()) > 0.99
    assert found.residual < 0.05
    assert 8 <= found.entries < 1500
    assert norm(found.vector) == pytest.approx(1, abs=1e-5)


def test_the_papers_setting_takes_one_iteration_for_each_mu():
    s = scaled()
    h = s.sketch.matvec(plant(s.sketch, 8))
    coarse = sense(s, h, SensingConfig(mu=1e-2))
    fine = sense(s, h, SensingConfig(mu=1e-4))
    assert 2 <= coarse.iterations < fine.iterations < 12
    assert coarse.entries < fine.entries


@pytest.mark.parametrize("long_steps", [False, True])
def test_fixed_point_is_optimal(long_steps):
    """At the minimum of μ‖u‖₁ + ‖Au − h‖²/2: Aᵀ(h − Au) is μ·sign(u) where u is not zero, and at most μ elsewhere."""
    s = scaled(dim=256)
    h = s.sketch.matvec(plant(s.sketch, 6))
    h, mu = h / h.norm(), 0.02
    state = _State({m.name: torch.zeros(m.shape) for m in s.sketch.modules.values()}, h)
    step = s.step
    for _ in range(400):
        state, change, step = _iterate(s, state, h, mu, step if long_steps else s.step)
    assert change < 1e-4
    A = dense(s)
    u = torch.cat([part.reshape(-1) for part in state.u.values()])
    slope = A.T @ (h - A @ u)
    assert (u != 0).sum() > 4
    torch.testing.assert_close(slope[u != 0], mu * u[u != 0].sign(), rtol=2e-2, atol=0)
    assert slope.abs().max() <= mu * 1.02


def test_scaled_sketch_has_norm_at_most_one():
    s = scaled("kron")
    largest = float(torch.linalg.matrix_norm(dense(s), 2))
    assert 0.9 < largest < 1
    y = torch.randn(s.sketch.dim, generator=torch.Generator().manual_seed(0))
    A = dense(s) * s.norm
    torch.testing.assert_close(gram_product(s.sketch, y), A @ (A.T @ y), rtol=1e-3, atol=1e-2)
    assert s.step == min(1 + 1.665 * (1 - 512 / 4008), 1.999)


def test_a_sketch_that_is_too_small_is_refused(capsys):
    with pytest.raises(UserError, match=r"cannot invert this run's sketch .* among 4,008 need p = 265"):
        check_sketch(scaled("sparse", 64))
    assert "Trying the sketch" not in capsys.readouterr().err  # no trial is needed to know
    with pytest.raises(UserError, match=r"cannot invert this run's sketch .* comes back with a cosine of 0\."):
        check_sketch(scaled("kron", 224))
    assert check_sketch(scaled("sparse", 1024)) > 0.9


def test_wrong_options_are_refused():
    for wrong in ({"mu": 0.0}, {"inner_iterations": 0}):
        with pytest.raises(UserError):
            SensingConfig(**wrong)
    s = scaled()
    with pytest.raises(UserError, match="Lower --mu"):
        sense(s, s.sketch.matvec(plant(s.sketch, 8)), SensingConfig(mu=100.0))
