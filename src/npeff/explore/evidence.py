"""Perturbations of a run's model along its components, as the page shows them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npeff.decompose.base import Decomposition
from npeff.perturb.evaluate import summary
from npeff.perturb.identity import identity
from npeff.perturb.where import Place, by_layer_and_kind
from npeff.store.layout import PERTURBATIONS
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, sha256
from npeff.utils.text import short

Record = dict[str, Any]
"""What was measured of a component, as `npeff perturb` has written it."""


@dataclass(frozen=True)
class About:
    """What a perturbation did."""

    name: str
    """Its name."""
    direction: str
    """How the direction was made from the component."""
    way: str
    """How the component was brought back from the sketch."""
    at: str
    """What fixed the length of the change."""
    top: int
    """Top examples that were measured."""
    random: int
    """Random examples that were measured."""


@dataclass(frozen=True)
class Perturbed:
    """A perturbation in a line; means are geometric, over components, and None where they are not finite."""

    about: About
    """What it did."""
    components: int
    """Components that were perturbed."""
    kl_ratio: float | None
    """Mean KL ratio."""
    norm_ratio: float | None
    """Mean norm ratio."""
    predicted_ratio: float | None
    """Mean KL ratio as predicted to second order."""


@dataclass(frozen=True)
class HeatMap:
    """Where a change lives in the model."""

    layers: list[int]
    """Numbers of the layers; -1 is outside of any."""
    kinds: list[str]
    """Kinds of modules; the experts of a layer are one kind."""
    shares: list[list[float]]
    """Part of the squared length, [layers][kinds]."""


@dataclass(frozen=True)
class Measured:
    """What a perturbation measured of a component."""

    about: About
    """What it did."""
    fidelity: float
    """Cosine of the change's sketch with the component."""
    best: int
    """Which outcome has the largest KL ratio."""
    outcomes: list[object]
    """What each sign did, as `npeff perturb` has written it."""
    curve: list[object]
    """KL ratios at other lengths of the change."""
    heat: HeatMap
    """Where the change lives."""
    largest: list[object]
    """Its largest entries."""


@dataclass(frozen=True)
class Perturbation:
    """Results of one `npeff perturb`, as far as it has come."""

    about: About
    """What it did."""
    records: dict[int, Record]
    """Component → what was measured."""


def digests(run: Run) -> dict[str, str]:
    """Perturbation → digest of the files that it is read from."""
    found = {}
    for folder in _folders(run):
        lines = "\n".join(f"{file.name} {sha256(file)}" for file in (folder / "config.json", *_record_files(folder)))
        found[folder.name] = hashlib.sha256(lines.encode()).hexdigest()
    return found


def read_perturbations(run: Run, name: str, decomposition: Decomposition) -> list[Perturbation]:
    """Perturbations along the components of a decomposition; those of one that has been replaced are left out.

    Args:
        run: The run.
        name: Name of the decomposition.
        decomposition: The decomposition as it is now.

    Returns:
        Its perturbations, by name.

    Raises:
        UserError: The files of a perturbation are damaged.
    """
    perturbations = []
    for folder in _folders(run):
        try:
            perturbations += _read(run, folder, name, decomposition)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is damaged: no {error}. Run the same `npeff perturb` again, or delete it."
            ) from error
    return perturbations


def _read(run: Run, folder: Path, name: str, decomposition: Decomposition) -> list[Perturbation]:
    """The perturbation in `folder`, if it is of this decomposition and has results."""
    values = read_object(folder / "config.json")
    config, key = values["config"], values["key"]
    if config["decomposition"] not in (None, name) or key != identity(run, decomposition, config):
        return []
    records = [read_object(file) for file in _record_files(folder)]
    mine = {record["component"]: record for record in records if record.get("key", key) == key}
    at = f"KL {config['target_kl']:g}" if config["magnitude"] is None else f"length {config['magnitude']:g}"
    about = About(folder.name, config["direction"], config["way"], at, config["top"], config["random"])
    return [Perturbation(about, mine)] if mine else []


def _folders(run: Run) -> list[Path]:
    return sorted(path.parent for path in (run.path / PERTURBATIONS).glob("*/config.json"))


def _record_files(folder: Path) -> list[Path]:
    return sorted((folder / "components").glob("*.json"))


def in_lines(perturbations: Sequence[Perturbation]) -> list[Perturbed]:
    """Every perturbation in a line."""
    lines = []
    for each in perturbations:
        means = summary(list(each.records.values()))
        ratios = (_finite(means[name]) for name in ("kl_ratio", "norm_ratio", "predicted_ratio"))
        lines.append(Perturbed(each.about, means["components"], *ratios))
    return lines


def largest_ratios(perturbations: Sequence[Perturbation], components: int) -> list[float | None] | None:
    """The largest KL ratio of each component, [C]; None if none was perturbed."""
    ratios: list[float | None] = [None] * components
    for each in perturbations:
        for component, record in each.records.items():
            ratio = record["best"]["ratio"]
            ratios[component] = _finite(max(ratio, ratios[component] or ratio))
    return ratios if perturbations else None


def of_component(perturbations: Sequence[Perturbation], component: int) -> list[Measured]:
    """For a component's page: what each perturbation that has it measured."""
    return [
        Measured(
            about=each.about,
            best=record["outcomes"].index(record["best"]),
            heat=heat_map(record["where"]),
            **{name: record[name] for name in ("fidelity", "outcomes", "curve", "largest")},
        )
        for each in perturbations
        if (record := each.records.get(component)) is not None
    ]


def heat_map(where: Sequence[Mapping[str, Any]]) -> HeatMap:
    """Part of the squared length by layer and kind of module; the experts of a layer are put together."""
    places = [Place(**{**place, "kind": re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place["kind"])}) for place in where]
    return HeatMap(*by_layer_and_kind(places))


def _finite(value: float | None) -> float | None:
    """Six digits of a number; None for what is none."""
    return None if value is None or not math.isfinite(value) else short(value)
