"""`npeff icl`: is in-context learning explained by components that the model has without a context?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npeff.collect.session import prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHOD_TITLES
from npeff.decompose.run import open_decomposition
from npeff.paper.config import IclConfig
from npeff.paper.icl_context import Key, Predictor, draw, predict_all, render, search
from npeff.paper.icl_report import Context, IclRow, IclTable, write
from npeff.paper.icl_votes import classify
from npeff.store.layout import ICL, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import only_one
from npeff.utils.report import as_markdown
from npeff.utils.types import Array
from npeff.utils.version import __version__


def icl(config: IclConfig) -> Path:
    """Search a context, predict behind it, classify by components, and write the table.

    Args:
        config: Options of the command.

    Returns:
        The directory of the table.
    """
    run = Run.open(config.run)
    _check(run)
    decompositions = _decompositions(run, config.decomposition)
    labels = run.table["label"].fill_null(-1).to_numpy().astype(np.int64)
    labelled = np.flatnonzero(run.usable & (labels >= 0))
    sets, scored = draw(labelled, config.shots, config.sets, config.scored, config.seed)
    directory = run.path / ICL / f"{config.shots}-{config.seed}"
    with only_one(directory):
        prepared = prepare_run(run, config.device)
        predictor = Predictor(prepared, config.batch_tokens)
        key = Key(run.fingerprint, sets, scored)
        best, scores = search(directory / "search.json", key, predictor, prepared.task, run.table, labels)
        text = render(prepared.task, run.table, best)
        block, key = run.manifest.shard_examples, Key(run.fingerprint, context=text)
        few_shot = predict_all(directory / "predictions.json", key, predictor, run.table, block)
        result = _judge(run, decompositions, labels, few_shot, Context(best, text, scores), config)
        blocks = write(directory, result)
    print(f"\n{as_markdown(blocks)}\nin {directory}")
    return directory


def _check(run: Run) -> None:
    """Refuse a run that the question makes no sense for."""
    task = run.manifest.task
    if not task.labels:
        raise UserError(f"{run.path} has the whole vocabulary as answers; npeff icl needs a task with labels.")
    if task.prefix:
        raise UserError(f"{run.path} was collected behind a few-shot prefix; npeff icl needs a run without one.")
    if run.table["label"].null_count == len(run.table):
        raise UserError(f"{run.path} has no labels: without them neither contexts nor components can be judged.")


def _decompositions(run: Run, names: tuple[str, ...]) -> dict[str, Decomposition]:
    """The named decompositions, or all, in the order of the paper's methods."""
    names = names or tuple(decomposition_names(run.path))
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff compare {run.path}` makes one per method.")
    order = list(METHOD_TITLES)
    opened = {name: open_decomposition(run, name) for name in names}
    return dict(sorted(opened.items(), key=lambda item: order.index(item[1].config.method)))


def _judge(
    run: Run,
    decompositions: dict[str, Decomposition],
    labels: Array,
    few_shot: Array,
    context: Context,
    config: IclConfig,
) -> IclTable:
    """Accuracies and similarities, of `labels` [m] and predictions [m] behind the context."""
    zero_shot = run.table["prediction"].to_numpy().astype(np.int64)
    counted = run.usable.copy()
    counted[context.examples] = False  # these would meet their own answers in the context

    def accuracy(predictions: Array) -> float:
        return float((predictions == labels)[counted & (labels >= 0)].mean())

    def similarity(first: Array, second: Array) -> float:
        return float((first == second)[counted].mean())

    methods = [decomposition.config.method for decomposition in decompositions.values()]
    rows = []
    for (name, decomposition), method in zip(decompositions.items(), methods, strict=True):
        votes = classify(decomposition, labels, counted, len(run.manifest.task.labels), config.top, config.purity)
        rows.append(
            IclRow(
                name=name,
                method=method,
                title=METHOD_TITLES[method] if methods.count(method) == 1 else name,
                components=len(decomposition.components),
                tuned=votes.tuned,
                left_out=votes.left_out,
                undecided=int(votes.undecided[counted].sum()),
                accuracy=accuracy(votes.predictions),
                similarity_0=similarity(votes.predictions, zero_shot),
                similarity_k=similarity(votes.predictions, few_shot),
            )
        )
    return IclTable(
        npeff=__version__,
        run=run.fingerprint,
        task=run.manifest.task.name,
        model=run.manifest.model,
        options={name: value for name, value in to_dict(config).items() if name not in ("run", "device")},
        context=context,
        examples=int(counted.sum()),
        accuracy_0=accuracy(zero_shot),
        accuracy_k=accuracy(few_shot),
        similarity_0_k=similarity(zero_shot, few_shot),
        rows=rows,
    )
