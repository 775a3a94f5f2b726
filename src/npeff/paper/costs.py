"""Time and memory of collections and decompositions, as recipes measure them."""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from npeff.collect.estimate import estimate, peak_memory
from npeff.collect.session import prepare_with_prompts
from npeff.decompose.baselines import steps_per_entry
from npeff.decompose.config import METHOD_TITLES, DecomposeConfig
from npeff.decompose.run import fit
from npeff.paper.recipe import Step, Value, values
from npeff.paper.runs import MADE_FOR, Experiment
from npeff.store.layout import DECOMPOSITIONS
from npeff.store.run import Run
from npeff.utils import Record, read_record, replace, to_dict, write_record
from npeff.utils.device import choose_device

GIB = 2**30
TIMED = "timed-"
"""Before the name of a decomposition that was made to measure its cost."""


class CollectionCost(Record):
    """What collecting takes: OUT/costs/KEY.json."""

    seconds: float
    """Seconds for one example."""


class Cost(Record):
    """What a decomposition took: OUT/costs/KEY.json."""

    seconds: float
    """Seconds in all."""
    solver_seconds: float
    """Seconds of the solver alone."""
    steps: int
    """Steps in the solver's history."""
    frozen_steps: int
    """Steps with frozen coefficients (solver `paper`)."""
    joint_steps: int
    """Steps of coefficients and components (solver `paper`)."""
    step_ms: float | None
    """Mean milliseconds of a step after those with frozen coefficients; None if there are too few."""
    frozen_step_ms: float | None
    """Mean milliseconds of a step with frozen coefficients; None if there are too few."""
    loss: float
    """Final loss per example."""
    examples: int
    """Examples with a residual above zero."""
    peak: int
    """Bytes at the peak, beyond those in use before the run was opened."""


def early_stopping(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Cost and quality of the paper's solver with early stopping.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Steps of both stages, summed loss, seconds, and percentages of tuned components.
    """
    config = experiment.fit_config()
    cost = _timed(experiment, config)
    yield from values({"H-only Steps": cost.frozen_steps, "Joint Steps": cost.joint_steps})
    yield from values({"Loss": cost.loss * cost.examples, "Time (s)": cost.solver_seconds})
    yield from values(experiment.tuned_percentages(f"{TIMED}{config.decomposition}"))


def decomposition_cost(experiment: Experiment, step: Step, measures: Sequence[str]) -> Iterator[Value]:
    """Time of a step, time and peak memory of whole decompositions.

    Args:
        experiment: What to measure.
        step: The step of the recipe, with methods.
        measures: What to measure.

    Yields:
        Each of the measures that a method has.
    """
    for method in step.methods:
        cost = _timed(experiment, experiment.fit_config(method))
        measured = {
            "Step (ms)": None if method.startswith("svd") else cost.step_ms,
            "H-only step (ms)": cost.frozen_step_ms,
            "Total (s)": cost.seconds,
            "Peak (GiB)": cost.peak / GIB,
        }
        known = {name: measured[name] for name in measures if measured[name] is not None}
        yield from values(known, method=METHOD_TITLES[method])


def collection_time(experiment: Experiment, step: Step) -> Iterator[Value]:
    """Time to collect one example, estimated from a few batches.

    Args:
        experiment: What to measure.
        step: The step of the recipe.

    Yields:
        Seconds for the per-example Fisher (PEF), the gradient and the activation, each collected alone.
    """
    whole = experiment.runs.collect_config(experiment.here)
    kinds = {"PEF": "fisher", "Gradient": "gradient", "Activation": "activation"}
    for title, wanted in kinds.items():
        path = experiment.kept("costs", ["collection", wanted]).with_suffix(".json")
        if not path.is_file():
            alone = replace(whole, **{kind: kind == wanted for kind in kinds.values()})  # type: ignore[arg-type]
            prepared, _, prompts = prepare_with_prompts(alone)
            write_record(path, CollectionCost(estimate(prepared, prompts).seconds_per_example))
        yield Value({"method": title}, read_record(CollectionCost, path).seconds)


def _timed(experiment: Experiment, config: DecomposeConfig) -> Cost:
    """What a decomposition took; measured once, in a process that does nothing else."""
    config = replace(config, decomposition=f"{TIMED}{config.decomposition}")
    options = to_dict(config)
    options["name"] = options.pop("decomposition")  # as in version 0.1.0, so that costs are not measured again
    path = experiment.kept("costs", options).with_suffix(".json")
    if not path.is_file():
        # a fresh process: its peak memory is that of this fit, not of what ran before
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            write_record(path, pool.submit(_measure, config, torch.get_num_threads()).result())
    return read_record(Cost, path)


def _measure(config: DecomposeConfig, threads: int) -> Cost:
    torch.set_num_threads(threads)
    device = choose_device(config.device, double=True)
    before = _memory(device, "VmRSS")
    run = Run.open(config.run)
    assert config.components is not None
    options = config.with_components(config.components)
    begin = time.perf_counter()
    decomposition = fit(run, options, config.holdout or 0.0)  # no checkpoints: a fit that was continued has no time
    seconds = time.perf_counter() - begin
    peak = max(0, _memory(device, "VmHWM") - before)
    decomposition.notes.made_for = MADE_FOR
    decomposition.save(run.path / DECOMPOSITIONS / str(config.decomposition))
    steps = decomposition.history.steps
    frozen = [step.seconds for step in steps if step.stage == "frozen"]
    rest, taken = [step.seconds for step in steps if step.stage != "frozen"], 1
    if config.method == "sae":
        rest, taken = rest[:-1], steps_per_entry(options.sae)  # the last entry is the final loss
    return Cost(
        seconds=seconds,
        solver_seconds=steps[-1].seconds if steps else 0.0,
        steps=len(steps),
        frozen_steps=len(frozen),
        joint_steps=max(0, sum(step.stage == "joint" for step in steps) - 1),  # the last is the final loss
        step_ms=_mean_ms(rest, taken),
        frozen_step_ms=_mean_ms(frozen),
        loss=decomposition.history.loss,
        examples=int((decomposition.residuals > 0).sum()),
        peak=peak,
    )


def _memory(device: torch.device, name: str) -> int:
    """Bytes in use: now (VmRSS) or at the peak (VmHWM); on a GPU, what was allocated at the peak.

    From /proc where there is one: what getrusage calls the peak of a process has that of its parent in it.
    """
    status = Path("/proc/self/status")
    if device.type == "cuda" or not status.is_file():
        return peak_memory(device)
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _mean_ms(times: Sequence[float], taken: int = 1) -> float | None:
    """Mean time of a step, of which `taken` were taken from one time to the next."""
    return 1000 * (times[-1] - times[0]) / (len(times) - 1) / taken if len(times) > 1 else None
