"""`npeff sweep`: how many components? Losses held in and held out, and how many components have a tuning."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from npeff.analyse import tunings
from npeff.analyse.config import SweepConfig
from npeff.analyse.run import read_examples
from npeff.decompose.base import Decomposition
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import FitConfig
from npeff.decompose.run import fit, fit_key
from npeff.store.run import Run
from npeff.utils import distributed
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_object, write_csv, write_json
from npeff.utils.report import new_figure, write_figure
from npeff.utils.tables import write_tables

MEASURED = "measured.json"
"""File of all rows that were measured, so that a sweep continues."""
TOP = 16
"""A component is tuned if all of this many top examples agree."""


@dataclass(frozen=True)
class Row:
    """One number of components."""

    components: int
    held_in_loss: float
    held_out_loss: float
    prediction_tuned: float | None
    """Share of components whose top held-out examples have one prediction; None if no component has enough examples."""
    lnp_tuned: float | None
    """Share whose top examples have one label but not one prediction; None without labels."""
    passes: int


def sweep(config: SweepConfig) -> list[Row]:
    """Fit every number of components, write the table, the plot and the advice; returns the table's rows."""
    distributed.start()
    run = Run.open(config.run)
    directory = run.path / "sweeps" / (config.name or f"{config.method}-{config.seed}")
    fits = {count: config.with_components(count) for count in sorted(set(config.components))}
    first = distributed.rank() == 0
    rows: list[Row] = []
    with only_one(directory, active=first):
        measured = _read_measured(directory)
        distributed.barrier()  # all have read it before the first one writes
        for count, fit_config in fits.items():
            key = _key(run, fit_config, config.holdout)
            checkpoint = Checkpoint(directory / f".{count}.checkpoint", key)
            if key not in measured:
                measured[key] = _row(run, fit(run, fit_config, config.holdout, checkpoint, quiet=False))
                if first:
                    write_json(directory / MEASURED, {key: asdict(row) for key, row in measured.items()}, sealed=True)
            checkpoint.clear()
            rows.append(measured[key])
            if first:
                print(markdown(rows[-1:], header=len(rows) == 1))
        if first:
            write(directory, rows)
            print(f"\n{advice(rows)}\nTable and plot: {directory}")
    return rows


def _key(run: Run, config: FitConfig, holdout: float) -> str:
    """What a row of the table depends on; the examples' table has predictions, which may have been mended."""
    examples = run.manifest["examples_sha256"]
    text = f"{fit_key(run, config, holdout)} {config.max_passes} {config.tolerance} {TOP} {examples}"
    return hashlib.sha256(text.encode()).hexdigest()


def _read_measured(directory: Path) -> dict[str, Row]:
    """What earlier calls have measured, by key; nothing if the file is damaged: then it is measured again."""
    with contextlib.suppress(UserError, TypeError):
        if (directory / MEASURED).is_file():
            return {key: Row(**row) for key, row in read_object(directory / MEASURED).items()}
    return {}


def _row(run: Run, decomposition: Decomposition) -> Row:
    prediction, lnp = held_out_tunings(run, decomposition)
    notes = decomposition.notes
    if notes.held_in_loss is None or notes.held_out_loss is None:
        raise UserError("No usable example was held out, or none was left: choose another --holdout.")
    passes = len(decomposition.history.steps) - 1
    return Row(decomposition.config.components, notes.held_in_loss, notes.held_out_loss, prediction, lnp, passes)


def held_out_tunings(run: Run, decomposition: Decomposition, top: int = TOP) -> tuple[float | None, float | None]:
    """Shares of components that are tuned to a prediction, and to a label but not a prediction, on held-out examples.

    None where no component has `top` of them, or without labels.
    """
    examples = read_examples(run)
    held_out = np.zeros_like(examples.usable)
    held_out[decomposition.notes.held_out] = True
    examples = dataclasses.replace(examples, usable=examples.usable & held_out)
    orders = decomposition.orders
    components = tunings.find_tunings(((order, decomposition.scores(order)) for order in orders), examples, top)
    rates = tunings.rates(components, tunings.expected_rates(examples, top, len(orders)))
    prediction, lnp = rates["prediction"], rates["lnp"]
    return prediction.share if prediction else None, lnp.share if lnp else None


def advice(rows: list[Row]) -> str:
    """Which number to take, in words."""
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
    with_labels = [row for row in rows if row.lnp_tuned]
    allowed = [row for row in with_labels if row.components <= best_loss.components]
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


def markdown(rows: list[Row], header: bool = True) -> str:
    """The table."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    lines = [
        "| components | held-in loss | held-out loss | pred. tuned | LnP tuned | passes |",
        "|---|---|---|---|---|---|",
    ]
    body = [
        f"| {row.components} | {row.held_in_loss:.4f} | {row.held_out_loss:.4f} | {share(row.prediction_tuned)} "
        f"| {share(row.lnp_tuned)} | {row.passes} |"
        for row in rows
    ]
    return "\n".join([*(lines if header else []), *body])


def write(directory: Path, rows: list[Row]) -> None:
    """sweep.md, sweep.tex, sweep.csv, sweep.png, sweep.svg and, last, sweep.json."""
    write_tables(directory / "sweep", f"{markdown(rows)}\n\n{advice(rows)}\n")
    names = [item.name for item in dataclasses.fields(Row)]
    write_csv(directory / "sweep.csv", [names, *(list(asdict(row).values()) for row in rows)])
    _plot(directory / "sweep", rows)
    write_json(directory / "sweep.json", {"rows": [asdict(row) for row in rows], "advice": advice(rows)})


def _plot(path: Path, rows: list[Row]) -> None:
    figure = new_figure(9, 3.5)
    losses, tunings = figure.subplots(1, 2)
    counts = [row.components for row in rows]
    losses.plot(counts, [row.held_in_loss for row in rows], "o-", label="held in")
    losses.plot(counts, [row.held_out_loss for row in rows], "o-", label="held out")
    losses.set(ylabel="loss per example")
    for label, values in (
        ("prediction tuned", [row.prediction_tuned for row in rows]),
        ("label, not prediction", [row.lnp_tuned for row in rows]),
    ):
        tunings.plot(counts, [np.nan if value is None else 100 * value for value in values], "o-", label=label)
    tunings.set(ylabel="% of components")
    for axes in (losses, tunings):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="components")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.legend()
    write_figure(path, figure)
