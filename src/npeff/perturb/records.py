"""Records of perturbations: what is measured, what it is made of, and all components together."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from npeff.collect.identity import changes
from npeff.decompose.base import Decomposition
from npeff.perturb import statistics
from npeff.perturb.elsewhere import RUNNING_TEXT
from npeff.perturb.evaluate import CurvePoint, Outcome, Trial
from npeff.perturb.statistics import Interval, geometric_mean
from npeff.perturb.weights import Saved
from npeff.perturb.where import Entry, Place
from npeff.perturb.whitening import Notes
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError, read_record


class Made(Record):
    """What results were made with: config.json."""

    npeff: str
    """Version."""
    command: str
    """perturb."""
    config: dict[str, Any]
    """Options, as `npeff replay` reads them."""
    key: str
    """Digest of the run, the decomposition and the settings: see `identity`."""
    evaluated: str | None = None
    """Fingerprint of the run that held-out examples are from, if it is another one."""


class ComponentRecord(Record):
    """What was measured of one component, or of a null in its place: components/NUMBER.json, nulls/NUMBER.json."""

    component: int
    """Its number."""
    length: float
    """Euclidean length of the vector before it was made a unit vector."""
    fidelity: float
    """Cosine between the sketch of the vector and the direction that was asked for."""
    best: Outcome
    """What was measured on the test part, for the order and sign that did best on the tune part."""
    curve: list[CurvePoint] = field(default_factory=list)
    """Ratios at other magnitudes, if that was asked for."""
    where: list[Place] = field(default_factory=list)
    """The vector's parts by module."""
    largest: list[Entry] = field(default_factory=list)
    """The vector's largest entries."""
    saved: Saved | None = None
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
    tried: list[Trial] = field(default_factory=list)
    """Every order and sign on the tune part."""
    kind: str = "component"
    """`component`, or `null`: a random group of examples took the place of a component's in every part."""

    removed: ClassVar[dict[str, str]] = {"outcomes": "what was tried is in `tried`."}


class Null(Record):
    """What the same code gives for random groups of examples in place of components."""

    groups: int
    """How many groups."""
    ratio: float
    """Geometric mean of their KL ratios."""
    interval: Interval | None
    """95% interval of that mean; None for fewer than three groups."""
    single: Interval | None
    """Interval that holds 95% of such ratios; an effect within it is none."""


class Summary(Record):
    """All components together."""

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
    protocol: str = "paper"
    """heldout, or paper: then the ratios are in-sample."""
    interval: Interval | None = None
    """95% interval of the mean KL ratio, by bootstrap over components and examples; None for a single component."""
    null: Null | None = None
    """What random groups give; None if none were measured."""
    above_null: int | None = None
    """Components whose ratio is above what chance gives."""
    elsewhere: float | None = None
    """KL a token on running text ÷ KL of top examples, geometric mean."""

    def in_words(self) -> str:
        """What to print.

        Returns:
            One or two lines.
        """
        sample = "held-out" if self.protocol == "heldout" else "in-sample"
        words = f"KL ratio {self.kl_ratio:.3g}{_between(self.interval)} ({sample}, geometric mean of {self.components})"
        if self.null is not None:
            words += f"; random groups {self.null.ratio:.3g}{_between(self.null.interval)}"
        if self.above_null is not None:
            words += f". {self.above_null} of {self.components} components are above chance"
        words += f"; norm ratio {self.norm_ratio:.2f}."
        if self.elsewhere is not None:
            words += f" Running text changes {self.elsewhere:.2g} times as much as the top examples, a token."
        return words


class Results(Record):
    """Everything that was measured so far: results.json."""

    summary: Summary
    """All components together."""
    notes: Notes = field(default_factory=Notes)
    """What was chosen before the first component was perturbed."""
    components: list[ComponentRecord] = field(default_factory=list)
    """One record for each component, by number."""
    key: str = ""
    """Which settings of which run and decomposition they were measured with."""
    nulls: list[ComponentRecord] = field(default_factory=list)
    """One record for each random group."""
    parts: dict[str, int] = field(default_factory=dict)
    """Examples that took part in the fit, in choices (tune), and in measuring (test)."""


def _between(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval[0]:.3g}, {interval[1]:.3g}]"


def chance_limit(best: Outcome, null: Null | None) -> float | None:
    """The largest ratio that chance gives.

    Args:
        best: What was measured of a component.
        null: What random groups give, if they were measured.

    Returns:
        Upper end of the null's 95% interval: of random groups or of permuted coefficients, whichever is larger. None if
        neither is known.
    """
    limits = [null.single[1]] if null is not None and null.single is not None else []
    limits += [best.permuted.high] if best.permuted is not None else []
    return max(limits, default=None)


def in_words(record: ComponentRecord, what: str = "component") -> str:
    """The outcome of a component, or of what took its place, in a line."""
    best = record.best
    return (
        f"{what} {record.component}: KL ratio {best.ratio:.3g}{_between(best.interval)} (top {best.top_kl:.3g}, "
        f"random {best.random_kl:.3g}) at length {best.magnitude:.3g}, fidelity {record.fidelity:.3f}"
    )


# --- what results are made of -------------------------------------------------------------------------------

_NOT_SETTINGS = (
    *("run", "perturbation", "overwrite", "device", "memory_gb", "component", "group", "count", "nulls"),
    *("evaluate_on", "predict", "ranks", "curve", "save", "adapter_share"),
)
"""Options that say which components to measure, where, how fast and what comes with it; not what the results are."""


def identity(run: Run, decomposition: Decomposition, config: Mapping[str, Any], evaluated: str | None = None) -> str:
    """Digest of what results depend on, whichever components they are of.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        config: Options as `Made` has them.
        evaluated: Fingerprint of the run that held-out examples are from, if it is another one.

    Returns:
        The digest of the runs, the decomposition and the settings.
    """
    digest = hashlib.sha256(decomposition.components.contiguous().numpy().data)
    digest.update(decomposition.coefficients.contiguous().numpy().data)
    made_of = [run.fingerprint, run.manifest.examples_sha256, digest.hexdigest(), _settings(config)]
    made_of += [evaluated] if evaluated else []
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that results depend on."""
    settings = {name: value for name, value in config.items() if name not in _NOT_SETTINGS}
    return settings | ({"group": "some"} if config.get("group") else {})  # groups and components are not mixed


def differences(
    run: Run, decomposition: Decomposition, old: Made, config: Mapping[str, Any], evaluated: str | None = None
) -> list[str]:
    """Why results cannot be added to others.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        old: What the others were made with.
        config: The options of now.
        evaluated: Fingerprint of the run that held-out examples are from, if it is another one.

    Returns:
        A part of a sentence for each reason; none if they can.
    """
    if "protocol" not in old.config:
        return [f"npeff {old.npeff} measured it by rules that are no longer in use"]
    changed = [
        f"--{name.rpartition('.')[2].replace('_', '-')} was {value} and is now {other}"
        for name, value, other in changes(_settings(old.config), _settings(config))
    ]
    if old.evaluated != evaluated:
        changed.append("--evaluate-on was another run")
    if not changed and identity(run, decomposition, old.config, evaluated) != old.key:
        changed = ["the run or its decomposition was another one"]
    return changed


# --- reading ------------------------------------------------------------------------------------------------


def record_path(folder: Path, kind: str, number: int) -> Path:
    """The file of the record of a component or a null."""
    return folder / f"{kind}s" / f"{number:05d}.json"


Own = TypeVar("Own", ComponentRecord, Results, Notes)


def read_own(kind: type[Own], path: Path, key: str) -> Own:
    """A record of a perturbation.

    Args:
        kind: Its class.
        path: Its file.
        key: What it should be made of.

    Returns:
        The record.

    Raises:
        UserError: It is made of something else.
    """
    record = read_record(kind, path)
    if record.key != key:
        raise UserError(f"{path} is of something else. Delete it, and run `npeff perturb` again.")
    return record


def read_records(folder: Path, key: str) -> list[ComponentRecord]:
    """The records of all components and nulls that are done.

    Args:
        folder: Directory of the results.
        key: What they should be made of.

    Returns:
        The records, components by number before nulls by number.

    Raises:
        UserError: A record is damaged, or of something else.
    """
    records = []
    for path in (*sorted(folder.glob("components/[!.]*.json")), *sorted(folder.glob("nulls/[!.]*.json"))):
        record = read_own(ComponentRecord, path, key)
        if record_path(folder, record.kind, record.component) != path:
            raise UserError(f"{path} is the record of {record.kind} {record.component}. Delete it: it is made again.")
        records.append(record)
    return records


def read_results(folder: Path) -> Results:
    """The results of a perturbation.

    Args:
        folder: RUN/perturbations/NAME.

    Returns:
        The results.
    """
    return read_own(Results, folder / "results.json", read_record(Made, folder / "config.json").key)


# --- all components together ---------------------------------------------------------------------------------


def summarise(records: Sequence[ComponentRecord], protocol: str = "paper") -> Summary:
    """Geometric means over components, with intervals, beside what nulls give.

    Args:
        records: At least one component, and nulls if there are any.
        protocol: Of the measurement.

    Returns:
        The summary.
    """
    components = [record for record in records if record.kind == "component"]
    best = [record.best for record in components]
    null = _null([record.best.ratio for record in records if record.kind == "null"])
    predicted = [outcome.predicted_ratio for outcome in best if outcome.predicted_ratio is not None]
    limits = [chance_limit(outcome, null) for outcome in best]
    above = [outcome.ratio > limit for outcome, limit in zip(best, limits, strict=True) if limit is not None]
    damages = [damage for outcome in best if (damage := damage_ratio(outcome)) is not None]
    measured = [outcome for outcome in best if outcome.top_kls]
    return Summary(
        components=len(components),
        kl_ratio=geometric_mean(outcome.ratio for outcome in best),
        norm_ratio=geometric_mean(outcome.norm_ratio for outcome in best),
        predicted_ratio=geometric_mean(predicted) if predicted else None,
        fidelity=min(record.fidelity for record in components),
        protocol=protocol,
        interval=statistics.mean_interval(*kls_of(measured)) if measured else None,
        null=null,
        above_null=sum(above) if above else None,
        elsewhere=geometric_mean(damages) if damages else None,
    )


def kls_of(outcomes: Sequence[Outcome]) -> tuple[list[Array], list[Array]]:
    """Divergences of top and of random examples of some outcomes, NaN for random ones that are top examples."""
    randoms = [np.array([math.nan if kl is None else kl for kl in outcome.random_kls]) for outcome in outcomes]
    return [np.array(outcome.top_kls) for outcome in outcomes], randoms


def damage_ratio(outcome: Outcome) -> float | None:
    """KL a token on running text ÷ KL of the top examples; None where it was not measured."""
    damage = next((damage.kl for damage in outcome.elsewhere if damage.text == RUNNING_TEXT), None)
    return None if damage is None else statistics.ratio(damage, outcome.top_kl)


def _null(ratios: list[float]) -> Null | None:
    if not ratios:
        return None
    return Null(
        len(ratios), geometric_mean(ratios), statistics.average_interval(ratios), statistics.next_interval(ratios)
    )
