"""`npeff icl`: is in-context learning explained by components that the model has without a context?

The paper's linear classifier on components only re-weights what the model does already.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npeff.analyse.ranking import columns, top_examples
from npeff.collect.session import prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHOD_TITLES, Method
from npeff.decompose.run import open_decomposition
from npeff.paper.config import IclConfig
from npeff.paper.icl_context import Context, Predictor, draw, predict_all, search
from npeff.store.layout import ICL, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import only_one
from npeff.utils.report import BLUE, RED, Column, Emphasis, Table, as_markdown, draw_figure, write_report
from npeff.utils.types import Array
from npeff.utils.version import __version__

MEASURES = {"accuracy": "Accuracy", "similarity_0": "Similarity 0-shot", "similarity_k": "Similarity ICL"}


@dataclass(frozen=True)
class IclRow:
    """The classifier on the components of one decomposition."""

    name: str
    """Name of the decomposition."""
    method: Method
    """Its method."""
    title: str
    """What the paper calls the method; the name where two decompositions have the same method."""
    components: int
    """Its number of components."""
    tuned: list[int]
    """Number of components that vote for each label."""
    left_out: int
    """Components with too few active examples to vote."""
    undecided: int
    """Examples for which all labels had the same score, so that the first one was taken."""
    accuracy: float
    """Share of examples where the classifier gives the label."""
    similarity_0: float
    """Share of examples where it gives the model's prediction without a context."""
    similarity_k: float
    """Share of examples where it gives the model's prediction behind the context."""


@dataclass(frozen=True)
class IclTable:
    """What `npeff icl` measured: RUN/icl/SHOTS-SEED/table.json."""

    npeff: str
    """Version of npeff."""
    run: str
    """Fingerprint of the run."""
    task: str
    """Name of the run's task."""
    model: str
    """The run's model."""
    options: dict[str, Any]
    """Options of the command."""
    context: Context
    """The best context."""
    examples: int
    """Examples that were counted: all usable ones but those of the context."""
    accuracy_0: float
    """Accuracy of the model without a context."""
    accuracy_k: float
    """Accuracy of the model behind the context."""
    similarity_0_k: float
    """Share of examples where the two predictions agree."""
    rows: list[IclRow]
    """The decompositions, in the order of the paper's methods."""


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
    key = draw(run, labels, config)
    directory = run.path / ICL / f"{config.shots}-{config.seed}"
    with only_one(directory):
        predictor = Predictor(prepare_run(run, config.device), config.batch_tokens)
        context = search(directory / "search.json", key, predictor, run, labels)
        few_shot = predict_all(directory / "predictions.json", predictor, run, context.text)
        blocks = write(directory, _judge(run, decompositions, labels, few_shot, context, config))
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
    run: Run, opened: dict[str, Decomposition], labels: Array, few_shot: Array, context: Context, config: IclConfig
) -> IclTable:
    """Accuracies and similarities, of `labels` [m] and predictions [m] behind the context."""
    zero_shot = run.table["prediction"].to_numpy().astype(np.int64)
    counted = run.usable.copy()
    counted[context.examples] = False  # these would meet their own answers in the context

    def agreement(predictions: Array, other: Array) -> float:
        return float((predictions == other)[counted & (other >= 0)].mean())

    methods = [decomposition.config.method for decomposition in opened.values()]
    rows = []
    for (name, decomposition), method in zip(opened.items(), methods, strict=True):
        scores, classes = decomposition.scores("positive"), len(run.manifest.task.labels)
        weights, left_out = label_weights(scores, labels, counted, classes, config.top, config.purity)
        predictions, undecided = classify(decomposition, weights)
        row = IclRow(
            name=name,
            method=method,
            title=METHOD_TITLES[method] if methods.count(method) == 1 else name,
            components=len(decomposition.components),
            tuned=weights.sum(axis=1).astype(int).tolist(),
            left_out=left_out,
            undecided=int(undecided[counted].sum()),
            accuracy=agreement(predictions, labels),
            similarity_0=agreement(predictions, zero_shot),
            similarity_k=agreement(predictions, few_shot),
        )
        rows.append(row)
    return IclTable(
        npeff=__version__,
        run=run.fingerprint,
        task=run.manifest.task.name,
        model=run.manifest.model,
        options={name: value for name, value in to_dict(config).items() if name not in ("run", "device")},
        context=context,
        examples=int(counted.sum()),
        accuracy_0=agreement(zero_shot, labels),
        accuracy_k=agreement(few_shot, labels),
        similarity_0_k=agreement(zero_shot, few_shot),
        rows=rows,
    )


def label_weights(
    scores: torch.Tensor, labels: Array, usable: Array, classes: int, top: int, purity: float
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


def classify(decomposition: Decomposition, weights: Array) -> tuple[Array, Array]:
    """The label with the largest sum of coefficients of the components that vote for it, for every example.

    A cluster counts as a coefficient of one, as in the paper. Signed coefficients (SVDs) are ranked from the largest
    down and enter with their sign.

    Args:
        decomposition: The components and the coefficients of all m examples.
        weights: Which label each component votes for, float32 [classes, C].

    Returns:
        The label number of each example, int64 [m], and whether all labels had the same score, so that the first one
        was taken, bool [m].
    """
    coefficients = decomposition.coefficients.float()
    if decomposition.config.method == "clusters":
        coefficients = (coefficients > 0).float()
    sums = (coefficients @ torch.from_numpy(weights).T).numpy()
    return sums.argmax(axis=1), sums.max(axis=1) == sums.min(axis=1)


def write(directory: Path, result: IclTable) -> list[str | Table]:
    """Write table.csv, .md, .tex, .png, .svg and, last, .json.

    Args:
        directory: Where to write.
        result: What was measured.

    Returns:
        What there is to read, as in table.md.
    """
    names = ("title", "name", "components", "left_out", "undecided", *MEASURES)
    table = Table("", [Column(name) for name in names], [[getattr(row, n) for n in names] for row in result.rows])
    blocks = report(result)
    write_report(directory / "table", blocks, csv=table)
    draw_figure(directory / "table", _draw, result)
    write_record(directory / "table.json", result)
    return blocks


def report(result: IclTable) -> list[str | Table]:
    """What there is to read: percentages, a column per decomposition; the highest of a row is bold.

    Args:
        result: What was measured.

    Returns:
        The table, and a note on examples without a vote.
    """
    caption = (
        f"{result.task}, {result.model}, {result.examples} examples: accuracy {result.accuracy_0:.1%} 0-shot, "
        f"{result.accuracy_k:.1%} {result.options['shots']}-shot (best of {result.options['sets']} contexts); the two "
        f"agree on {result.similarity_0_k:.1%}. In percent:"
    )
    columns = [Column(""), *(Column(row.title, ".1f") for row in result.rows)]
    blocks: list[str | Table] = [table := Table(caption, columns)]
    for measure, title in MEASURES.items():
        values = [100 * getattr(row, measure) for row in result.rows]
        table.rows.append([title, *(Emphasis(value) if value == max(values) else value for value in values)])
    silent = [f"{row.title} {row.undecided}" for row in result.rows if row.undecided]
    if silent:
        blocks.append(f"Examples without a vote, for which the first label was taken: {', '.join(silent)}.")
    return blocks


def _draw(axes: Any, result: IclTable) -> None:
    """A group of bars per decomposition; lines at the accuracies of the model itself."""
    for k, (measure, colour) in enumerate(zip(MEASURES, (BLUE, "#a7a7a7", RED), strict=True)):
        places = [n + 0.27 * (k - 1) for n in range(len(result.rows))]
        values = [100 * getattr(row, measure) for row in result.rows]
        axes.bar(places, values, width=0.25, color=colour, label=MEASURES[measure])
    for shots, value, style in ((0, result.accuracy_0, ":"), (result.options["shots"], result.accuracy_k, "--")):
        axes.axhline(100 * value, color="black", linewidth=0.8, linestyle=style, label=f"{shots}-shot accuracy")
    axes.set_xticks(range(len(result.rows)), [row.title for row in result.rows])
    axes.set(ylim=(0, 100), ylabel="% of examples", title=f"{result.task}, {result.examples} examples")
    axes.legend(frameon=False, fontsize=7)
