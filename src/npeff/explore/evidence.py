"""Perturbations of a run's model along its components, as the page shows them."""

from collections.abc import Sequence
from dataclasses import replace

from npeff.decompose.base import Decomposition
from npeff.perturb import records as recorded
from npeff.perturb.records import ComponentRecord, Summary
from npeff.perturb.report import compared_at
from npeff.perturb.statistics import Interval
from npeff.perturb.where import Place, by_layer_and_kind
from npeff.store.layout import PERTURBATIONS
from npeff.store.run import Run
from npeff.utils import Record, UserError, read_record


class About(Record):
    """What a perturbation did, in a line."""

    name: str
    """Its name."""
    direction: str
    """How the direction was made from the component."""
    way: str
    """How the component was brought back from the sketch."""
    at: str
    """What fixed the length of the change."""
    parts: dict[str, int]
    """Examples that took part in fit, tune and test; empty while it is not finished."""
    summary: Summary
    """Means over its components."""


class Effect(Record):
    """What changing the model along a component did to held-out examples."""

    ratio: float
    """KL ratio."""
    interval: Interval | None
    """Its 95% interval."""
    limit: float | None
    """The largest ratio that chance gives; None if that was not measured."""


class HeatMap(Record):
    """Where a change lives in the model."""

    layers: list[int]
    """Numbers of the layers; -1 is outside of any."""
    kinds: list[str]
    """Kinds of modules; the experts of a layer are one kind."""
    shares: list[list[float]]
    """Part of the squared length, [layers][kinds]."""


class Measured(Record):
    """What a perturbation measured of a component."""

    about: About
    """What it did."""
    record: ComponentRecord
    """What `npeff perturb` has written, without the parts by module."""
    limit: float | None
    """The largest ratio that chance gives; None if that was not measured."""
    others: int
    """Random examples that were measured and are no top examples of the component."""
    heat: HeatMap
    """Where the change lives."""


Perturbation = tuple[About, dict[int, ComponentRecord]]
"""Results of one `npeff perturb`, as far as it has come: what it did, and component → what was measured."""


def read_perturbations(run: Run, name: str, decomposition: Decomposition) -> list[Perturbation]:
    """Perturbations along the components of a decomposition; those of one that has been replaced are left out.

    So are those of versions that knew no held-out examples.

    Args:
        run: The run.
        name: Name of the decomposition.
        decomposition: The decomposition as it is now.

    Returns:
        Its perturbations: those on held-out examples first, then by how many components they have, then by name.

    Raises:
        UserError: The files of a perturbation are damaged.
    """
    perturbations = []
    for file in sorted((run.path / PERTURBATIONS).glob("*/config.json")):
        folder, made = file.parent, read_record(recorded.Made, file)
        config = made.config
        try:
            key = recorded.identity(run, decomposition, config, made.evaluated)
            fits = config["decomposition"] == name and made.key == key and not config.get("group")
            did = (config["direction"], config["way"], compared_at(config))
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder} is damaged: no {error}. Delete it, or run `npeff perturb` again.") from error
        every = recorded.read_records(folder, made.key) if fits else []
        records = {record.component: record for record in every if record.kind == "component"}
        if records:
            finished = folder / "results.json"
            results = read_record(recorded.Results, finished) if finished.is_file() else None
            parts = results.parts if results is not None and results.key == made.key else {}  # others are replaced now
            summary = recorded.summarise(every, config["protocol"])
            perturbations.append((About(folder.name, *did, parts, summary), records))
    return sorted(perturbations, key=lambda each: (each[0].summary.protocol != "heldout", -len(each[1])))


def heldout_effects(perturbations: Sequence[Perturbation], components: int) -> list[Effect | None] | None:
    """How strongly each component acts on held-out examples, by the perturbation that has most components.

    Args:
        perturbations: Perturbations of a decomposition, as `read_perturbations` orders them.
        components: Number of its components C.

    Returns:
        The effect of each component, [C]; None if there is no held-out perturbation.
    """
    if not perturbations or perturbations[0][0].summary.protocol != "heldout":
        return None
    about, records = perturbations[0]
    null, best = about.summary.null, {j: record.best for j, record in records.items()}
    effects = {j: Effect(one.ratio, one.interval, recorded.chance_limit(one, null)) for j, one in best.items()}
    return [effects.get(j) for j in range(components)]


def of_component(perturbations: Sequence[Perturbation], component: int) -> list[Measured]:
    """What was measured of a component.

    Args:
        perturbations: Perturbations of a decomposition.
        component: The component.

    Returns:
        The results of each perturbation that has it.
    """
    found = []
    for about, record in ((about, records[component]) for about, records in perturbations if component in records):
        limit, others = recorded.chance_limit(record.best, about.summary.null), record.best.random_kls
        heat = heat_map(record.where)
        found.append(Measured(about, _light(record), limit, len(others) - others.count(None), heat))
    return found


def _light(record: ComponentRecord) -> ComponentRecord:
    """A record without what the page does not show."""
    return replace(record, where=[], best=replace(record.best, top_kls=[], random_kls=[]))


def heat_map(where: Sequence[Place]) -> HeatMap:
    """Part of the squared length by layer and kind of module; the experts of a layer are put together."""
    return HeatMap(*by_layer_and_kind(where))
