"""Sketches: linear maps from parameter space to p numbers, defined by a seed alone."""

from npeff.sketch.base import Sketch, SketchConfig, make_sketch
from npeff.sketch.dense import DenseSketch
from npeff.sketch.kron import KronSketch
from npeff.sketch.sparse import SparseSketch

__all__ = ["DenseSketch", "KronSketch", "Sketch", "SketchConfig", "SparseSketch", "make_sketch"]
