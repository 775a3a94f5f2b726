"""A finished collection in a few lines: what was kept, what the model answered, and what looks wrong."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from npeff.collect.config import parse_directions
from npeff.store.examples import accuracy
from npeff.store.run import Run
from npeff.utils import percent

ONE_SIDED = 0.95
"""From this share of all predictions on, one answer is called out."""
FEWEST = 8
"""With fewer examples than this nothing is called out: chance would do it."""
_LITTLE = "Components of a task that the model does not do say little."
_TRY = "Try a prompt that names the answers, worked examples (--few-shot 4), other labels, or another model."
ADVICE = f"{_LITTLE} {_TRY}"
CLASSES_ADVICE = f"{_LITTLE} Are these texts, and pairs of texts, what the classifier was trained on?"
_SHOWN = 5


def summary(run: Run, notes: tuple[str, ...] = ()) -> str:
    """What was collected, for people to read.

    Args:
        run: A finished run.
        notes: What reading the data has to say.

    Returns:
        A few lines.
    """
    rows = int(run.table["rank"].to_numpy().sum())
    lines = [f"{len(run.table)} examples, {rows} rows in {run.path}", *notes]
    if run.usable.any():
        table, labels = run.table.filter(run.usable), run.manifest.task.labels
        warnings = list(answer_warnings(table, labels))
        advice = CLASSES_ADVICE if run.manifest.task.answers == "classes" else ADVICE
        lines += [*answer_lines(table, labels), *warnings, *([advice] if warnings else [])]
        if "kept" in run.table.column_names:
            lines.append(_kept(run))
    aside = np.flatnonzero(~run.usable)
    if len(aside):
        lines.append(f"{len(aside)} examples set aside: {', '.join(map(str, aside[:8]))}")
    return "\n".join(lines)


def answer_lines(table: pa.Table, labels: Sequence[str]) -> Iterator[str]:
    """How predictions are distributed, and how often they are right, beside what always saying the same gives.

    Args:
        table: Usable examples, with what the model predicts.
        labels: The task's; none where answers are open.

    Yields:
        Lines for people to read.
    """
    counts = _counts(table)
    shown = ", ".join(f"{text!r} {percent(count / len(table), 3)}" for text, count in counts[:_SHOWN])
    yield f"predictions: {shown}{f', ... ({len(counts)} different ones)' if len(counts) > _SHOWN else ''}"
    right = accuracy(table, labels)
    if right is not None:
        known = len(table) - table["label"].null_count
        chance, commonest = _by_chance(table)
        line = f"accuracy {right:.1%} on {known} labelled examples; the same predictions at random: {chance:.1%}"
        yield f"{line}; always the commonest label: {commonest:.1%}"


def answer_warnings(table: pa.Table, labels: Sequence[str]) -> Iterator[str]:
    """Signs that a model does not do its task.

    Args:
        table: Usable examples, with what the model predicts.
        labels: The task's; none where answers are open.

    Yields:
        Lines for people to read.
    """
    (answer, count), right = _counts(table)[0], accuracy(table, labels)
    chance, commonest = (0.0, 0.0) if right is None else _by_chance(table)
    if count / len(table) >= ONE_SIDED and len(table) >= FEWEST and commonest < ONE_SIDED:
        yield f"Warning: the model answers {answer!r} on {percent(count / len(table), 3)} of the examples."
    known = len(table) - table["label"].null_count
    if right is None or known < FEWEST or chance == 1:
        return
    by_luck = chance + 2 * math.sqrt(chance * (1 - chance) / known)
    if commonest == 1:
        yield "Warning: all examples have one label; accuracy says nothing. Sorted data? --shuffle-seed 0 mixes them."
    elif right <= by_luck:
        yield f"Warning: accuracy of {right:.1%} is not above chance: {chance:.1%}, by luck up to {by_luck:.1%}."


def _counts(table: pa.Table) -> list[tuple[str, int]]:
    return Counter(sorted(table["prediction_text"].to_pylist())).most_common()


def _by_chance(table: pa.Table) -> tuple[float, float]:
    """Accuracy if the same predictions were dealt out at random, and if always the commonest label was predicted."""
    known = table.filter(table["label"].is_valid())
    most = 1 + max(pc.max(known[name]).as_py() for name in ("label", "prediction"))
    shares = [np.bincount(known[name].to_numpy(), minlength=most) / len(known) for name in ("label", "prediction")]
    return float(shares[0] @ shares[1]), float(shares[0].max())


def _kept(run: Run) -> str:
    """How much of the Fishers the directions keep."""
    kept = np.mean(run.table["kept"].to_numpy()[run.usable])
    kind, _ = parse_directions(run.manifest.config["directions"]["directions"])
    random = " (random directions: right on average, for one example above or below)"
    note = random if kind in ("projection", "sampling") else ""
    return f"directions keep {kept:.1%} of the Fisher's trace at the outputs{note}"
