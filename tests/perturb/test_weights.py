"""Weights put back bit for bit, and derivatives along a change of them."""

from __future__ import annotations

import contextlib

import pytest
import torch

from npeff.models.select import select_parameters
from npeff.perturb.weights import EditedWeights, moving
from tests import tiny
from tests.perturb.test_evaluate import random_vector


def test_parameters_are_themselves_again_after_derivatives(prepared):
    modules = prepared.selection.modules
    before = [dict(module.module.named_parameters()) for module in modules]
    with contextlib.suppress(KeyboardInterrupt), moving(modules, random_vector(prepared)):
        assert modules[0].module.weight is not before[0]["weight"]
        raise KeyboardInterrupt
    for module, parameters in zip(modules, before, strict=True):
        now = dict(module.module.named_parameters())
        assert now.keys() == parameters.keys()
        assert all(now[name] is parameter for name, parameter in parameters.items())


def test_weights_come_back_bit_for_bit(prepared):
    before = prepared.model.fingerprint()
    vector = random_vector(prepared)
    with EditedWeights(prepared.selection.modules) as weights:
        weights.add(vector, 3.0)
        assert prepared.model.fingerprint() != before
        weights.add(vector, -1e-3)
    assert prepared.model.fingerprint() == before

    def interrupted():
        with EditedWeights(prepared.selection.modules) as weights:
            weights.add(vector, 3.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert prepared.model.fingerprint() == before
    # a failure in the middle of a change: the second module's part has a wrong shape
    names = list(vector)
    broken = vector | {names[1]: torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="shape"), EditedWeights(prepared.selection.modules) as weights:
        weights.add(broken, 1.0)
    assert prepared.model.fingerprint() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_does_what_it_says(dtype):
    network = tiny.network("gpt2").to(dtype)
    selection = select_parameters(network)
    vector = {m.name: torch.randn(m.shape, generator=torch.Generator().manual_seed(1)) for m in selection.modules}
    del vector[selection.modules[0].name]
    originals = {name: tensor.clone() for name, tensor in network.named_parameters()}
    with EditedWeights(selection.modules) as weights:
        weights.add({selection.modules[0].name: torch.ones(selection.modules[0].shape)}, 1.0)
        weights.add(vector, 0.5)
        changed = {name: part for m in selection.modules[1:] for name, part in m.unpack(vector[m.name]).items()}
        for name, parameter in network.named_parameters():
            expected = (originals[name].float() + 0.5 * changed[name]).to(dtype) if name in changed else originals[name]
            assert torch.equal(parameter, expected), name
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, originals[name])
