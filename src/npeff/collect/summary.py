"""A finished collection in a few lines: what was kept, what the model answered, and what looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from npeff.collect.config import parse_directions
from npeff.store.examples import accuracy
from npeff.store.run import Run
from npeff.utils.text import percent

ONE_SIDED = 0.95
"""From this share of all predictions on, one answer is called out."""
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
        lines += _answers(run)
        if "kept" in run.table.column_names:
            lines.append(_kept(run))
    aside = np.flatnonzero(~run.usable)
    if len(aside):
        lines.append(f"{len(aside)} examples set aside: {', '.join(map(str, aside[:8]))}")
    return "\n".join(lines)


def _answers(run: Run) -> Iterator[str]:
    """How predictions are distributed, and how often they are right, beside what always saying the same gives."""
    table = run.table.filter(run.usable)
    counts = Counter(sorted(table["prediction_text"].to_pylist())).most_common()
    shown = ", ".join(f"{text!r} {percent(count / len(table), 3)}" for text, count in counts[:_SHOWN])
    yield f"predictions: {shown}{f', ... ({len(counts)} different ones)' if len(counts) > _SHOWN else ''}"
    known = table.filter(table["label"].is_valid())
    if len(known) and run.manifest.task.labels:
        right = accuracy(table, run.manifest.task.labels)
        commonest = np.bincount(known["label"].to_numpy()).max() / len(known)
        yield f"accuracy {right:.1%} on {len(known)} labelled examples; always the commonest label: {commonest:.1%}"
    answer, count = counts[0]
    if count / len(table) >= ONE_SIDED:
        yield (
            f"Warning: the model answers {answer!r} on {percent(count / len(table), 3)} of the examples. Components of "
            f"a task that it does not do say little: try another prompt, other labels, or another model."
        )


def _kept(run: Run) -> str:
    """How much of the Fishers the directions keep."""
    kept = np.mean(run.table["kept"].to_numpy()[run.usable])
    kind, _ = parse_directions(run.manifest.config["directions"]["directions"])
    random = " (random directions: right on average, for one example above or below)"
    note = random if kind in ("projection", "sampling") else ""
    return f"directions keep {kept:.1%} of the Fisher's trace at the outputs{note}"
