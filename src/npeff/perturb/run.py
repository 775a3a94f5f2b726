"""`npeff perturb`: change the model along components, and measure which examples are affected."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from npeff.collect.identity import PLACES
from npeff.collect.identity import differences as identity_differences
from npeff.collect.session import prepare_run, prepare_to_edit, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.config import LIFTABLE_METHODS
from npeff.decompose.run import open_decomposition
from npeff.perturb import records as recorded
from npeff.perturb import report
from npeff.perturb.config import ALL, PerturbConfig
from npeff.perturb.elsewhere import Elsewhere, read_passages
from npeff.perturb.evaluate import Evaluator
from npeff.perturb.lift import Lifter, Parameters, check_method, scale_to_unit, truncate
from npeff.perturb.protocol import Plan, Subject, make_plan
from npeff.perturb.records import ComponentRecord, Results
from npeff.perturb.sensing import Scaled, check_sketch, sense
from npeff.perturb.weights import check_saving, save_change
from npeff.perturb.where import find_places, largest_entries
from npeff.perturb.whitening import DirectionMaker, Notes
from npeff.store.layout import PERTURBATIONS, choose_decomposition, decomposition_names
from npeff.store.run import Run
from npeff.utils import UserError, __version__, duration, only_one, read_record, remove_partials, to_dict, write_record


def perturb(config: PerturbConfig) -> dict[str, Results]:
    """Perturb the components that `config` names; files are in RUN/perturbations/NAME.

    Args:
        config: Which components, how, and what to measure.

    Returns:
        Decomposition → its results, of these components and of those that were measured before.
    """
    run = Run.open(config.run)
    evaluated = _open_evaluated(run, config.evaluate_on)
    passages = read_passages(config.elsewhere)
    every = config.decomposition == ALL
    names = _liftable(run) if every else [choose_decomposition(run.path, config.decomposition)]
    if config.decomposition is None:
        print(f"Components of {names[0]}:", flush=True)
    results = {name: _perturb_one(run, replace(config, decomposition=name), evaluated, passages) for name in names}
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


def _open_evaluated(run: Run, path: str | None) -> Run | None:
    """The run that held-out examples come from, if it is another one; it must have been collected in the same way."""
    if path is None:
        return None
    other = Run.open(path)
    but = ("data", "task", "directions", "collected", "shard_examples", "storage", *PLACES)
    changed = identity_differences(run.manifest.identity, other.manifest.identity, but)
    if changed:
        raise UserError(
            f"{path} was not collected as {run.path} was, so its rows cannot be compared: {changed}. "
            f"Collect its examples with the model and the sketch of {run.path}."
        )
    return other


def _perturb_one(run: Run, config: PerturbConfig, evaluated: Run | None, passages: list[str]) -> Results:
    decomposition = open_decomposition(run, config.decomposition)
    check_method(decomposition)
    whose = f"{config.decomposition}-groups" if config.group else config.decomposition
    name = config.perturbation or f"{whose}-{config.direction}-{config.way}-{config.protocol}"
    folder = run.path / PERTURBATIONS / name
    run.source(decomposition.kind)  # a run without its rows cannot be lifted from: that is told first
    plan = make_plan(run, decomposition, config, evaluated)
    with only_one(folder):
        key = _start(folder, run, decomposition, plan, config)
        chosen = folder / "notes.json"
        notes = recorded.read_own(Notes, chosen, key) if chosen.is_file() else Notes(key=key)
        records = {(record.kind, record.component): record for record in recorded.read_records(folder, key)}
        subjects = [plan.null(number, config.seed) for number in range(config.nulls)]
        subjects += [plan.component(number) for number in plan.components]
        missing = [each for each in subjects if not _is_complete(records.get((each.kind, each.number)), config)]
        if missing:
            settings = replace(config, ridge=config.ridge or notes.ridge)
            session = _Session(run, decomposition, plan, settings, folder, passages)
            if not chosen.is_file():
                notes = replace(session.directions.notes, key=key)
                write_record(chosen, notes, sealed=True)
            vectors = session.lift(missing) if config.way == "lift" else session.sense(missing)
            for record in itertools.starmap(session.record, vectors):
                old = records.get((record.kind, record.component), record)  # it may have what is not asked for now
                new = replace(record, curve=record.curve or old.curve, saved=record.saved or old.saved, key=key)
                records[new.kind, new.component] = new
                write_record(recorded.record_path(folder, new.kind, new.component), new, sealed=True)
                if new.kind == "component":
                    tqdm.write(recorded.in_words(new, "group" if config.group else "component"))
        results = report.write_results(folder, list(records.values()), notes, key, plan)
    print(f"{results.summary.in_words()}\nin {folder}")
    return results


def _start(folder: Path, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig) -> str:
    """Write what the results are made of, or refuse results of other options; returns its digest."""
    remove_partials(folder, below=True)
    path, components = folder / "config.json", set(plan.components)
    evaluated = plan.run.fingerprint if config.evaluate_on else None
    key = recorded.identity(run, decomposition, to_dict(config), evaluated)
    old = read_record(recorded.Made, path) if path.is_file() else None
    reasons = [] if old is None else recorded.differences(run, decomposition, old, to_dict(config), evaluated)
    if reasons and not config.overwrite:
        raise UserError(
            f"{folder} was made with other options: {'; '.join(reasons)}. Choose another --perturbation, or "
            f"--overwrite it."
        )
    if old is None or reasons:  # of other options, or nobody knows of which
        for file in (*folder.glob("components/[!.]*.json"), *folder.glob("nulls/[!.]*.json"), folder / "notes.json"):
            file.unlink(missing_ok=True)
    else:
        components |= set(old.config["group" if config.group else "component"])
    numbers = tuple(sorted(components))
    values = to_dict(replace(config, group=numbers) if config.group else replace(config, component=numbers))
    write_record(path, recorded.Made(__version__, "perturb", values, key, evaluated), sealed=True)
    return key


def _is_complete(record: ComponentRecord | None, config: PerturbConfig) -> bool:
    """Whether a record has all that is asked for."""
    if record is None:
        return False
    if record.kind == "null":
        return True
    if config.predict and record.best.predicted_ratio is None:
        return False
    if (config.curve and len(record.curve) != len(config.curve)) or (config.ranks and not record.where[0].ranks):
        return False
    return config.save == "nothing" or (
        record.saved is not None
        and Path(record.saved.path).parts[0] == config.save
        and record.saved.share in (None, config.adapter_share)
    )


About = dict[str, Any]
"""How a vector was found: fields of `ComponentRecord`."""
Vectors = Iterator[tuple[Subject, Parameters, torch.Tensor, About]]
"""Components and nulls, their vectors, what the sketch of these should be, and how they were found."""


class _Session:
    """The model at work: vectors for a few components at a time, and their evaluation."""

    def __init__(
        self, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig, folder: Path, texts: list[str]
    ) -> None:
        self.run, self.plan, self.config, self.folder = run, plan, config, folder
        self.prepared = prepare_to_edit(run, config.device)
        check_saving(config.save, self.prepared)
        self.directions = DirectionMaker(run, decomposition, plan, config, self.prepared)
        self.prompts = read_prompts(run, self.prepared)
        evaluated, prompts = self.prepared, self.prompts
        if config.evaluate_on:
            evaluated = prepare_run(plan.run, config.device, self.prepared.model)
            prompts = read_prompts(plan.run, evaluated)
        elsewhere = None if self.prepared.model.classifies else Elsewhere(self.prepared, texts)
        self.evaluator = Evaluator(plan, evaluated, prompts, elsewhere)
        self.chunk = decomposition.config.chunk

    def _print_estimate(self, subjects: list[Subject], lifting: int | None) -> None:
        """How long it will take, from the time of the random examples' forward passes."""
        each = self.evaluator.seconds_per_example
        passes = sum(self.evaluator.passes(subject, self.config) for subject in subjects)
        first = "" if lifting is None else f"lifting takes about {duration(each * lifting)}, "
        nulls = sum(subject.kind == "null" for subject in subjects)
        beside = f" and {nulls} random groups" if nulls else ""
        print(
            f"{len(subjects) - nulls} components{beside} to do: {first}measuring about {duration(each * passes)}.",
            flush=True,
        )

    def lift(self, subjects: list[Subject]) -> Vectors:
        """Exact vectors, as many at a time as memory allows."""
        lifter = Lifter(self.run, self.prepared, self.prompts)
        size = max(1, int(self.config.memory_gb * 1e9 / (4 * self.prepared.selection.size)))
        for start in range(0, len(subjects), size):
            group = subjects[start : start + size]
            made = self.directions.make(group)
            sources = {kind: self.run.source(kind) for kind in made.sums.weights}
            sums, kept, cosines = truncate(made.sums, sources, self.config.fidelity, self.chunk)
            if start == 0:
                self._print_estimate(subjects, lifter.passes(sums) * len(subjects) // len(group))
            vectors = lifter.lift(sums)
            for j, subject in enumerate(group):
                # handed over one by one, so that a vector's memory is free when its evaluation is done
                vector, vectors[j] = vectors[j], {}
                about = {"examples": kept[j], "truncation": cosines[j], "stationarity": made.stationarity[j]}
                yield subject, vector, made.targets[j], about

    def sense(self, subjects: list[Subject]) -> Vectors:
        """Vectors from the sketch alone."""
        scaled = Scaled(self.prepared.collector.sketch)
        planted = check_sketch(scaled)
        self._print_estimate(subjects, None)
        made = self.directions.make(subjects)
        for j, subject in enumerate(tqdm(subjects, desc="Sensing", unit="component", disable=None)):
            sensed = sense(scaled, made.targets[j], self.config.sensing)
            about = {"entries": sensed.entries, "residual": sensed.residual, "iterations": sensed.iterations}
            about |= {"planted_cosine": planted, "stationarity": made.stationarity[j]}
            yield subject, sensed.vector, made.targets[j], about

    def record(self, subject: Subject, vector: Parameters, target: torch.Tensor, about: About) -> ComponentRecord:
        """Everything about one component or null."""
        length = scale_to_unit(vector)
        sketched = self.prepared.collector.sketch.matvec(vector).cpu()
        fidelity = float(torch.nn.functional.cosine_similarity(sketched, target, dim=0))
        config, number = self.config, subject.number
        measured = self.evaluator.measure(subject, vector, sketched, config)
        about = about | {"tried": measured.tried, "kind": subject.kind}
        if subject.kind == "component":
            scale = measured.best.sign * measured.best.magnitude
            saved = save_change(self.folder, number, config.save, self.prepared, vector, scale, config.adapter_share)
            about |= {"where": find_places(vector, config.ranks), "saved": saved}
            about |= {"largest": largest_entries(self.prepared.selection, vector), "curve": measured.curve}
        return ComponentRecord(number, length, fidelity, measured.best, **about)
