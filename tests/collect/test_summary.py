"""What is said at the end of a collection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from npeff.collect import summary as module
from npeff.collect.summary import answer_warnings, summary
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
    assert "Warning: the model answers" not in said
    monkeypatch.setattr(module, "ONE_SIDED", max(share, 1 - share))
    assert "Warning: the model answers" in summary(run)


@pytest.mark.parametrize(
    ("labels", "predictions", "words"),
    [
        ([0, 1] * 10, [1] * 20, ["answers 'b' on 100%", "accuracy of 50.0% is not above"]),
        ([0, 1] * 10, [0, 1, 0, 1, 0, 1, 1, 1, 0, 0] * 2, []),
        ([0, 1] * 10, [0, 1] * 10, []),
        ([0, 1] * 10, [1, 0] * 10, ["accuracy of 0.0% is not above chance: 50.0%"]),
        ([0, 0, 0, 1] * 20, [0, 1, 1, 1] * 20, []),  # worse than always 0, but not made at random: 0.5 against 0.375
        ([0, 0, 0, 1] * 5, [0, 1, 1, 1] * 5, ["not above chance: 37.5%, by luck up to 59.2%."]),
        ([1] * 20, [0, 1, 1, 1] * 5, ["all examples have one label; accuracy says nothing"]),
        ([None] * 20, [0] * 20, ["answers 'a' on 100%"]),
        ([1] * 20, [1] * 20, []),  # as it should be
        ([0, 1, 0], [1, 1, 1], []),  # too few to tell
    ],
)
def test_signs_that_a_model_does_not_do_its_task(labels, predictions, words) -> None:
    columns = {"label": pa.array(labels, pa.int32()), "prediction": predictions}
    names = {"prediction_text": ["ab"[i] for i in predictions], "set_aside": pa.nulls(len(labels), pa.string())}
    said = list(answer_warnings(pa.table(columns | names), ("a", "b")))
    assert len(said) == len(words)
    assert all(word in line and line.startswith("Warning: ") for word, line in zip(words, said, strict=True))


def test_without_labels_nothing_is_said_about_accuracy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(50)], labels=[None] * 50)
    run.manifest.config["directions"] = {"directions": "sampling:4"}
    said = summary(run)
    assert "accuracy" not in said
    assert "right on average" in said
