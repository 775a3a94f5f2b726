"""Which parameters are selected, and the layers as matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from npeff.models.select import CapturedModule, blocks, select_parameters
from npeff.utils.errors import UserError
from tests import tiny


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_unpack_undoes_matrix(family):
    network = tiny.network(family)
    for module in select_parameters(network).modules:
        weight, bias = module.module.weight, module.module.bias
        matrix = module.matrix(weight, bias)
        assert matrix.shape == module.shape
        assert matrix.numel() == module.size
        parts = module.unpack(matrix)
        assert torch.equal(parts[f"{module.name}.weight"], weight)
        assert torch.equal(parts[f"{module.name}.bias"], bias)
        x = torch.randn(3, matrix.shape[1] - 1)
        expected = module.module(x)
        torch.testing.assert_close(torch.cat([x, torch.ones(3, 1)], 1) @ matrix.T, expected, rtol=1e-4, atol=1e-4)


def test_only_a_bias():
    module = CapturedModule("layer", nn.Linear(3, 2), weight=False, bias=True)
    assert module.shape == (2, 1)
    assert module.unpack(module.matrix(None, torch.tensor([1.0, 2.0])))["layer.bias"].tolist() == [1, 2]


def test_every_parameter_is_selected_or_left_out():
    network = tiny.network("qwen2")
    selection = select_parameters(network, include=["*.mlp.*", "*.q_proj.*"], exclude=["*.1.*"])
    selected = {f"{m.name}.{kind}" for m in selection.modules for kind in ("weight", "bias") if getattr(m, kind)}
    assert selected == {
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"model.layers.0.self_attn.q_proj.{kind}" for kind in ("weight", "bias")),
    }
    assert selected | set(selection.left_out) == {name for name, _ in network.named_parameters()}
    assert selection.size == sum(p.numel() for name, p in network.named_parameters() if name in selected)


def test_patterns_that_select_nothing():
    network = tiny.network("llama")
    with pytest.raises(UserError, match=r"'\*\.fc' matches no parameter.*npeff params"):
        select_parameters(network, include=["*.fc"])
    with pytest.raises(UserError, match="No parameters are selected"):
        select_parameters(network, exclude=["*"])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_blocks(family):
    network = tiny.network(family)
    assert len(blocks(network)) == 2
    with pytest.raises(UserError, match="--no-activation"):
        blocks(nn.Linear(2, 2))
