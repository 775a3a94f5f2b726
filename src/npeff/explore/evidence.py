"""Perturbations of a run's model along its components, as the page shows them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npeff.decompose.base import Decomposition
from npeff.perturb.records import ComponentRecord, Made, Summary, identity, read_records, summarise
from npeff.perturb.report import compared_at
from npeff.perturb.where import Place, by_layer_and_kind
from npeff.store.layout import PERTURBATIONS
from npeff.store.run import Run
from npeff.utils.configs import read_record
from npeff.utils.errors import UserError
from npeff.utils.files import sha256


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
    protocol: str
    """heldout, or paper: then the ratios are in-sample."""


@dataclass(frozen=True)
class Perturbed:
    """A perturbation in a line."""

    about: About
    """What it did."""
    summary: Summary
    """Means over its components."""


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
    record: ComponentRecord
    """What `npeff perturb` has written, without the parts by module."""
    heat: HeatMap
    """Where the change lives."""


Perturbation = tuple[About, dict[int, ComponentRecord], Summary]
"""Results of one `npeff perturb`, as far as it has come: what it did, component → what was measured, all together."""


def digests(run: Run) -> dict[str, str]:
    """What the perturbations of a run are read from.

    Args:
        run: The run.

    Returns:
        Perturbation → digest of its files.
    """
    digest = {}
    for folder in _folders(run):
        files = (folder / "config.json", *sorted((folder / "components").glob("*.json")))
        lines = "\n".join(f"{file.name} {sha256(file)}" for file in files)
        digest[folder.name] = hashlib.sha256(lines.encode()).hexdigest()
    return digest


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
        made = read_record(Made, folder / "config.json")
        config = made.config
        try:
            key = identity(run, decomposition, config, made.evaluated)
            fits = config["decomposition"] in (None, name) and made.key == key
            did = (config["direction"], config["way"], compared_at(config), config["top"], config["random"])
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is damaged: no {error}. Run the same `npeff perturb` again, or delete it."
            ) from error
        every = read_records(folder, made.key) if fits else []
        records = {record.component: record for record in every if record.kind == "component"}
        if records:
            about = About(folder.name, *did, protocol=config.get("protocol", "paper"))
            perturbations.append((about, records, summarise(every, about.protocol)))
    return perturbations


def _folders(run: Run) -> list[Path]:
    return sorted(path.parent for path in (run.path / PERTURBATIONS).glob("*/config.json"))


def in_lines(perturbations: Sequence[Perturbation]) -> list[Perturbed]:
    """Every perturbation in a line."""
    return [Perturbed(about, summary) for about, _, summary in perturbations]


def largest_ratios(perturbations: Sequence[Perturbation], components: int) -> list[float | None] | None:
    """How strongly each component was seen to act.

    Args:
        perturbations: Perturbations of a decomposition.
        components: Number of its components C.

    Returns:
        The largest KL ratio of each component, [C]; None if there is no perturbation.
    """
    ratios = [[records[j].best.ratio for _, records, _ in perturbations if j in records] for j in range(components)]
    return [max(each, default=None) for each in ratios] if perturbations else None


def of_component(perturbations: Sequence[Perturbation], component: int) -> list[Measured]:
    """What was measured of a component.

    Args:
        perturbations: Perturbations of a decomposition.
        component: The component.

    Returns:
        The results of each perturbation that has it.
    """
    measured = [(about, records[component]) for about, records, _ in perturbations if component in records]
    return [Measured(about, replace(record, where=[]), heat_map(record.where)) for about, record in measured]


def heat_map(where: Sequence[Place]) -> HeatMap:
    """Part of the squared length by layer and kind of module; the experts of a layer are put together."""
    places = [replace(place, kind=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place.kind)) for place in where]
    return HeatMap(*by_layer_and_kind(places))
