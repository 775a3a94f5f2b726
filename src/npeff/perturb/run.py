"""`npeff perturb`: change the model along components, and see which examples notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from npeff import __version__
from npeff.analyse.run import finished_decompositions
from npeff.collect.run import Prepared, prepare_run
from npeff.decompose import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.perturb.evaluate import Evaluator, Outcome, ratio
from npeff.perturb.identity import identity
from npeff.perturb.lift import Lifter, Parameters, read_prompts, scale_to_unit
from npeff.perturb.overview import write_overview
from npeff.perturb.protocol import Direction, Directions, Plan, make_plan, plan_directions
from npeff.perturb.report import write_report
from npeff.perturb.row_weights import METHODS, check_method, truncate
from npeff.perturb.save import save_adapter, save_delta, save_model
from npeff.perturb.sensing import Scaled, SensingConfig, check_sketch, sense
from npeff.perturb.where import find_places, largest_entries
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, remove_partials, write_json
from npeff.utils.locks import only_one

DIRECTORY = "perturbations"
ALL = "all"


@dataclass(frozen=True)
class PerturbConfig:
    """Change the model's parameters along components and measure whose predictions change. Resumes by component."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    decomposition: str | None = None
    """Name of the decomposition, not needed if there is only one; `all`: one after another, in one table."""
    components: tuple[int, ...] = ()
    """Components to perturb; without any, --count of them are drawn at random."""
    count: int = 8
    """Components to draw; only those with at least --top examples."""
    way: Literal["lift", "sensing"] = "lift"
    """lift: the exact vector, by a weighted backward pass over the run's examples. sensing: the paper's, from the
    sketch alone."""
    direction: Direction = "whiten"
    """whiten: least effect on other examples. reject: the paper's, orthogonal to other components. plain: neither."""
    threshold: float = 0.5
    """reject: components with a cosine of at least this size are not rejected from."""
    ridge: float | None = None
    """whiten: what is added to the mean Fisher; chosen on held-out examples if not given."""
    background_rows: int = 4096
    """whiten: most Fisher rows of the background; random examples are never in it, nor a component's top examples."""
    carriers: float = 0.3
    """whiten: share of the examples that carry the direction, which is solved anew for them; fewer lift faster."""
    fidelity: float = 0.999
    """lift: use as few examples as give this cosine with the whole sum; 1 uses all. What whitening has cancelled comes
    back with the examples left out, so it needs a high one."""
    top: int = 16
    """Top examples of a component."""
    random: int = 128
    """Random examples to compare with."""
    magnitude: float | None = None
    """Length of the change (20 in the paper); without it, the length that gives top examples --target-kl."""
    target_kl: float = 0.1
    """Mean KL divergence of top examples to reach, so that methods are compared at equal effect."""
    predict: bool = True
    """Also say the ratio that derivatives predict; without it, measuring takes little more than half as long."""
    curve: tuple[float, ...] = ()
    """Also measure the ratio at these multiples of the magnitude, as 0.1 0.3 1 3, for a figure."""
    save: Literal["nothing", "delta", "adapter", "model"] = "nothing"
    """Write the change of the best sign: alone, as a low-rank adapter (PEFT's layout), or in a copy of the model."""
    adapter_share: float = 0.9
    """adapter: share of each matrix's squared length to keep."""
    adapter_rank: int = 64
    """adapter: largest rank it may take."""
    memory_gb: float = 4.0
    """For the vectors that are lifted together: one takes 4 bytes a parameter."""
    seed: int = 0
    """Seed of the components and examples that are drawn."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""
    label: str | None = None
    """Name of the results; made from decomposition, direction and way if not given."""
    overwrite: bool = False
    """Replace results of the same name that were made with other options."""
    sensing: SensingConfig = field(default_factory=SensingConfig)

    def __post_init__(self) -> None:
        if min(self.count, self.top, self.random, self.background_rows, self.adapter_rank) < 1:
            raise UserError("--count, --top, --random, --background-rows and --adapter-rank must be at least 1.")
        for name in ("target_kl", "memory_gb", "magnitude", "ridge"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} should be above 0, not {value}.")
        if any(not factor > 0 for factor in self.curve):
            raise UserError("--curve takes multiples above 0.")
        for name in ("fidelity", "threshold", "carriers", "adapter_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"--{name.replace('_', '-')} should be above 0 and at most 1.")
        if self.label is not None and (not self.label or Path(self.label).name != self.label or self.label[0] == "."):
            raise UserError(f"{self.label!r} cannot be the name of a directory.")
        if self.decomposition == ALL and (self.label is not None or self.components):
            raise UserError(f"--decomposition {ALL} goes without --label and --components, which are for a single one.")


def perturb(config: PerturbConfig) -> dict[str, Any]:
    """Perturb the components that `config` names; files are in RUN/perturbations/LABEL.

    Returns the summary; for all decompositions, name → summary.
    """
    run = Run.open(config.run)
    if config.decomposition != ALL:
        found = _perturb_one(run, config)
        write_overview(run.path / DIRECTORY)
        return found
    found = {name: _perturb_one(run, dataclasses.replace(config, decomposition=name)) for name in _perturbable(run)}
    print(f"\n{write_overview(run.path / DIRECTORY)}\nin {run.path / DIRECTORY}")
    return found


def _perturbable(run: Run) -> list[str]:
    """Decompositions of a run whose components are directions of parameters, in the order of the paper's table."""
    methods = {name: open_decomposition(run, name).config.method for name in finished_decompositions(run)}
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
    folder = run.path / DIRECTORY / (config.label or f"{name}-{config.direction}-{config.way}")
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
