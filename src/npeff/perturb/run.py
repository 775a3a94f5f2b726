"""`npeff perturb`: change the model along components, and see which examples notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from npeff.collect.session import Prepared, prepare_run, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHODS
from npeff.decompose.run import open_decomposition
from npeff.perturb.config import ALL, PerturbConfig
from npeff.perturb.evaluate import Evaluator, Outcome, ratio
from npeff.perturb.lift import Lifter, Parameters, scale_to_unit
from npeff.perturb.protocol import Plan, make_plan
from npeff.perturb.report import identity, write_overview, write_report
from npeff.perturb.row_weights import check_method, truncate
from npeff.perturb.save import save_adapter, save_delta, save_model
from npeff.perturb.sensing import Scaled, check_sketch, sense
from npeff.perturb.where import find_places, largest_entries
from npeff.perturb.whitening import Directions, plan_directions
from npeff.store.layout import PERTURBATIONS, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_object, remove_partials, write_json
from npeff.utils.version import __version__


def perturb(config: PerturbConfig) -> dict[str, Any]:
    """Perturb the components that `config` names; files are in RUN/perturbations/LABEL.

    Returns the summary; for all decompositions, name → summary.
    """
    run = Run.open(config.run)
    if config.decomposition != ALL:
        found = _perturb_one(run, config)
        write_overview(run.path / PERTURBATIONS)
        return found
    found = {name: _perturb_one(run, dataclasses.replace(config, decomposition=name)) for name in _perturbable(run)}
    print(f"\n{write_overview(run.path / PERTURBATIONS)}\nin {run.path / PERTURBATIONS}")
    return found


def _perturbable(run: Run) -> list[str]:
    """Decompositions of a run whose components are directions of parameters, in the order of the paper's table."""
    methods = {name: open_decomposition(run, name).config.method for name in decomposition_names(run.path)}
    names = sorted(
        (name for name in methods if methods[name] in METHODS), key=lambda name: METHODS.index(methods[name])
    )
    if not names:
        raise UserError(
            f"{run.path} has no decomposition of {', '.join(METHODS)}. `npeff compare {run.path}` makes them."
        )
    return names


def _perturb_one(run: Run, config: PerturbConfig) -> dict[str, Any]:
    decomposition = open_decomposition(run, config.decomposition)
    check_method(decomposition)
    name = config.decomposition or decomposition.config.method
    folder = run.path / PERTURBATIONS / (config.label or f"{name}-{config.direction}-{config.way}")
    plan = make_plan(run, decomposition, config.components, config.count, config.top, config.random, config.seed)
    with only_one(folder):
        key = _start(folder, run, decomposition, config)
        records = _read_records(folder, plan, key, config.predict)
        notes = read_object(folder / "notes.json") if (folder / "notes.json").is_file() else {}
        missing = [number for number in plan.components if number not in records]
        if missing:
            session = _Session(run, decomposition, plan, config)
            notes = session.directions.notes
            write_json(folder / "notes.json", notes, sealed=True)
            for record in session.perturb(missing, folder):
                write_json(_record_path(folder, record["component"]), {**record, "key": key}, sealed=True)
                tqdm.write(_in_words(record))
            records = _read_records(folder, plan, key, config.predict)
        found = write_report(folder, [records[number] for number in plan.components], notes, key)
    print(
        f"KL ratio {found['kl_ratio']:.3g} (geometric mean of {found['components']} components), "
        f"norm ratio {found['norm_ratio']:.2f}; in {folder}"
    )
    return found


def _start(folder: Path, run: Run, decomposition: Decomposition, config: PerturbConfig) -> str:
    """Write what the results are made of, or refuse results of other options; returns its digest."""
    key = identity(run, decomposition, to_dict(config))
    path = folder / "config.json"
    old = read_object(path).get("key") if path.is_file() else None
    if old not in (None, key) and not config.overwrite:
        raise UserError(f"{folder} was made with other options: choose another --label, or --overwrite it.")
    if old != key:
        for record in (folder / "components").glob("*.json"):  # of other options, or nobody knows of which
            record.unlink()
    remove_partials(folder, below=True)
    values = {"npeff": __version__, "command": "perturb", "config": to_dict(config), "key": key}
    write_json(path, values, sealed=True)
    return key


def _record_path(folder: Path, component: int) -> Path:
    return folder / "components" / f"{component:05d}.json"


def _read_records(folder: Path, plan: Plan, key: str, predict: bool) -> dict[int, dict[str, Any]]:
    """Component → its record, for those that are done; to `predict`, only those with a prediction."""
    records = {}
    for number in plan.components:
        path = _record_path(folder, number)
        if path.is_file():
            record = read_object(path)
            if record.pop("key", None) != key or record.get("component") != number:
                raise UserError(f"{path} is the record of something else. Delete it, and it is made anew.")
            if not predict or record["best"]["predicted_ratio"] is not None:
                records[number] = record
    return records


def _in_words(record: dict[str, Any]) -> str:
    best = record["best"]
    return (
        f"component {record['component']}: KL ratio {best['ratio']:.3g} (top {best['top_kl']:.3g}, random "
        f"{best['random_kl']:.3g}) at length {best['magnitude']:.3g}, fidelity {record['fidelity']:.3f}"
    )


class _Session:
    """The model at work: vectors for a few components at a time, and their evaluation."""

    def __init__(self, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig) -> None:
        self.run, self.plan, self.config = run, plan, config
        self.directions: Directions = plan_directions(
            run,
            decomposition,
            plan,
            config.direction,
            config.threshold,
            config.ridge,
            config.background_rows,
            config.carriers,
            config.seed,
        )
        self.prepared: Prepared = prepare_run(run, config.device)
        self.prompts = read_prompts(run, self.prepared)
        self.evaluator = Evaluator(run, self.prepared, self.prompts, plan)
        self.chunk = decomposition.config.chunk

    def perturb(self, components: list[int], folder: Path) -> Iterator[dict[str, Any]]:
        """Records of components, as they are finished."""
        makers = {"lift": self._lift, "sensing": self._sense}
        for number, vector, about in makers[self.config.way](components):
            with tqdm(desc=f"Measuring component {number}", unit="ex", leave=False) as self.evaluator.bar:
                record = self._record(number, vector, about, folder)
            yield record

    def _lift(self, components: list[int]) -> Iterator[tuple[int, Parameters, dict[str, Any]]]:
        lifter = Lifter(self.run, self.prepared, self.prompts)
        size = max(1, int(self.config.memory_gb * 1e9 / (4 * self.prepared.selection.size)))
        for start in range(0, len(components), size):
            group = components[start : start + size]
            sums = self.directions.sums.take([self.plan.components.index(number) for number in group])
            sources = {kind: self.run.source(kind) for kind in sums.weights}
            sums, kept, cosines = truncate(sums, sources, self.config.fidelity, self.chunk)
            with tqdm(total=len(lifter.examples(sums)), unit="ex", desc=f"Lifting {len(group)} components") as bar:
                vectors = lifter.lift(sums, bar)
            for j, number in enumerate(group):
                # handed over one by one, so that a vector's memory is free when its evaluation is done
                vector, vectors[j] = vectors[j], {}
                yield number, vector, {"examples": kept[j], "truncation": cosines[j]}

    def _sense(self, components: list[int]) -> Iterator[tuple[int, Parameters, dict[str, Any]]]:
        scaled = Scaled(self.prepared.collector.sketch)
        planted = check_sketch(scaled)
        for number in tqdm(components, desc="Sensing", unit="component"):
            target = self.directions.targets[self.plan.components.index(number)]
            found = sense(scaled, target, self.config.sensing)
            about = {"entries": found.entries, "residual": found.residual, "iterations": found.iterations}
            yield number, found.vector, about | {"planted_cosine": planted}

    def _record(self, number: int, vector: Parameters, about: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Everything about one component, as JSON values."""
        length = scale_to_unit(vector)
        sketched = self.prepared.collector.sketch.matvec(vector).cpu()
        target = self.directions.targets[self.plan.components.index(number)]
        fidelity = float(torch.nn.functional.cosine_similarity(sketched, target, dim=0))
        outcomes, best = [], None
        orders = self.plan.tops[number]
        for tops, effects in zip(orders, self.evaluator.predict(orders, vector, self.config.predict), strict=True):
            on_top, on_random = effects
            start = (self.config.target_kl / on_top) ** 0.5 if on_top > 0 else 1.0
            predicted = None if on_random is None else ratio(on_top, on_random)
            for outcome in self.evaluator.evaluate(tops, vector, self.config.magnitude, self.config.target_kl, start):
                values = dataclasses.asdict(outcome) | {"predicted_ratio": predicted}
                values["top"] = tops.top.tolist()
                outcomes.append(values)
                if best is None or outcome.ratio > best[1].ratio:
                    best = (tops, outcome, values)
        assert best is not None
        record = {
            "component": number,
            "length": length,
            "fidelity": fidelity,
            **about,
            "best": best[2],
            "outcomes": outcomes,
            "curve": self.evaluator.curve(best[0], vector, best[1], sorted(self.config.curve)),
            "where": [dataclasses.asdict(place) for place in find_places(vector)],
            "largest": largest_entries(self.prepared.selection, vector),
        }
        return record | {"saved": self._save(number, vector, best[1], folder)}

    def _save(self, number: int, vector: Parameters, outcome: Outcome, folder: Path) -> dict[str, Any] | None:
        """Write the change of the best outcome where that is asked for."""
        config, scale = self.config, outcome.sign * outcome.magnitude
        path = folder / config.save / f"{number:05d}"
        if config.save == "nothing":
            return None
        about: dict[str, Any] = {}
        if config.save == "delta":
            path = path.with_suffix(".safetensors")
            save_delta(path, self.prepared.selection, vector, scale)
        elif config.save == "adapter":
            model = self.prepared.config.model.model
            about = save_adapter(
                path, self.prepared.selection, vector, scale, config.adapter_share, config.adapter_rank, model
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(path, self.prepared, vector, scale)
        return {"path": str(path.relative_to(folder)), **about}
