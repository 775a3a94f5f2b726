"""placeholder"""

from npeff.sketch.dense import DenseSketch as SparseSketch
