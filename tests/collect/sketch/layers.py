"""Layers, gradients and passes that the tests of sketches share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from npeff.collect.config import SketchConfig
from npeff.collect.sketch import sparse
from npeff.collect.sketch.base import Sketch
from npeff.models.select import CapturedModule

KINDS = ("blocks", "kron", "sparse", "dense")
CONFIGS = [
    SketchConfig("kron", dim=96),
    SketchConfig("kron", dim=64, copies=3, side=8),
    SketchConfig("sparse", dim=96),
    SketchConfig("dense", dim=96),
    SketchConfig("blocks", dim=96),
    SketchConfig("blocks", dim=256, copies=3, side=16),
]
NAMES = ["kron", "kron-copies", "sparse", "dense", "blocks", "blocks-copies"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)


PassThrough = tuple[list[CapturedModule], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def linear(name: str, d_out: int, d_in: int, parts: str = "weight bias", conv1d: bool = False) -> CapturedModule:
    """A captured layer of which `parts` are used."""
    module = Conv1D(d_out, d_in) if conv1d else nn.Linear(d_in, d_out)
    return CapturedModule(name, module, "weight" in parts, "bias" in parts)


def random_gradient(modules: Sequence[CapturedModule], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {module.name: torch.randn(module.shape, generator=generator) for module in modules}


def flat_rmatvec(sketch: Sketch, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for _, part in sketch.rmatvec(y)])


def collect(
    sketch: Sketch, inputs: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], examples: slice
) -> torch.Tensor:
    """What a forward and a backward pass do with a sketch, for some of the examples."""
    folded = {name: sketch.fold_input(module, inputs[name][examples]) for name, module in sketch.modules.items()}
    total = sketch.accumulator(len(next(iter(folded.values()))))
    for name, module in reversed(sketch.modules.items()):
        sketch.accumulate(module, deltas[name][examples], folded[name], total)
    return sketch.finish(total)


def convert(tensors: dict[str, torch.Tensor], to: torch.dtype | str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(to) for name, tensor in tensors.items()}


def slots(words: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    steps = torch.from_numpy((np.arange(dim, dtype=np.uint32) * np.uint32(sparse.STEP)).view(np.int32))
    mixed = torch.empty(dim, words.shape[1], dtype=torch.int32)
    result = torch.empty(dim, words.shape[1], dtype=torch.int64)
    sparse.draw_slots(steps, words, length, mixed, torch.empty_like(mixed), result)
    return result
