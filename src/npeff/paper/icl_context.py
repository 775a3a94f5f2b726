"""The best of several random contexts: sets of worked examples, each scored on the same other examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from npeff.paper.icl_predict import Predictor
from npeff.tasks.config import FIELD
from npeff.tasks.task import Task
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, write_json
from npeff.utils.types import Array


def draw(labelled: Array, shots: int, sets: int, scored: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """`sets` random sets of `shots` examples, and `scored` other examples to score all of them on.

    No scored example is in a set: none meets its own answer in the context.
    """
    if len(labelled) < scored + shots:
        raise UserError(
            f"Only {len(labelled)} usable examples have a label: too few to score contexts of {shots} on {scored} "
            f"others. Lower --scored or --shots, or collect more."
        )
    random = np.random.default_rng(seed)
    shuffled = random.permutation(labelled)
    pool = shuffled[scored:]
    drawn = [random.choice(pool, shots, replace=False).tolist() for _ in range(sets)]
    return drawn, np.sort(shuffled[:scored]).tolist()


def render(task: Task, table: pa.Table, examples: Sequence[int]) -> str:
    """The context of worked examples, in this order."""
    worked = []
    for row in table.take(list(examples)).to_pylist():
        fields = {name: row[FIELD + name] for name in task.fields}
        worked.append(task.render_worked(row["text"], task.labels[row["label"]], fields))
    return "".join(worked)


def search(
    path: Path, key: dict[str, Any], predictor: Predictor, task: Task, table: pa.Table, labels: Array
) -> tuple[list[int], list[float]]:
    """The best set of `key["sets"]`, and the accuracy of each on the examples `key["scored"]`.

    Scores are kept in `path` as they come. Of equally good sets the first is taken.
    """
    sets, scored = key["sets"], key["scored"]
    scores = _known(path, key)
    examples, truth = table.take(scored), labels[scored]
    for chosen in tqdm(sets[len(scores) :], desc="Contexts", unit="set", initial=len(scores), total=len(sets)):
        predictions = predictor.predict(render(task, table, chosen), examples)
        scores.append(float((predictions == truth).mean()))
        write_json(path, {"key": key, "scores": scores}, sealed=True)
    return sets[int(np.argmax(scores))], scores


def predict_all(
    path: Path, key: dict[str, Any], predictor: Predictor, context: str, table: pa.Table, block: int
) -> Array:
    """Predictions of all examples behind `context`, int64 [m]; kept in `path` after every `block` examples."""
    known = _known(path, key, "predictions")
    with tqdm(total=len(table), initial=len(known), desc="Behind the best context", unit="ex") as bar:
        while len(known) < len(table):
            found = predictor.predict(context, table.slice(len(known), block)).tolist()
            known += found
            write_json(path, {"key": key, "predictions": known}, sealed=True)
            bar.update(len(found))
    return np.array(known, np.int64)


def _known(path: Path, key: dict[str, Any], what: str = "scores") -> list[Any]:
    """What an earlier call with the same key has found."""
    found = read_object(path) if path.is_file() else {}
    return list(found.get(what, [])) if found.get("key") == key else []
