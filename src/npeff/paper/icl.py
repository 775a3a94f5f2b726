"""`npeff icl`: is in-context learning explained by components that the model has without a context?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from npeff.collect.session import prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHOD_TITLES
from npeff.decompose.run import open_decomposition
from npeff.paper import icl_report as report
from npeff.paper.config import IclConfig
from npeff.paper.icl_context import draw, predict_all, render, search
from npeff.paper.icl_predict import Predictor
from npeff.paper.icl_votes import classify
from npeff.store.layout import ICL, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import only_one
from npeff.utils.types import Array
from npeff.utils.version import __version__


def icl(config: IclConfig) -> Path:
    """Search, predict, classify; write the table and return its directory."""
    run = Run.open(config.run)
    _check(run)
    decompositions = _decompositions(run, config.names)
    labels, usable = _labels(run)
    sets, scored = draw(np.flatnonzero(usable & (labels >= 0)), config.shots, config.sets, config.scored, config.seed)
    directory = run.path / ICL / f"{config.shots}-{config.seed}"
    with only_one(directory):
        prepared = prepare_run(run, config.device)
        predictor = Predictor(prepared, config.batch_tokens)
        key = {"run": run.fingerprint, "sets": sets, "scored": scored}
        best, scores = search(directory / "search.json", key, predictor, prepared.task, run.table, labels)
        context = render(prepared.task, run.table, best)
        key = {"run": run.fingerprint, "context": context}
        block = run.manifest["shard_examples"]
        behind = predict_all(directory / "predictions.json", key, predictor, context, run.table, block)
        # examples of the context would meet their own answers
        counted = usable.copy()
        counted[best] = False
        found = {
            "npeff": __version__,
            "run": run.fingerprint,
            "task": run.manifest["task"]["name"],
            "model": run.manifest["config"]["model"]["model"],
            "options": {key: value for key, value in to_dict(config).items() if key not in ("run", "device")},
            "context": {"examples": best, "text": context, "scores": scores},
            **_table(run, decompositions, labels, counted, behind, config),
        }
        report.write(directory, found)
    print(f"\n{report.markdown(found)}\nin {directory}")
    return directory


def _check(run: Run) -> None:
    """Refuse a run that the question makes no sense for."""
    task = run.manifest["task"]
    if not task["labels"]:
        raise UserError(f"{run.path} has the whole vocabulary as answers; npeff icl needs a task with labels.")
    if task["prefix"]:
        raise UserError(f"{run.path} was collected behind a few-shot prefix; npeff icl needs a run without one.")
    if run.table["label"].null_count == len(run.table):
        raise UserError(f"{run.path} has no labels: neither contexts nor components can be judged without.")


def _labels(run: Run) -> tuple[Array, Array]:
    """Label numbers (-1 unknown) and whether an example is usable, both [m]."""
    labels = run.table["label"].fill_null(-1).to_numpy().astype(np.int64)
    return labels, run.usable


def _decompositions(run: Run, names: tuple[str, ...]) -> dict[str, Decomposition]:
    names = names or tuple(decomposition_names(run.path))
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff compare {run.path}` makes one per method.")
    return {name: open_decomposition(run, name) for name in names}


def _table(
    run: Run,
    decompositions: dict[str, Decomposition],
    labels: Array,
    counted: Array,
    behind: Array,
    config: IclConfig,
) -> dict[str, Any]:
    """Accuracies and similarities over the `counted` examples [m]; `behind` [m] are predictions behind the context."""
    before = run.table["prediction"].to_numpy().astype(np.int64)
    known = counted & (labels >= 0)

    def accuracy(predictions: Array) -> float:
        return float((predictions == labels)[known].mean())

    methods = [decomposition.config.method for decomposition in decompositions.values()]
    rows = []
    for name, decomposition in decompositions.items():
        method = decomposition.config.method
        votes = classify(decomposition, labels, counted, len(run.manifest["task"]["labels"]), config.top, config.purity)
        rows.append(
            {
                "name": name,
                "method": method,
                "title": METHOD_TITLES[method] if methods.count(method) == 1 else name,
                "components": len(decomposition.components),
                "tuned": votes.tuned,
                "left_out": votes.left_out,
                "undecided": int(votes.undecided[counted].sum()),
                "accuracy": accuracy(votes.predictions),
                "similarity_0": float((votes.predictions == before)[counted].mean()),
                "similarity_k": float((votes.predictions == behind)[counted].mean()),
            }
        )
    order = {method: number for number, method in enumerate(METHOD_TITLES)}
    return {
        "examples": int(counted.sum()),
        "accuracy_0": accuracy(before),
        "accuracy_k": accuracy(behind),
        "similarity_0_k": float((before == behind)[counted].mean()),
        "rows": sorted(rows, key=lambda row: order[row["method"]]),
    }
