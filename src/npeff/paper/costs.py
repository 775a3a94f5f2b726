"""Steps of recipes that measure time and memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from npeff.collect.estimate import estimate, peak_memory
from npeff.collect.session import load_prompts, prepare
from npeff.decompose.config import METHOD_TITLES, DecomposeConfig
from npeff.decompose.run import fit
from npeff.decompose.sae import steps_per_entry
from npeff.paper.recipe import Step
from npeff.paper.runs import Bench, Workshop
from npeff.paper.values import Findings, Value
from npeff.store.layout import DECOMPOSITIONS
from npeff.store.run import Run
from npeff.utils.configs import replace, to_dict
from npeff.utils.device import choose_device
from npeff.utils.files import read_json, write_json

GIB = 2**30
TIMED = "timed-"
"""Before the name of a decomposition that was made to measure its cost."""


def early_stopping(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Steps of both stages, summed loss, time and tunings of the paper's solver with early stopping."""
    config = shop.fit_config(bench)
    found = _timed(shop, bench, config)
    rates = shop.analysis(bench, name=f"{TIMED}{config.decomposition}").tunings
    yield Value({"measure": "H-only Steps"}, found["frozen_steps"])
    yield Value({"measure": "Joint Steps"}, found["joint_steps"])
    yield Value({"measure": "Loss"}, found["loss"] * found["examples"])
    yield Value({"measure": "Time (s)"}, found["solver_seconds"])
    for measure, rate in (("Pred", rates["prediction"]), ("LnP", rates["lnp"])):
        yield Value({"measure": measure}, None if rate is None or rate.share is None else 100 * rate.share)


def decomposition_cost(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Time of a step, time and peak memory of the whole, each method in a process of its own."""
    for method in step.methods:
        found = _timed(shop, bench, shop.fit_config(bench, method))
        one_step = None if method.startswith("svd") else found["step_ms"]
        measured = {
            "Step (ms)": one_step,
            "H-only step (ms)": found["frozen_step_ms"],
            "Total (s)": found["seconds"],
            "Peak (GiB)": found["peak"] / GIB,
        }
        for measure in step.options["measures"]:
            if measured[measure] is not None:
                yield Value({"method": METHOD_TITLES[method], "measure": measure}, measured[measure])


def collection_time(shop: Workshop, bench: Bench, step: Step) -> Findings:
    """Seconds for one example's Fisher, gradient and activation, each collected alone."""
    whole = shop.collect_config(bench.here)
    for title, wanted in (("PEF", "fisher"), ("Gradient", "gradient"), ("Activation", "activation")):
        config = replace(
            whole, fisher=wanted == "fisher", gradient=wanted == "gradient", activation=wanted == "activation"
        )
        path = _record(shop, bench, ["collection", wanted])
        if not path.is_file():
            prepared = prepare(config)
            _, prompts = load_prompts(prepared)
            write_json(path, {"seconds": estimate(prepared, prompts).seconds_per_example})
        yield Value({"method": title}, read_json(path)["seconds"])


def _timed(shop: Workshop, bench: Bench, config: DecomposeConfig) -> dict[str, Any]:
    """What a decomposition took; measured once, in a process that does nothing else."""
    config = replace(config, decomposition=f"{TIMED}{config.decomposition}")
    path = _record(shop, bench, to_dict(config))
    if not path.is_file():
        # a fresh process: its peak memory is that of this fit, not of what ran before
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            write_json(path, pool.submit(_measure, config, torch.get_num_threads()).result())
    found: dict[str, Any] = read_json(path)
    return found


def _measure(config: DecomposeConfig, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    device = choose_device(config.device, double=True)
    before = _memory(device, "VmRSS")
    run = Run.open(config.run)
    assert config.components is not None
    options = config.with_components(config.components)
    begin = time.perf_counter()
    decomposition = fit(run, options, config.holdout)  # without checkpoints: a fit that was continued has no time
    seconds = time.perf_counter() - begin
    peak = max(0, _memory(device, "VmHWM") - before)
    decomposition.save(run.path / DECOMPOSITIONS / str(config.decomposition))
    steps = decomposition.history.steps
    frozen = [step for step in steps if step.stage == "frozen"]
    rest = [step for step in steps if step.stage != "frozen"]
    taken = 1
    if config.method == "sae":
        rest, taken = rest[:-1], steps_per_entry(options.sae)  # the last entry is the final loss
    return {
        "seconds": seconds,
        "solver_seconds": steps[-1].seconds if steps else 0.0,
        "steps": len(steps),
        "frozen_steps": len(frozen),
        "joint_steps": max(0, sum(step.stage == "joint" for step in steps) - 1),  # the last is the final loss
        "step_ms": _mean_ms([step.seconds for step in rest], taken),
        "frozen_step_ms": _mean_ms([step.seconds for step in frozen]),
        "loss": decomposition.history.loss,
        "examples": int((decomposition.residuals > 0).sum()),
        "peak": peak,
    }


def _memory(device: torch.device, name: str) -> int:
    """Bytes in use: now (VmRSS) or at the peak (VmHWM); on a GPU, what was allocated at the peak.

    From /proc where there is one: what getrusage calls the peak of a process has that of its parent in it.
    """
    status = Path("/proc/self/status")
    if device.type == "cuda" or not status.is_file():
        return peak_memory(device)
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def _mean_ms(times: list[float], taken: int = 1) -> float | None:
    """Mean time of a step, of which `taken` were taken from one time to the next."""
    return 1000 * (times[-1] - times[0]) / (len(times) - 1) / taken if len(times) > 1 else None


def _record(shop: Workshop, bench: Bench, about: Any) -> Path:
    """Where a measured cost is kept; the key has all that it depends on but the machine."""
    key = hashlib.sha256(json.dumps([bench.run.fingerprint, about], sort_keys=True).encode()).hexdigest()[:16]
    return shop.out / "costs" / f"{key}.json"
