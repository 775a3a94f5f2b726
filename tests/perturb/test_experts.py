"""Experts are lifted, perturbed and found like any other matrices."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.session import prepare_run, read_prompts
from npeff.models.select import select_parameters
from npeff.perturb.weights import EditedWeights, by_parameter, moving, save_adapter
from npeff.perturb.where import by_layer_and_kind, find_places, largest_entries
from npeff.utils.errors import UserError
from tests import tiny
from tests.perturb.conftest import make_run
from tests.perturb.test_lift import check_against_autograd, random_sums


@pytest.fixture(scope="module")
def mixture():
    """gpt-oss: experts with biases and transposed weights."""
    network = tiny.network("gpt_oss")
    selection = select_parameters(network)
    generator = torch.Generator().manual_seed(1)
    return network, selection, {m.name: torch.randn(m.shape, generator=generator) for m in selection.modules}


def test_lift_is_the_sum_of_plain_gradients(tmp_path, review_file):
    tiny.save(tmp_path / "model", "gpt_oss")
    run = make_run(tmp_path / "run", tmp_path / "model", review_file, methods=())
    prepared = prepare_run(run, "cpu")
    check_against_autograd(run, prepared, read_prompts(run, prepared), random_sums(run, ("fisher",)))


def test_a_change_does_what_it_says_and_is_undone(mixture):
    network, selection, vector = mixture
    originals = {name: tensor.clone() for name, tensor in network.named_parameters()}
    changes = {name: change for name, (_, _, change) in by_parameter(selection.modules, vector).items()}
    assert changes["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 32, 96)
    one = next(m for m in selection.modules if m.name == "model.layers.1.mlp.experts.down_proj.3")
    assert torch.equal(changes["model.layers.1.mlp.experts.down_proj"][3], vector[one.name][:, :-1].T)
    assert torch.equal(changes["model.layers.1.mlp.experts.down_proj_bias"][3], vector[one.name][:, -1])
    with EditedWeights(selection.modules) as weights:
        weights.add({one.name: vector[one.name]}, 1.0)
        weights.add(vector, 0.5)
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, originals[name] + 0.5 * changes[name] if name in changes else originals[name])
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, originals[name])


def test_derivative_along_a_change(mixture):
    """J v against autograd: vᵀ(Jᵀ u) for a random u."""
    network, selection, vector = mixture
    ids = torch.arange(12).view(2, 6)
    with moving(selection.modules, vector) as derivative:
        found = derivative(network(ids).logits)
    u = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    weights = dict(network.named_parameters())
    changes = {name: change for name, (_, _, change) in by_parameter(selection.modules, vector).items()}
    for name in changes:
        weights[name].requires_grad_(True)
    gradients = torch.autograd.grad(network(ids).logits, [weights[name] for name in changes], u)
    network.requires_grad_(False)
    expected = sum((g.double() * c).sum() for g, c in zip(gradients, changes.values(), strict=True))
    assert float((found.double() * u).sum()) == pytest.approx(float(expected), rel=1e-3)


def test_experts_are_places(mixture):
    _, selection, vector = mixture
    vector = {name: matrix * 1e-3 for name, matrix in vector.items()}
    name = "model.layers.1.mlp.experts.down_proj.3"
    vector[name][2, 5] = 4.0
    vector[name][1, -1] = -3.0
    places = {place.module: place for place in find_places(vector)}
    assert places[name].share > 0.9
    assert (places[name].layer, places[name].kind) == (1, "mlp.experts.down_proj.3")
    layers, kinds, shares = by_layer_and_kind(list(places.values()))
    assert "mlp.experts.down_proj.*" in kinds
    assert "mlp.router" in kinds
    assert shares[layers.index(1)][kinds.index("mlp.experts.down_proj.*")] > 0.9
    first, second = largest_entries(selection, vector, 2)
    assert (first.parameter, first.index) == ("model.layers.1.mlp.experts.down_proj", [3, 5, 2])
    assert (second.parameter, second.index) == ("model.layers.1.mlp.experts.down_proj_bias", [3, 1])


def test_no_adapter_of_experts(mixture, tmp_path):
    _, selection, vector = mixture
    experts = [m for m in selection.modules if m.expert is not None]
    with pytest.raises(UserError, match=r"No adapter can hold a change of .*Save the delta"):
        save_adapter(tmp_path, experts, vector, 1.0, 0.1, "gpt_oss")
