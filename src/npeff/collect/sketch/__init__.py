"""Sketches: linear maps from parameter space to p numbers, defined by a seed alone."""

from npeff.collect.sketch.base import Sketch, SketchConfig, make_sketch
from npeff.collect.sketch.dense import DenseSketch
from npeff.collect.sketch.kron import KronSketch
from npeff.collect.sketch.sparse import SparseSketch

__all__ = ["DenseSketch", "KronSketch", "Sketch", "SketchConfig", "SparseSketch", "make_sketch"]
