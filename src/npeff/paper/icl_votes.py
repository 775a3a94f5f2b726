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
    """Whether all labels had the same score, so that the first one was taken, bool [m]."""
    tuned: list[int]
    """Number of components that vote for each label."""
    left_out: int
    """Components with too few active examples to vote."""


def label_weights(
    scores: torch.Tensor, labels: Array, usable: Array, classes: int, top: int = 16, purity: float = 0.75
) -> tuple[Array, int]:
    """Which label each component votes for.

    Args:
        scores: What ranks the examples of a component, [m, C]; only those above zero are active.
        labels: Label numbers, -1 where unknown, int64 [m].
        usable: Which examples count, bool [m].
        classes: Number of labels.
        top: Top examples to look at.
        purity: Share of them that must have the label.

    Returns:
        Weights, float32 [classes, C]: 1 where component and label belong together, else 0. And the number of components
        with fewer than `top` active examples, whose column is zero.
    """
    weights = np.zeros((classes, scores.shape[1]), np.float32)
    left_out = 0
    for j, column in enumerate(columns(scores)):
        best = labels[top_examples(column, usable, top)]
        if len(best) < top:
            left_out += 1
        else:
            weights[:, j] = np.bincount(best[best >= 0], minlength=classes) >= purity * top
    return weights, left_out


def classify(
    decomposition: Decomposition, labels: Array, usable: Array, classes: int, top: int = 16, purity: float = 0.75
) -> Votes:
    """The label with the largest sum of coefficients of the components that vote for it, for every example.

    A cluster counts as a coefficient of one, as in the paper. Signed coefficients (SVDs) are ranked from the largest
    down and enter with their sign.

    Args:
        decomposition: The components and the coefficients of all m examples.
        labels: Label numbers, -1 where unknown, int64 [m].
        usable: Which examples count, bool [m].
        classes: Number of labels.
        top: Top examples that say which label a component votes for.
        purity: Share of them that must have the label.

    Returns:
        The predictions.
    """
    weights, left_out = label_weights(decomposition.scores("positive"), labels, usable, classes, top, purity)
    coefficients = decomposition.coefficients.float()
    if decomposition.config.method == "clusters":
        coefficients = (coefficients > 0).float()
    sums = (coefficients @ torch.from_numpy(weights).T).numpy()
    undecided = sums.max(axis=1) == sums.min(axis=1)
    return Votes(sums.argmax(axis=1), undecided, [int(row.sum()) for row in weights], left_out)
