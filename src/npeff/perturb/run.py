"""`npeff perturb`: change the model along components, and measure which examples are affected."""

from __future__ import annotations

import itertools
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


def _folder(run: Run, decomposition: Decomposition, config: PerturbConfig) -> Path:
    """Where results go. Version 0.1.0 named those of the only decomposition after its method: they are continued."""
    parent, ending = run.path / PERTURBATIONS, f"-{config.direction}-{config.way}"
    folder, old = parent / f"{config.decomposition}{ending}", parent / f"{decomposition.config.method}{ending}"
    if config.perturbation is None and not folder.exists() and (old / "config.json").is_file():
        made = read_record(report.Made, old / "config.json")
        if made.config.get("decomposition") is None and made.key == report.identity(run, decomposition, made.config):
            return old
    return parent / config.perturbation if config.perturbation else folder


def _perturb_one(run: Run, config: PerturbConfig) -> report.Results:
    decomposition = open_decomposition(run, config.decomposition)
    check_method(decomposition)
    folder = _folder(run, decomposition, config)
    plan = make_plan(run, decomposition, config.component, config.count, config.top, config.random, config.seed)
    with only_one(folder):
        key = _start(folder, run, decomposition, plan, config)
        chosen = folder / "notes.json"
        notes = report.read_own(Notes, chosen, key, None) if chosen.is_file() else Notes(key=key)
        records = {record.component: record for record in report.read_components(folder, key)}
        missing = [number for number in plan.components if not _is_complete(records.get(number), config)]
        if missing:
            session = _Session(run, decomposition, plan, replace(config, ridge=config.ridge or notes.ridge), folder)
            if not chosen.is_file():
                notes = replace(session.directions.notes, key=key)
                write_record(chosen, notes, sealed=True)
            vectors = session.lift(missing) if config.way == "lift" else session.sense(missing)
            for record in itertools.starmap(session.record, vectors):
                old = records.get(record.component, record)  # it may have what is not asked for now
                new = replace(record, curve=record.curve or old.curve, saved=record.saved or old.saved, key=key)
                records[new.component] = new
                write_record(report.record_path(folder, new.component), new, sealed=True)
                tqdm.write(_in_words(new))
        results = report.write_results(folder, [records[number] for number in sorted(records)], notes, key)
    summary = results.summary
    print(
        f"KL ratio {summary.kl_ratio:.3g} (in-sample, geometric mean of {summary.components} components), "
        f"norm ratio {summary.norm_ratio:.2f}; in {folder}"
    )
    return results


def _start(folder: Path, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig) -> str:
    """Write what the results are made of, or refuse results of other options; returns its digest."""
    remove_partials(folder, below=True)
    path, components = folder / "config.json", set(plan.components)
    key = report.identity(run, decomposition, to_dict(config))
    old = read_record(report.Made, path) if path.is_file() else None
    reasons = [] if old is None else report.differences(run, decomposition, old, to_dict(config))
    if reasons and not config.overwrite:
        raise UserError(
            f"{folder} was made with other options: {'; '.join(reasons)}. Choose another --perturbation, or "
            f"--overwrite it."
        )
    if old is None or reasons:  # of other options, or nobody knows of which
        for file in (*(folder / "components").glob("[!.]*.json"), folder / "notes.json"):
            file.unlink(missing_ok=True)
    elif old.key != key:  # results of 0.1.0 keep their config and key
        return old.key
    else:
        components |= set(old.config["component"])
    values = to_dict(replace(config, component=tuple(sorted(components))))
    write_record(path, report.Made(__version__, "perturb", values, key), sealed=True)
    return key


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

    def __init__(self, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig, folder: Path) -> None:
        self.run, self.plan, self.config, self.folder = run, plan, config, folder
        how = (config.direction, config.threshold, config.ridge, config.carriers, config.seed)
        self.directions = plan_directions(run, decomposition, plan, *how)
        self.prepared = prepare_run(run, config.device)
        self.prompts = read_prompts(run, self.prepared)
        self.evaluator = Evaluator(run, self.prepared, self.prompts, plan)
        self.chunk = decomposition.config.chunk

    def _print_estimate(self, components: list[int], lifting: int | None) -> None:
        """How long it will take, from the time of the random examples' forward passes."""
        each = self.evaluator.seconds_per_example
        passes = sum(self.evaluator.passes(self.plan.tops[number], self.config) for number in components)
        first = "" if lifting is None else f"lifting takes about {duration(each * lifting)}, "
        print(f"{len(components)} to do: {first}measuring about {duration(each * passes)}.", flush=True)

    def lift(self, components: list[int]) -> Vectors:
        """Exact vectors, as many at a time as memory allows."""
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

    def sense(self, components: list[int]) -> Vectors:
        """Vectors from the sketch alone."""
        scaled = Scaled(self.prepared.collector.sketch)
        planted = check_sketch(scaled)
        self._print_estimate(components, None)
        for number in tqdm(components, desc="Sensing", unit="component", disable=None):
            target = self.directions.targets[self.plan.components.index(number)]
            sensed = sense(scaled, target, self.config.sensing)
            about = {"entries": sensed.entries, "residual": sensed.residual, "iterations": sensed.iterations}
            yield number, sensed.vector, about | {"planted_cosine": planted}

    def record(self, number: int, vector: Parameters, about: About) -> report.ComponentRecord:
        """Everything about one component."""
        place = self.plan.components.index(number)
        length = scale_to_unit(vector)
        sketched = self.prepared.collector.sketch.matvec(vector).cpu()
        fidelity = torch.nn.functional.cosine_similarity(sketched, self.directions.targets[place], dim=0)
        outcomes, best, curve = self.evaluator.measure(self.plan.tops[number], vector, self.config)
        scale, config = best.sign * best.magnitude, self.config
        where, largest = find_places(vector), largest_entries(self.prepared.selection, vector)
        saved = save_change(self.folder, number, config.save, self.prepared, vector, scale, config.adapter_share)
        measured = (best, outcomes, curve, where, largest, saved, self.directions.stationarity[place])
        return report.ComponentRecord(number, length, float(fidelity), *measured, **about)
