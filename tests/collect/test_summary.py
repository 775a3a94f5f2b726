"""What is said at the end of a collection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npeff.collect import summary as module
from npeff.collect.summary import summary
from npeff.store.run import Run
from tests.synthetic import make_run


def test_accuracy_and_distribution_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(50)], aside=[3])
    run = Run.open(run.path)
    run.manifest.config["directions"] = {"directions": "auto"}
    table = run.table
    labels, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
    usable = np.arange(50) != 3
    said = summary(run, ("a note",))
    assert said.splitlines()[1] == "a note"
    assert f"accuracy {np.mean(labels[usable] == predictions[usable]):.1%} on 49 labelled examples" in said
    most = max(np.mean(labels[usable] == 0), np.mean(labels[usable] == 1))
    assert f"always the commonest label: {most:.1%}" in said
    share = np.mean(predictions[usable] == 1)
    assert f"'Positive' {100 * share:.3g}%" in said
    assert "1 examples set aside: 3" in said
    assert "Warning" not in said
    monkeypatch.setattr(module, "ONE_SIDED", 0.01)
    assert "Warning: the model answers" in summary(run)


def test_without_labels_nothing_is_said_about_accuracy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(50)], labels=[None] * 50)
    run.manifest.config["directions"] = {"directions": "sampling:4"}
    said = summary(run)
    assert "accuracy" not in said
    assert "right on average" in said
