"""The classifier on components, by hand and against brute force."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npeff.decompose.run import open_decomposition
from npeff.paper.icl_votes import classify, label_weights
from tests.synthetic import add_decomposition, make_run


def test_weights_by_hand() -> None:
    scores = torch.tensor([[4.0, 1, 0], [3, 2, 0], [2, 3, 0], [1, 4, 1], [9, 9, 9]])
    labels = np.array([0, 0, 0, 1, 1])
    usable = np.array([True, True, True, True, False])
    weights, left_out = label_weights(scores, labels, usable, 2, top=4, purity=0.75)
    assert weights.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert left_out == 1
    weights, _ = label_weights(scores, labels, usable, 2, top=2, purity=0.75)
    assert weights.tolist() == [[1, 0, 0], [0, 0, 0]], "half is not three quarters"
    unknown = np.array([-1, 0, 0, 1, 1])
    assert label_weights(scores, unknown, usable, 2, top=2, purity=1)[0].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-gradients"])
def test_predictions_equal_brute_force(tmp_path: Path, method: str) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    add_decomposition(run, method)
    decomposition = open_decomposition(run, method)
    labels = run.table["label"].to_numpy().astype(np.int64)
    votes = classify(decomposition, labels, np.ones(90, bool), 2, top=8)
    w = decomposition.coefficients.numpy()
    for i in range(90):
        sums = [0.0, 0.0]
        for j in range(w.shape[1]):
            best = [k for k in np.argsort(-w[:, j], kind="stable") if w[k, j] > 0][:8]
            if len(best) == 8:
                value = float(w[i, j] > 0) if method == "clusters" else float(w[i, j])
                for label in (0, 1):
                    sums[label] += value * (np.mean(labels[best] == label) >= 0.75)
        if abs(sums[0] - sums[1]) > 1e-6:
            assert votes.predictions[i] == int(sums[1] > sums[0])
            assert not votes.undecided[i]
