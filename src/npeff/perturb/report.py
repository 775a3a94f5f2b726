"""Results of perturbations: records, files, tables and figures."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from npeff.collect.identity import changes
from npeff.decompose.base import Decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.evaluate import CurvePoint, Outcome, geometric_mean
from npeff.perturb.weights import Saved
from npeff.perturb.where import Entry, Place, by_layer_and_kind
from npeff.perturb.whitening import Notes
from npeff.store.run import Run
from npeff.utils.configs import read_record, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, remove_partials
from npeff.utils.report import Column, Emphasis, Table, draw_figure, new_figure, write_figure, write_report

_PATIENCE = 10.0
"""Seconds to wait for another perturbation that writes its table; that takes milliseconds."""
_SHOWN = 12
"""Most heat maps in a figure."""


@dataclass(frozen=True)
class Made:
    """What results were made with: config.json."""

    npeff: str
    """Version."""
    command: str
    """perturb."""
    config: dict[str, Any]
    """Options, as `npeff replay` reads them."""
    key: str
    """Digest of the run, the decomposition and the settings: see `identity`."""


@dataclass(frozen=True)
class ComponentRecord:
    """What was measured of one component: components/NUMBER.json."""

    component: int
    """Its number."""
    length: float
    """Euclidean length of the vector before it was made a unit vector."""
    fidelity: float
    """Cosine between the sketch of the vector and the direction that was asked for."""
    best: Outcome
    """The outcome with the highest ratio."""
    outcomes: list[Outcome]
    """Outcomes of every order and both signs."""
    curve: list[CurvePoint]
    """Ratios at other magnitudes, if that was asked for."""
    where: list[Place]
    """The vector's parts by module."""
    largest: list[Entry]
    """The vector's largest entries."""
    saved: Saved | None
    """The change that was written, if that was asked for."""
    stationarity: float | None = None
    """Cosine of the component with the sum of rows that stands for it."""
    examples: int | None = None
    """lift: examples that the vector was lifted from."""
    truncation: float | None = None
    """lift: cosine of their sum with the whole sum."""
    entries: int | None = None
    """sensing: entries of the vector that are not zero."""
    residual: float | None = None
    """sensing: relative residual of the sketch."""
    iterations: int | None = None
    """sensing: iterations of the solver."""
    planted_cosine: float | None = None
    """sensing: cosine with which the sketch gives a planted vector back."""
    key: str | None = None
    """Which settings of which run and decomposition it was measured with."""


@dataclass(frozen=True)
class Summary:
    """All components together, each by its best sign and order, as in the paper's table."""

    components: int
    """How many there are."""
    kl_ratio: float
    """Geometric mean of the KL ratios."""
    norm_ratio: float
    """Geometric mean of the norm ratios."""
    predicted_ratio: float | None
    """Geometric mean of the predicted ratios, where there are any."""
    fidelity: float
    """The lowest fidelity."""


@dataclass(frozen=True)
class Results:
    """Everything that was measured so far: results.json."""

    summary: Summary
    """All components together."""
    notes: Notes = field(default_factory=Notes)
    """What was chosen before the first component was perturbed."""
    components: list[ComponentRecord] = field(default_factory=list)
    """One record for each component, by number."""
    key: str = ""
    """Which settings of which run and decomposition they were measured with."""


# --- what results are made of -------------------------------------------------------------------------------

_NOT_IDENTITY_OF_0_1 = ("run", "label", "overwrite", "device", "memory_gb", "predict")
_NOT_SETTINGS = (
    *("run", "perturbation", "overwrite", "device", "memory_gb", "component", "count"),
    *("predict", "curve", "save", "adapter_share", "adapter_rank"),
)
"""Options that say which components to measure, where, how fast and what comes with it; not what the results are."""
_FIXED = {"gamma": 0.99, "beta": 4.0, "inner_tolerance": 1e-3, "debias": 0}
"""Options of 0.1.0 whose values are fixed now."""


def identity(run: Run, decomposition: Decomposition, config: Mapping[str, Any]) -> str:
    """Digest of what results depend on, whichever components they are of.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        config: Options as `Made` has them, of this version or of 0.1.0.

    Returns:
        The digest of the run, the decomposition and the settings.
    """
    if "components" in config:  # of 0.1.0, which took the list of components into account
        settings = {name: value for name, value in config.items() if name not in _NOT_IDENTITY_OF_0_1}
    else:
        settings = _settings(config)
    digest = hashlib.sha256(decomposition.components.contiguous().numpy().data)
    digest.update(decomposition.coefficients.contiguous().numpy().data)
    made_of = [run.fingerprint, run.manifest.examples_sha256, digest.hexdigest(), settings]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that results depend on, with their names of today."""
    named = {PerturbConfig.renamed.get(name, name): value for name, value in config.items()}
    named = {"background_rows": 4096, **named, "sensing": {**_FIXED, **config.get("sensing", {})}}
    return {name: value for name, value in named.items() if name not in _NOT_SETTINGS}


def differences(run: Run, decomposition: Decomposition, old: Made, config: Mapping[str, Any]) -> list[str]:
    """Why results cannot be added to others.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        old: What the others were made with.
        config: The options of now.

    Returns:
        A part of a sentence for each reason; none if they can.
    """
    before, now = _settings(old.config), _settings(config)
    before["decomposition"] = before.get("decomposition") or now["decomposition"]
    changed = [
        f"--{name.rpartition('.')[2].replace('_', '-')} was {value} and is now {other}"
        for name, value, other in changes(before, now)
    ]
    if not changed and identity(run, decomposition, old.config) != old.key:
        changed = ["the run or its decomposition was another one"]
    return changed


# --- reading ------------------------------------------------------------------------------------------------


def record_path(folder: Path, component: int) -> Path:
    """The file of a component's record."""
    return folder / "components" / f"{component:05d}.json"


Own = TypeVar("Own", ComponentRecord, Results, Notes)


def read_own(kind: type[Own], path: Path, *keys: str | None) -> Own:
    """A record of a perturbation.

    Args:
        kind: Its class.
        path: Its file.
        *keys: What it may be made of.

    Returns:
        The record.

    Raises:
        UserError: It is made of something else.
    """
    record = read_record(kind, path)
    if record.key not in keys:
        raise UserError(f"{path} is of something else. Delete it, and run `npeff perturb` again.")
    return record


def read_components(folder: Path, key: str) -> list[ComponentRecord]:
    """The records of all components that are done.

    Args:
        folder: Directory of the results.
        key: What they should be made of.

    Returns:
        The records, by number.

    Raises:
        UserError: A record is damaged, or of something else.
    """
    records = []
    for path in sorted((folder / "components").glob("[!.]*.json")):
        record = read_own(ComponentRecord, path, key)
        if record_path(folder, record.component) != path:
            raise UserError(f"{path} is the record of component {record.component}. Delete it, and it is made again.")
        records.append(record)
    return records


def read_results(folder: Path) -> Results:
    """The results of a perturbation.

    Args:
        folder: RUN/perturbations/NAME, also of 0.1.0.

    Returns:
        The results.
    """
    return read_own(Results, folder / "results.json", read_record(Made, folder / "config.json").key)


# --- writing ------------------------------------------------------------------------------------------------


def summarise(records: Sequence[ComponentRecord]) -> Summary:
    """Geometric means over components, each by its best sign and order.

    Args:
        records: At least one component.

    Returns:
        The summary.
    """
    best = [record.best for record in records]
    predicted = [outcome.predicted_ratio for outcome in best if outcome.predicted_ratio is not None]
    return Summary(
        components=len(records),
        kl_ratio=geometric_mean(outcome.ratio for outcome in best),
        norm_ratio=geometric_mean(outcome.norm_ratio for outcome in best),
        predicted_ratio=geometric_mean(predicted) if predicted else None,
        fidelity=min(record.fidelity for record in records),
    )


def write_results(folder: Path, records: list[ComponentRecord], notes: Notes, key: str) -> Results:
    """Write results.json, results.csv, table.md and .tex, and the figures.

    Args:
        folder: Directory of the results.
        records: All components so far.
        notes: What was chosen before the first of them.
        key: What they are made of.

    Returns:
        What results.json holds.
    """
    results = Results(summarise(records), notes, records, key)
    write_record(folder / "results.json", results, sealed=True)
    _outcomes("All outcomes.", [(r, outcome) for r in records for outcome in r.outcomes]).write_csv(
        folder / "results.csv"
    )
    best = _outcomes("The best sign and order of every component, and geometric means.", [(r, r.best) for r in records])
    means = [Emphasis(results.summary.kl_ratio), results.summary.predicted_ratio, results.summary.norm_ratio]
    best.rows.append(["geometric mean", None, None, None, *means, *[None] * (len(best.columns) - 7)])
    write_report(folder / "table", [best])
    curves = {record.component: record.curve for record in records if record.curve}
    if curves:
        draw_figure(folder / "curve", _draw_curves, curves)
    _draw_places(folder / "where", records[:_SHOWN])
    return results


_FORMATS = {"order": "", "sign": "", "ratio": ".3g", "predicted_ratio": ".3g", "norm_ratio": ".2f", "magnitude": ".3g"}
_FORMATS |= {"top_kl": ".3g", "related_kl": "", "random_kl": ".3g"}
"""What tables say of an outcome, and how; what has no format is only in results.csv."""


def _outcomes(caption: str, outcomes: Sequence[tuple[ComponentRecord, Outcome]]) -> Table:
    """A line for each outcome."""
    columns = [Column("component"), Column("fidelity", ".3f")]
    for name, style in _FORMATS.items():
        title = "KL ratio" if name == "ratio" else name.replace("_", " ").replace("kl", "KL")
        columns.append(Column(name, style, title, None if style else "csv"))
    columns += [Column(f"flipped_{group}", title=f"flipped {group}") for group in ("top", "random")]
    columns += [Column(f"accuracy {group}", only="text") for group in ("top", "random")]
    table = Table(caption, columns)
    for record, outcome in outcomes:
        values = [getattr(outcome, name) for name in _FORMATS]
        values += [outcome.flipped[group] for group in ("top", "random")]
        values += [_arrow(outcome.accuracy.get(group)) for group in ("top", "random")]
        table.rows.append([str(record.component), record.fidelity, *values])
    return table


def _arrow(pair: tuple[float, float] | None) -> str | None:
    return None if pair is None else f"{pair[0]:.0%} → {pair[1]:.0%}"


def _draw_curves(axes: Any, curves: Mapping[int, Sequence[CurvePoint]]) -> None:
    for component, points in curves.items():
        sizes, ratios = [point.magnitude for point in points], [point.ratio for point in points]
        axes.plot(sizes, ratios, marker=".", label=str(component))
    axes.set(xscale="log", yscale="log", xlabel="length of the change", ylabel="KL of top ÷ KL of random examples")
    axes.legend(title="component", fontsize="small", ncols=2)


def _draw_places(path: Path, records: Sequence[ComponentRecord]) -> None:
    """A heat map for every component: share of the squared length by layer and kind of module."""
    columns = min(4, len(records))
    rows = -(-len(records) // columns)
    figure = new_figure(3 * columns, 3.2 * rows)
    for number, record in enumerate(records):
        layers, kinds, shares = by_layer_and_kind(record.where)
        axes = figure.add_subplot(rows, columns, number + 1)
        image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0)
        axes.set_title(f"component {record.component}", fontsize="small")
        axes.set_xticks(range(len(kinds)), [kind.split(".")[-1] for kind in kinds], rotation=90, fontsize="x-small")
        shown = range(0, len(layers), max(1, len(layers) // 6))
        axes.set_yticks(shown, [str(layers[place]) for place in shown])
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, shrink=0.8)
    write_figure(path, figure, dpi=120)


# --- all perturbations of a run -----------------------------------------------------------------------------


def write_overview(folder: Path) -> Table:
    """Write table.md, table.tex and table.csv of all finished results of a run, the highest ratio first.

    Args:
        folder: RUN/perturbations.

    Returns:
        The table.
    """
    names = ("perturbation", "decomposition", "direction", "way", "compared at", "components")
    heads = [*map(Column, names), *(Column(name, ".3g") for name in ("KL ratio", "norm ratio", "predicted"))]
    table = Table("All perturbations of the run: geometric means over components.", heads)
    summaries = [(path.parent, read_results(path.parent).summary) for path in folder.glob("*/results.json")]
    for path, summary in sorted(summaries, key=lambda pair: (-pair[1].kl_ratio, pair[0])):
        config = read_record(Made, path / "config.json").config
        options = [config.get(name) or "" for name in ("decomposition", "direction", "way")]
        ratios = [summary.kl_ratio, summary.norm_ratio, summary.predicted_ratio]
        table.rows.append([path.name, *options, compared_at(config), summary.components, *ratios])
    with only_one(folder, wait=_PATIENCE):
        remove_partials(folder)
        write_report(folder / "table", [table], csv=table)
    return table


def compared_at(config: Mapping[str, Any]) -> str:
    """What components have in common: the divergence of their top examples, or the length of the change."""
    fixed = config.get("magnitude")
    return f"KL {config.get('target_kl', math.nan):g}" if fixed is None else f"length {fixed:g}"
