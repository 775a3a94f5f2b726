"""A pass through layers of every sort."""

from __future__ import annotations

import pytest
import torch

from tests.collect.sketch.layers import PassThrough, linear


@pytest.fixture(scope="module")
def pass_through() -> PassThrough:
    """Modules of every sort with inputs [5, 3, d_in] and output gradients [5, 3, d_out]."""
    modules = [
        linear("both", 5, 7),
        linear("weight", 6, 4, "weight"),
        linear("bias", 9, 3, "bias"),
        linear("conv1d", 4, 8, conv1d=True),
        linear("conv1d weight", 3, 11, "weight", conv1d=True),
    ]
    generator = torch.Generator().manual_seed(0)
    inputs, deltas = {}, {}
    for module in modules:
        weight = module.module.weight
        d_out, d_in = reversed(weight.shape) if module.transposed else weight.shape  # type: ignore[arg-type, misc]
        inputs[module.name] = torch.randn(5, 3, d_in, generator=generator)
        deltas[module.name] = torch.randn(5, 3, d_out, generator=generator)
    return modules, inputs, deltas
