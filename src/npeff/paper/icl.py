"""`npeff icl`: is in-context learning explained by components that the model has without a context?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from npeff import __version__
from npeff.analyse.compare import NAMES
from npeff.analyse.ranking import Array
from npeff.analyse.run import finished_decompositions, load_decomposition
from npeff.collect.run import prepare_run
from npeff.decompose import Decomposition
from npeff.paper import icl_report as report
from npeff.paper.icl_classifier import classify
from npeff.paper.icl_context import draw, predict_all, render, search
from npeff.paper.icl_predict import Predictor
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.locks import only_one

DIRECTORY = "icl"


@dataclass(frozen=True)
class IclConfig:
    """Find a good few-shot context, and compare its predictions with a classifier made of 0-shot components.

    Continues if stopped."""

    run: tyro.conf.Positional[str]
    """Directory of a run without a few-shot prefix, with labels and at least one decomposition."""
    names: tuple[str, ...] = ()
    """Decompositions to use; without any, every finished one of the run."""
    shots: int = 6
    """Worked examples in a context."""
    sets: int = 50
    """Random contexts to try."""
    scored: int = 1024
    """Examples that each context is scored on."""
    seed: int = 0
    """Seed of the random contexts."""
    top: int = 16
    """Top examples that say which label a component is tuned to; components with fewer active ones do not vote."""
    purity: float = 0.75
    """Share of them that must have the label."""
    batch_tokens: int | None = None
    """Tokens per batch; that of the collection if not given."""
    device: str | None = None
    """Where to compute; where the run was collected if not given."""

    def __post_init__(self) -> None:
        for name in ("shots", "sets", "scored", "top"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1.")
        if not 0.5 < self.purity <= 1:
            raise UserError("--purity is a share above 0.5 and at most 1, so that no component votes for two labels.")
        if self.seed < 0 or (self.batch_tokens is not None and self.batch_tokens < 1):
            raise UserError("--seed cannot be negative, --batch-tokens must be at least 1.")


def icl(config: IclConfig) -> Path:
    """Search, predict, classify; write the table and return its directory."""
    run = Run.open(config.run)
    _check(run)
    decompositions = _decompositions(run, config.names)
    labels, usable = _labels(run)
    sets, scored = draw(np.flatnonzero(usable & (labels >= 0)), config.shots, config.sets, config.scored, config.seed)
    directory = run.path / DIRECTORY / f"{config.shots}-{config.seed}"
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
    return labels, ~run.table["set_aside"].is_valid().to_numpy(zero_copy_only=False)


def _decompositions(run: Run, names: tuple[str, ...]) -> dict[str, Decomposition]:
    names = names or tuple(finished_decompositions(run))
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff compare {run.path}` makes one per method.")
    return {name: load_decomposition(run, name) for name in names}


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
                "title": NAMES[method] if methods.count(method) == 1 else name,
                "components": len(decomposition.components),
                "tuned": votes.tuned,
                "left_out": votes.left_out,
                "undecided": int(votes.undecided[counted].sum()),
                "accuracy": accuracy(votes.predictions),
                "similarity_0": float((votes.predictions == before)[counted].mean()),
                "similarity_k": float((votes.predictions == behind)[counted].mean()),
            }
        )
    order = {method: number for number, method in enumerate(NAMES)}
    return {
        "examples": int(counted.sum()),
        "accuracy_0": accuracy(before),
        "accuracy_k": accuracy(behind),
        "similarity_0_k": float((before == behind)[counted].mean()),
        "rows": sorted(rows, key=lambda row: order[row["method"]]),
    }
