"""`npeff sweep`: how many components? Losses held in and held out, and how many components have a tuning."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from npeff.analyse import tunings
from npeff.analyse.config import SweepConfig
from npeff.analyse.report import draw_by_count
from npeff.analyse.run import read_examples
from npeff.decompose.base import Decomposition
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import FitConfig, suggest_components
from npeff.decompose.run import fit, fit_key
from npeff.store.layout import SWEEPS
from npeff.store.run import Run
from npeff.utils import Record, UserError, distributed, from_dict, only_one, percent, read_object, to_dict
from npeff.utils.files import write_json
from npeff.utils.report import Axes, Column, Table, write_result

MEASURED = "measured.json"
"""File of all rows that were measured, so that a sweep continues."""
TOP = 16
"""A component is tuned if all of this many top examples agree."""
USERS = 32
"""Fitted examples that must use a planted mechanism for NPEFF to find it nearly always (docs/groundtruth.md)."""


class SweepRow(Record):
    """One number of components."""

    components: int
    """Number of components C."""
    held_in_loss: float
    """Mean squared distance of the fitted examples from their reconstruction."""
    held_out_loss: float
    """The same for examples that components were not fitted to."""
    prediction_tuned: float | None
    """Share of components whose top held-out examples have one prediction; None if no component has enough examples."""
    lnp_tuned: float | None
    """Share whose top examples have one label but not one prediction; None without labels."""
    passes: int
    """Passes until the fit ended."""


class Sweep(Record):
    """Several numbers of components beside each other (sweep.json)."""

    rows: list[SweepRow]
    """One for each number of components, ascending."""
    advice: str
    """Which number to take."""


def sweep(config: SweepConfig) -> Sweep:
    """Fit every number of components, and write the table, the figure and the advice.

    Args:
        config: The run, how to decompose it, and the numbers of components.

    Returns:
        What sweep.json holds.
    """
    distributed.start()
    run = Run.open(config.run)
    directory = run.path / SWEEPS / f"{config.method}-{config.seed}"
    fitted = round(int(run.usable.sum()) * (1 - config.holdout))
    counts = sorted(set(config.components)) or default_counts(fitted)
    first = distributed.rank() == 0
    rows: list[SweepRow] = []
    with only_one(directory, active=first):
        measured = _read_measured(directory)
        distributed.barrier()  # all have read it before the first one writes
        for count in counts:
            fit_config = config.with_components(count)
            key = _key(run, fit_config, config.holdout)
            checkpoint = Checkpoint(directory / f".{count}.checkpoint", key)
            if key not in measured:
                measured[key] = _row(run, fit(run, fit_config, config.holdout, checkpoint, quiet=False))
                if first:
                    write_json(directory / MEASURED, {key: to_dict(row) for key, row in measured.items()}, sealed=True)
            checkpoint.clear()
            rows.append(row := measured[key])
            if first:
                losses = f"{row.held_in_loss:.4f} held in, {row.held_out_loss:.4f} held out"
                print(f"{count} components: loss per example {losses}", flush=True)
        result = Sweep(rows, f"{advice(rows)} {reach(fitted)}")
        if first:
            text = write_result(directory / "sweep", result, [table(rows), result.advice], _draw, panels=2)
            print(f"\n{text}\nin {directory}")
    return result


def default_counts(examples: int) -> list[int]:
    """Numbers of components to try for so many examples to fit, around what `npeff decompose` would choose."""
    usual = 2 ** (suggest_components(examples).bit_length() - 1)
    return [count for count in (usual // 8, usual // 4, usual // 2, usual, 2 * usual) if 2 <= count <= examples] or [1]


def _key(run: Run, config: FitConfig, holdout: float) -> str:
    """What a row of the table depends on; the examples' table has predictions, which may have been repaired."""
    examples = run.manifest.examples_sha256
    text = f"{fit_key(run, config, holdout)} {config.max_passes} {config.tolerance} {TOP} {examples}"
    return hashlib.sha256(text.encode()).hexdigest()


def _read_measured(directory: Path) -> dict[str, SweepRow]:
    """What earlier calls have measured, by key; nothing if the file is damaged: then it is measured again."""
    with contextlib.suppress(UserError):
        if (directory / MEASURED).is_file():
            return {key: from_dict(SweepRow, row) for key, row in read_object(directory / MEASURED).items()}
    return {}


def _row(run: Run, decomposition: Decomposition) -> SweepRow:
    notes, passes = decomposition.notes, len(decomposition.history.steps) - 1
    if notes.held_in_loss is None or notes.held_out_loss is None:
        raise UserError("No usable example was held out, or none was left: choose another --holdout.")
    losses, tuned = (notes.held_in_loss, notes.held_out_loss), held_out_tunings(run, decomposition)
    return SweepRow(decomposition.config.components, *losses, *tuned, passes)


def held_out_tunings(run: Run, decomposition: Decomposition, top: int = TOP) -> tuple[float | None, float | None]:
    """Shares of components that are tuned to a prediction, and to a label but not a prediction, on held-out examples.

    Args:
        run: The run.
        decomposition: Of its held-in examples.
        top: How many top examples must agree.

    Returns:
        Both shares; None where no component has `top` active examples, or without labels.
    """
    examples = read_examples(run)
    held_out = np.zeros_like(examples.usable)
    held_out[decomposition.notes.held_out] = True
    examples = dataclasses.replace(examples, usable=examples.usable & held_out)
    _, rates = tunings.tunings_of(decomposition, examples, top)
    prediction, lnp = rates["prediction"], rates["lnp"]
    return prediction.share if prediction else None, lnp.share if lnp else None


def advice(rows: list[SweepRow]) -> str:
    """Which number of components to take, in words.

    Args:
        rows: What was measured, by ascending number of components.

    Returns:
        One or two sentences.
    """
    if len(rows) < 2:
        return "Try more than one number of components to compare."
    best_loss = min(rows, key=lambda row: row.held_out_loss)
    text = []
    if best_loss is rows[-1]:
        gap = rows[-1].held_out_loss - rows[-1].held_in_loss
        text.append(
            f"The held-out loss still falls at {rows[-1].components} components ({gap:.3f} above the held-in loss): "
            "more would not overfit yet, so choose by how fine the components should be."
        )
    else:
        text.append(f"The held-out loss is lowest at {best_loss.components} components: more overfit.")
    allowed = [row for row in rows if row.lnp_tuned and row.components <= best_loss.components]
    if allowed:
        best = max(allowed, key=lambda row: row.lnp_tuned or 0.0)
        text.append(
            f"The largest share of components tuned to a label but not to a prediction ({best.lnp_tuned:.1%}) is at "
            f"{best.components}: start there."
        )
    else:
        drops = [(a.held_out_loss - b.held_out_loss) / a.held_out_loss for a, b in pairwise(rows)]
        enough = next((rows[i] for i, drop in enumerate(drops) if drop < 0.02), best_loss)
        text.append(f"Beyond {enough.components} components the held-out loss gains little: start there.")
    return " ".join(text)


def reach(fitted: int) -> str:
    """How rare a mechanism may be to be found, in words.

    Args:
        fitted: Number of fitted examples.

    Returns:
        A sentence.
    """
    if fitted < 2 * USERS:
        return f"{fitted} fitted examples are few: only mechanisms that most of them use can be found."
    share = percent(USERS / fitted)
    return (
        f"With {fitted} fitted examples, expect to find mechanisms that {share} or more of them use ({USERS} of them); "
        "for rarer ones, more components do not help without more examples."
    )


def table(rows: list[SweepRow]) -> Table:
    """What was measured as a table.

    Args:
        rows: What was measured.

    Returns:
        A line per number of components.
    """
    losses = [Column("held_in_loss", ".4f", "held-in loss"), Column("held_out_loss", ".4f", "held-out loss")]
    tuned = [Column("prediction_tuned", ".1%", "pred. tuned"), Column("lnp_tuned", ".1%", "LnP tuned")]
    columns = [Column("components"), *losses, *tuned, Column("passes")]
    caption = "Loss per example, and components tuned on held-out examples"
    return Table(caption, columns, [[getattr(row, column.name) for column in columns] for row in rows])


def _draw(panels: Sequence[Axes], result: Sweep) -> None:
    """Losses at the left, tunings at the right."""
    losses = {"held_in_loss": "held in", "held_out_loss": "held out"}
    tuned = {"prediction_tuned": "prediction tuned", "lnp_tuned": "label, not prediction"}
    draw_by_count(panels[0], result.rows, losses, "loss per example")
    draw_by_count(panels[1], result.rows, tuned, "% of components", scale=100)
