"""The paper's linear classifier on components: it only re-weights what the model does already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from npeff.analyse.ranking import columns, top_examples
from npeff.decompose.base import Decomposition
from npeff.utils.types import Array


@dataclass(frozen=True)
class Votes:
    """What the classifier says about m examples."""

    predictions: Array
    """Label number of each example, int64 [m]."""
    undecided: Array
    """Whether no label had a score above any other, so that the first one was taken, bool [m]."""
    tuned: list[int]
    """Components that vote for each label."""
    left_out: int
    """Components with too few active examples to say what they are tuned to."""


def label_weights(
    scores: torch.Tensor, labels: Array, usable: Array, classes: int, top: int = 16, purity: float = 0.75
) -> tuple[Array, int]:
    """W [classes, C]: 1 where at least `purity` of a component's `top` examples have the label, else 0.

    `scores` [m, C] rank the examples, only those above zero and `usable` count; `labels` [m] are -1 where unknown.
    Also returns how many components have fewer than `top` such examples: their column is zero.
    """
    weights = np.zeros((classes, scores.shape[1]), np.float32)
    left_out = 0
    for j, column in enumerate(columns(scores)):
        best = top_examples(column, usable, top)
        if len(best) < top:
            left_out += 1
            continue
        counts = np.bincount(labels[best][labels[best] >= 0], minlength=classes)
        weights[:, j] = counts >= purity * top
    return weights, left_out


def classify(
    decomposition: Decomposition, labels: Array, usable: Array, classes: int, top: int = 16, purity: float = 0.75
) -> Votes:
    """Argmax W w for every example, with w its coefficients; a cluster is a one-hot coefficient, as in the paper.

    Signed coefficients (SVDs) are ranked from the largest down and enter with their sign.
    """
    weights, left_out = label_weights(decomposition.scores("positive"), labels, usable, classes, top, purity)
    coefficients = decomposition.coefficients.float()
    if decomposition.config.method == "clusters":
        coefficients = (coefficients > 0).float()
    sums = (coefficients @ torch.from_numpy(weights).T).numpy()
    return Votes(
        predictions=sums.argmax(axis=1),
        undecided=sums.max(axis=1) == sums.min(axis=1),
        tuned=[int(row.sum()) for row in weights],
        left_out=left_out,
    )
