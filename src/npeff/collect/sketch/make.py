"""The sketches by name."""

from collections.abc import Iterable

import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.base import Sketch
from npeff.collect.sketch.dense import DenseSketch
from npeff.collect.sketch.kron import KronSketch
from npeff.collect.sketch.sparse import SparseSketch
from npeff.models.select import CapturedModule


def make_sketch(config: SketchConfig, modules: Iterable[CapturedModule], device: torch.device | str = "cpu") -> Sketch:
    """The sketch that `config` names, for these modules."""
    kinds: dict[str, type[Sketch]] = {"sparse": SparseSketch, "dense": DenseSketch}
    return kinds.get(config.sketch, KronSketch)(config, modules, device)
