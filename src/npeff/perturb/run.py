"""`npeff perturb`: change the model along components, and measure which examples are affected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.perturb import report
from npeff.perturb.config import ALL, PerturbConfig
from npeff.perturb.evaluate import Evaluator
from npeff.perturb.lift import LIFTABLE_METHODS, Lifter, Parameters, check_method, scale_to_unit, truncate
from npeff.perturb.protocol import Plan, make_plan
from npeff.perturb.sensing import Scaled, check_sketch, sense
from npeff.perturb.weights import save_change
from npeff.perturb.where import find_places, largest_entries
from npeff.perturb.whitening import Notes, plan_directions
from npeff.store.layout import PERTURBATIONS, choose_decomposition, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import read_record, to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, remove_partials
from npeff.utils.text import duration
from npeff.utils.version import __version__


def perturb(config: PerturbConfig) -> dict[str, report.Results]:
    """Perturb the components that `config` names; files are in RUN/perturbations/NAME.

    Args:
        config: Which components, how, and what to measure.

    Returns:
        Decomposition → its results, of these components and of those that were measured before.
    """
    run = Run.open(config.run)
    every = config.decomposition == ALL
    names = _liftable(run) if every else [choose_decomposition(run.path, config.decomposition)]
    if config.decomposition is None:
        print(f"Components of {names[0]}:", flush=True)
    results = {name: _perturb_one(run, replace(config, decomposition=name)) for name in names}
    overview = report.write_overview(run.path / PERTURBATIONS)
    if every:
        print(f"\n{overview.markdown()}\nin {run.path / PERTURBATIONS}")
    return results


def _liftable(run: Run) -> list[str]:
    """Decompositions of a run whose components are directions of parameters, in the order of the paper's table."""
    methods = {name: open_decomposition(run, name).config.method for name in decomposition_names(run.path)}
    names = [name for method in LIFTABLE_METHODS for name in methods if methods[name] == method]
    if not names:
        raise UserError(
            f"{run.path} has no decomposition of {', '.join(LIFTABLE_METHODS)}. `npeff compare {run.path}` makes them."
        )
    return names


def _perturb_one(run: Run, config: PerturbConfig) -> report.Results:
    decomposition = open_decomposition(run, config.decomposition)
    check_method(decomposition)
    folder = _folder(run, decomposition, config)
    plan = make_plan(run, decomposition, config.component, config.count, config.top, config.random, config.seed)
    with only_one(folder):
        key = _start(folder, run, decomposition, plan, config)
        notes = _read_notes(folder, key)
        records = {record.component: record for record in report.read_components(folder, key)}
        missing = [number for number in plan.components if not _is_complete(records.get(number), config)]
        if missing:
            session = _Session(run, decomposition, plan, config, notes)
            notes = replace(session.directions.notes, key=key) if notes is None else notes
            write_record(folder / "notes.json", notes, sealed=True)
            for record in session.perturb(missing, folder):
                records[record.component] = _merge(records.get(record.component), replace(record, key=key))
                write_record(report.record_path(folder, record.component), records[record.component], sealed=True)
                tqdm.write(_in_words(record))
        everything = [records[number] for number in sorted(records)]
        results = report.write_results(folder, everything, notes or Notes(key=key), key)
    summary = results.summary
    print(
        f"KL ratio {summary.kl_ratio:.3g} (geometric mean of {summary.components} components), "
        f"norm ratio {summary.norm_ratio:.2f}; in {folder}"
    )
    return results


def _folder(run: Run, decomposition: Decomposition, config: PerturbConfig) -> Path:
    """Where results go."""
    parent, ending = run.path / PERTURBATIONS, f"-{config.direction}-{config.way}"
    folder = parent / (config.perturbation or f"{config.decomposition}{ending}")
    old = parent / f"{decomposition.config.method}{ending}"  # as 0.1.0 named results of the only decomposition
    if config.perturbation is None and not folder.exists() and (old / "config.json").is_file():
        made = read_record(report.Made, old / "config.json")
        if made.config.get("decomposition") is None and made.key == report.identity(run, decomposition, made.config):
            return old
    return folder


def _start(folder: Path, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig) -> str:
    """Write what the results are made of, or refuse results of other options; returns its digest."""
    remove_partials(folder, below=True)
    path = folder / "config.json"
    old = read_record(report.Made, path) if path.is_file() else None
    key = report.identity(run, decomposition, to_dict(config))
    if old is not None and old.key != key:
        reasons = report.differences(run, decomposition, old, to_dict(config))
        if not reasons:  # results of 0.1.0 keep their config and key
            return old.key
        if not config.overwrite:
            raise UserError(
                f"{folder} was made with other options: {'; '.join(reasons)}. Choose another --perturbation, or "
                f"--overwrite it."
            )
    files = list((folder / "components").glob("[!.]*.json"))
    if old is None or old.key != key:  # of other options, or nobody knows of which
        for file in (*files, folder / "notes.json"):
            file.unlink(missing_ok=True)
        files = []
    components = sorted({*plan.components, *(int(file.stem) for file in files if file.stem.isdecimal())})
    values = to_dict(replace(config, component=tuple(components)))
    write_record(path, report.Made(__version__, "perturb", values, key), sealed=True)
    return key


def _read_notes(folder: Path, key: str) -> Notes | None:
    """What was chosen for earlier components, if there are any."""
    path = folder / "notes.json"
    notes = read_record(Notes, path) if path.is_file() else None
    if notes is not None and notes.key not in (None, key):
        raise UserError(f"{path} is of something else. Delete it, and it is made again.")
    return notes


def _is_complete(record: report.ComponentRecord | None, config: PerturbConfig) -> bool:
    """Whether a record has all that is asked for."""
    if record is None or (config.predict and record.best.predicted_ratio is None):
        return False
    if config.curve and len(record.curve) != len(config.curve):
        return False
    return config.save == "nothing" or (
        record.saved is not None
        and Path(record.saved.path).parts[0] == config.save
        and record.saved.share in (None, config.adapter_share)
    )


def _merge(old: report.ComponentRecord | None, new: report.ComponentRecord) -> report.ComponentRecord:
    """A record that was made again, with what only the old one has."""
    return new if old is None else replace(new, curve=new.curve or old.curve, saved=new.saved or old.saved)


def _in_words(record: report.ComponentRecord) -> str:
    best = record.best
    return (
        f"component {record.component}: KL ratio {best.ratio:.3g} (top {best.top_kl:.3g}, random "
        f"{best.random_kl:.3g}) at length {best.magnitude:.3g}, fidelity {record.fidelity:.3f}"
    )


About = dict[str, Any]
"""How a vector was found: fields of `ComponentRecord`."""
Vectors = Iterator[tuple[int, Parameters, About]]
"""Components, their vectors, and how these were found."""


class _Session:
    """The model at work: vectors for a few components at a time, and their evaluation."""

    def __init__(
        self, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig, notes: Notes | None
    ) -> None:
        self.run, self.plan, self.config = run, plan, config
        ridge = config.ridge if config.ridge is not None or notes is None else notes.ridge
        self.directions = plan_directions(
            run, decomposition, plan, config.direction, config.threshold, ridge, config.carriers, config.seed
        )
        self.prepared = prepare_run(run, config.device)
        self.prompts = read_prompts(run, self.prepared)
        self.evaluator = Evaluator(run, self.prepared, self.prompts, plan)
        self.chunk = decomposition.config.chunk

    def perturb(self, components: list[int], folder: Path) -> Iterator[report.ComponentRecord]:
        """Records of components, as they are finished."""
        vectors = self._lift(components) if self.config.way == "lift" else self._sense(components)
        for number, vector, about in vectors:
            yield self._record(number, vector, about, folder)

    def _print_estimate(self, components: list[int], lifting: int | None) -> None:
        """How long it will take, from the time of the random examples' forward passes."""
        each = self.evaluator.seconds_per_example
        passes = sum(self.evaluator.passes(self.plan.tops[number], self.config) for number in components)
        first = "" if lifting is None else f"lifting takes about {duration(each * lifting)}, "
        print(f"{len(components)} to do: {first}measuring about {duration(each * passes)}.", flush=True)

    def _lift(self, components: list[int]) -> Vectors:
        lifter = Lifter(self.run, self.prepared, self.prompts)
        size = max(1, int(self.config.memory_gb * 1e9 / (4 * self.prepared.selection.size)))
        for start in range(0, len(components), size):
            group = components[start : start + size]
            sums = self.directions.sums.take([self.plan.components.index(number) for number in group])
            sources = {kind: self.run.source(kind) for kind in sums.weights}
            sums, kept, cosines = truncate(sums, sources, self.config.fidelity, self.chunk)
            if start == 0:
                self._print_estimate(components, lifter.passes(sums) * len(components) // len(group))
            vectors = lifter.lift(sums)
            for j, number in enumerate(group):
                # handed over one by one, so that a vector's memory is free when its evaluation is done
                vector, vectors[j] = vectors[j], {}
                yield number, vector, {"examples": kept[j], "truncation": cosines[j]}

    def _sense(self, components: list[int]) -> Vectors:
        scaled = Scaled(self.prepared.collector.sketch)
        planted = check_sketch(scaled)
        self._print_estimate(components, None)
        for number in tqdm(components, desc="Sensing", unit="component", disable=None):
            target = self.directions.targets[self.plan.components.index(number)]
            sensed = sense(scaled, target, self.config.sensing)
            about = {"entries": sensed.entries, "residual": sensed.residual, "iterations": sensed.iterations}
            yield number, sensed.vector, about | {"planted_cosine": planted}

    def _record(self, number: int, vector: Parameters, about: About, folder: Path) -> report.ComponentRecord:
        """Everything about one component."""
        place = self.plan.components.index(number)
        length = scale_to_unit(vector)
        sketched = self.prepared.collector.sketch.matvec(vector).cpu()
        fidelity = torch.nn.functional.cosine_similarity(sketched, self.directions.targets[place], dim=0)
        outcomes, best, curve = self.evaluator.measure(self.plan.tops[number], vector, self.config)
        scale, config = best.sign * best.magnitude, self.config
        return report.ComponentRecord(
            component=number,
            length=length,
            fidelity=float(fidelity),
            best=best,
            outcomes=outcomes,
            curve=curve,
            where=find_places(vector),
            largest=largest_entries(self.prepared.selection, vector),
            saved=save_change(folder, number, config.save, self.prepared, vector, scale, config.adapter_share),
            stationarity=self.directions.stationarity[place],
            **about,
        )
