"""`npeff icl`: is in-context learning explained by components that the model has without a context?

The paper's linear classifier on components only re-weights what the model does already.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from npeff.analyse.ranking import columns, top_examples
from npeff.collect.session import prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHOD_TITLES, Method
from npeff.decompose.run import open_decomposition
from npeff.paper.config import IclConfig
from npeff.paper.icl_context import Context, Predictor, draw, predict_all, search
from npeff.perturb.statistics import Interval, mean_and_interval
from npeff.store.layout import ICL, decomposition_names
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError, __version__, only_one, to_dict
from npeff.utils.report import BLUE, Cell, Column, Table, write_result

UNDECIDED = -1
"""In place of a label, where there is no vote."""
CORRECTED = "0-shot, corrected"
FOLDS = 5
"""Labels of components and offsets of answers come from four fifths of the examples, and are scored on the other."""


class Score(Record, kw_only=True):
    """How good predictions are; all shares are of examples with a prediction."""

    title: str
    """Whose predictions they are."""
    decided: float
    """Share of the examples with a label for which there is a prediction."""
    accuracy: float | None
    """Share of those where it is the label; None if there are none."""
    interval: Interval | None
    """95% interval of the accuracy, by bootstrap over examples."""
    similarity_0: float | None
    """Share where it is the model's prediction without a context."""
    similarity_k: float | None
    """Share where it is the model's prediction behind the context."""


class IclRow(Score, kw_only=True):
    """The classifier on the components of one decomposition; its title is what the paper calls the method."""

    name: str
    """Name of the decomposition."""
    method: Method
    """Its method."""
    components: int
    """Its number of components."""
    tuned: list[int]
    """Number of components that vote for each label, if all examples have a say."""
    left_out: int
    """Components with too few active examples to vote."""
    in_sample: float | None
    """The accuracy if the examples that are scored have a say in what components vote for, as in the paper."""
    gain: float | None
    """Accuracy less that of the corrected 0-shot answers for the same examples, those that are decided."""
    gain_interval: Interval | None
    """95% interval of it, by bootstrap over examples."""
    p: float | None
    """McNemar's exact test, two-sided: whether the two are right equally often."""


class IclTable(Record):
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
    """Examples that were counted: all usable ones with a label but those of the context."""
    models: list[Score]
    """The model itself: without a context, with offsets of its answers, behind the context."""
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
        few_shot = predict_all(directory / "predictions.json", predictor, run, (context.text, context.turns))
        result = _judge(run, decompositions, labels, few_shot, context, config)
        text = write_result(directory / "table", result, report(result), _draw)
    print(f"\n{text}\nin {directory}")
    return directory


def _check(run: Run) -> None:
    """Refuse a run that the question makes no sense for."""
    task = run.manifest.task
    if not task.labels:
        raise UserError(f"{run.path} has the whole vocabulary as answers; npeff icl needs a task with labels.")
    if task.prefix or any("assistant" in turn for turn in task.before[1]):
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
    counted = run.usable & (labels >= 0)
    counted[context.examples] = False  # these would meet their own answers in the context
    places, classes = np.flatnonzero(counted), len(run.manifest.task.labels)
    folds = np.random.default_rng(0).permutation(len(places)) % FOLDS
    corrected = correct(run.tensor("probabilities").double().numpy(), labels, places, folds)

    def score(title: str, predictions: Array) -> Score:
        """How good predictions are; -1 is none."""
        decided = places[predictions[places] != UNDECIDED]
        right, *same = (predictions[decided] == other[decided] for other in (labels, zero_shot, few_shot))
        accuracy, interval = mean_and_interval(right)
        similarities = dict(zip(("similarity_0", "similarity_k"), (mean_and_interval(s)[0] for s in same), strict=True))
        share = len(decided) / max(len(places), 1)
        return Score(title=title, decided=share, accuracy=accuracy, interval=interval, **similarities)

    def row(name: str, decomposition: Decomposition, title: str) -> IclRow:
        scores, rules = decomposition.scores("positive"), (classes, config.top, config.purity)
        predictions = np.full(len(labels), UNDECIDED)
        for fold in range(FOLDS):
            others = np.isin(np.arange(len(labels)), places[folds != fold])
            own = places[folds == fold]
            predictions[own] = classify(decomposition, label_weights(scores, labels, others, *rules)[0])[own]
        weights, left_out = label_weights(scores, labels, counted, *rules)
        decided = places[predictions[places] != UNDECIDED]
        right, beside = ((each == labels)[decided].astype(int) for each in (predictions, corrected))
        gain, gain_interval = mean_and_interval(right - beside)
        return IclRow(
            **vars(score(title, predictions)),
            name=name,
            method=decomposition.config.method,
            components=len(decomposition.components),
            tuned=weights.sum(axis=1).astype(int).tolist(),
            left_out=left_out,
            in_sample=score(title, classify(decomposition, weights)).accuracy,
            gain=gain,
            gain_interval=gain_interval,
            p=mcnemar(right, beside),
        )

    methods = [decomposition.config.method for decomposition in opened.values()]
    titles = [METHOD_TITLES[m] if methods.count(m) == 1 else n for n, m in zip(opened, methods, strict=True)]
    models = {"0-shot": zero_shot, CORRECTED: corrected, f"{config.shots}-shot": few_shot}
    return IclTable(
        npeff=__version__,
        run=run.fingerprint,
        task=run.manifest.task.name,
        model=run.manifest.model,
        options={name: value for name, value in to_dict(config).items() if name not in ("run", "device")},
        context=context,
        examples=len(places),
        models=[score(title, predictions) for title, predictions in models.items()],
        rows=[row(*item, title) for item, title in zip(opened.items(), titles, strict=True)],
    )


# --- the 0-shot model with other thresholds ---------------------------------------------------------------------


def correct(probabilities: Array, labels: Array, places: Array, folds: Array) -> Array:
    """Predictions of the model without a context after offsets of its answers, which undo a bias for some of them.

    Args:
        probabilities: Of the answers, [m, classes].
        labels: Label numbers, int64 [m].
        places: Examples to predict, [n].
        folds: Number of the fold of each, [n]: its offsets are those that fit the other folds best.

    Returns:
        The answer number of each example, int64 [m]; -1 for those that are not asked for.
    """
    scores = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    predictions = np.full(len(labels), UNDECIDED)
    for fold in np.unique(folds):
        others, own = places[folds != fold], places[folds == fold]
        predictions[own] = (scores[own] + fit_offsets(scores[others], labels[others])).argmax(axis=1)
    return predictions


def fit_offsets(scores: Array, labels: Array, sweeps: int = 3) -> Array:
    """Offsets of the answers' scores that make most predictions right: the best one for each answer in turn.

    Args:
        scores: Of the answers, float64 [n, classes].
        labels: Label numbers, int64 [n].
        sweeps: How often each answer has its turn.

    Returns:
        The offsets, [classes]; with two answers this is the threshold with the highest accuracy.
    """
    offsets = np.zeros(scores.shape[1])
    for _ in range(sweeps if len(labels) else 0):
        for answer in range(len(offsets)):
            rivals = scores + offsets
            rivals[:, answer] = -np.inf
            # the answer is given where its offset is above this
            needed = rivals.max(axis=1) - scores[:, answer]
            order = np.argsort(needed)
            gains = (labels == answer).astype(int) - (labels == rivals.argmax(axis=1))
            total = np.concatenate([[0], np.cumsum(gains[order])])  # with the first so many given the answer
            ends = np.concatenate([[needed[order[0]] - 2], needed[order], [needed[order[-1]] + 2]])
            middles = (ends[1:] + ends[:-1]) / 2
            total = np.where(ends[1:] > ends[:-1], total, total.min())  # equal ones cannot be told apart
            best = np.flatnonzero(total == total.max())
            offsets[answer] = middles[best[np.abs(middles[best] - offsets[answer]).argmin()]]
    return offsets


# --- how sure it is -----------------------------------------------------------------------------------------------


def mcnemar(first: Array, second: Array) -> float | None:
    """Whether two classifiers are right equally often, from the examples where only one of them is.

    Args:
        first: Whether the first is right, 0 or 1 [n].
        second: Whether the second is, [n].

    Returns:
        Two-sided p of the exact test; None without examples.
    """
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    differing = only_first + only_second
    return (stats.binomtest(only_first, differing).pvalue if differing else 1.0) if len(first) else None


# --- the classifier on components -------------------------------------------------------------------------------


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


def classify(decomposition: Decomposition, weights: Array) -> Array:
    """The label with the largest sum of coefficients of the components that vote for it, for every example.

    A cluster counts as a coefficient of one, as in the paper. Signed coefficients (SVDs) are ranked from the largest
    down and enter with their sign.

    Args:
        decomposition: The components and the coefficients of all m examples.
        weights: Which label each component votes for, float32 [classes, C].

    Returns:
        The label number of each example, int64 [m]; -1 where no component has a vote, or all labels have as many.
    """
    coefficients = decomposition.coefficients.float()
    if decomposition.config.method == "clusters":
        coefficients = (coefficients > 0).float()
    sums = (coefficients @ torch.from_numpy(weights).T).numpy()
    return np.where(sums.max(axis=1) == sums.min(axis=1), UNDECIDED, sums.argmax(axis=1))


def report(result: IclTable) -> list[str | Table]:
    """What there is to read: a line for each decomposition's classifier, and for the model itself.

    Args:
        result: What was measured.

    Returns:
        The table in percent, and what it means.
    """
    shots, sets = result.options["shots"], result.options["sets"]
    titles = {"title": "predictions of", "decided": "decided", "accuracy": "accuracy", "interval": "95% interval"}
    titles |= {"in_sample": "accuracy in-sample", "similarity_0": "agrees with 0-shot"}
    titles |= {"similarity_k": f"agrees with {shots}-shot", "gain": "gain", "gain_interval": "95% interval", "p": "p"}
    caption = (
        f"{result.task}, {result.model}, {result.examples} examples, best of {sets} contexts. Accuracy is among the "
        f"examples that are decided; gain is over the 0-shot model with offsets of its answers, on the same examples "
        f"(p of McNemar's exact test). In percent:"
    )
    columns = [Column(name, ".2g" if name == "p" else ".1f", title) for name, title in titles.items()]
    rows = [[_cell(row, name) for name in titles] for row in (*result.rows, *result.models)]
    note = (
        f"What components vote for, and the offsets of answers, are fitted on four fifths of the examples, scored on "
        f"the others, {FOLDS} times. In-sample: the scored examples have a say, as in the paper. An example without a "
        f"vote is not decided, and counts for nothing else."
    )
    return [Table(caption, columns, [*rows]), note]


def _cell(row: Score, name: str) -> Cell:
    """An entry of the table, shares and their intervals in percent; None where a model's predictions have none."""
    value = getattr(row, name, None)
    if isinstance(value, tuple):
        return f"{100 * value[0]:.1f} to {100 * value[1]:.1f}"
    return value if value is None or name in ("title", "p") else 100 * value


def _draw(axes: Any, result: IclTable) -> None:
    """A bar for each accuracy, with its interval."""
    rows = [row for row in (*result.rows, *result.models) if row.accuracy is not None and row.interval is not None]
    values = [100 * (row.accuracy or 0) for row in rows]
    ends = np.array([[100 * end for end in row.interval or ()] for row in rows]).reshape(-1, 2).T
    errors = np.abs(ends - values)
    colours = [BLUE if isinstance(row, IclRow) else "#a7a7a7" for row in rows]
    axes.bar(range(len(rows)), values, color=colours, yerr=errors)
    axes.set_xticks(range(len(rows)), [row.title for row in rows], rotation=30, ha="right")
    axes.set(ylim=(0, 100), ylabel="accuracy among decided, %", title=f"{result.task}, {result.examples} examples")
