"""Sketches of what a forward and a backward pass give, in batches, half precision and on every device."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.make import make_sketch
from tests.collect.sketch.layers import PassThrough, collect, convert, every_config, every_kind, flat_rmatvec


@every_config
def test_collection_projects_the_gradients_that_autograd_gives(config: SketchConfig, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    sketch = make_sketch(config, modules)
    rows = collect(sketch, inputs, deltas, slice(None))
    assert rows.shape == (5, config.dim)
    assert rows.dtype == torch.float32
    for example in range(5):
        gradient = {}
        for module in modules:
            parameters = tuple(module.module.parameters())
            output = module.module(inputs[module.name][example])
            weight, bias = torch.autograd.grad(output, parameters, deltas[module.name][example])
            gradient[module.name] = module.matrix(weight, bias)
        torch.testing.assert_close(rows[example], sketch.matvec(gradient), atol=2e-4, rtol=1e-5)


@every_config
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_batch_size_gives_the_same(config: SketchConfig, size: int, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    sketch = make_sketch(config, modules)
    whole = collect(sketch, inputs, deltas, slice(None))
    parts = [collect(sketch, inputs, deltas, slice(start, start + size)) for start in range(0, 5, size)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_activations(kind: str, dtype: torch.dtype, pass_through: PassThrough) -> None:
    """A number is rounded up to four times on its way: on both sides, in their product and in its sum."""
    modules, inputs, deltas = pass_through
    sketch = make_sketch(SketchConfig(kind, dim=96), modules)  # type: ignore[arg-type]
    inputs, deltas = convert(inputs, dtype), convert(deltas, dtype)
    rows = collect(sketch, inputs, deltas, slice(None))
    expected = collect(sketch, convert(inputs, torch.float32), convert(deltas, torch.float32), slice(None))
    assert rows.dtype == torch.float32
    assert (rows - expected).norm() <= 4 * torch.finfo(dtype).eps / 2 * expected.norm()


@every_kind
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_here_gives_the_same(kind: str, device: str, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    config = SketchConfig(kind, dim=96)  # type: ignore[arg-type]
    cpu, other = make_sketch(config, modules), make_sketch(config, modules, device)
    rows = collect(other, convert(inputs, device), convert(deltas, device), slice(None)).cpu()
    torch.testing.assert_close(rows, collect(cpu, inputs, deltas, slice(None)), atol=1e-4, rtol=1e-4)
    lifted = flat_rmatvec(other, rows[0])
    torch.testing.assert_close(lifted.cpu(), flat_rmatvec(cpu, rows[0]), atol=1e-4, rtol=1e-4)
    if kind != "sparse" or device == "cpu" or other.kernels is not None:  # type: ignore[attr-defined]
        assert torch.equal(lifted, flat_rmatvec(other, rows[0]))
