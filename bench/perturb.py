"""What perturbations reach with SmolLM2-135M on short reviews: 1,000 examples, 64 components, 8 of them perturbed.

Everything is kept in bench/cache/perturb, so that a stopped benchmark continues; remove the folder to measure anew.
NPEFF_BENCH_SCALE=4 takes four times the examples and components.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import entry
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import Prepared, prepare_run, read_prompts
from npeff.collect.sketch.make import make_sketch
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.select import CapturedModule
from npeff.perturb.config import PerturbConfig
from npeff.perturb.lift import Lifter, RowSums
from npeff.perturb.report import ComponentRecord, Results
from npeff.perturb.run import perturb
from npeff.perturb.sensing import THOROUGH, Scaled, planted_cosine
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.task import load_task
from npeff.utils.files import read_json, whole_file, write_json

CACHE = Path(__file__).parent / "cache" / "perturb"
SCALE = int(os.environ.get("NPEFF_BENCH_SCALE", "1"))
EXAMPLES, COMPONENTS, PERTURBED = 1000 * SCALE, 64 * SCALE, 8 * SCALE
WORDS = range(4, 11)
FIDELITY = 0.999
SMALL = 0.05
"""Multiple of the magnitude at which second order should hold: a KL of 1/400 of the evaluation's."""
PLANTED, PLANTED_MODULES, WIDTH = 200, 6, 768
TOGETHER = 8
BATCH = 32


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    folder = CACHE / ("reviews" if data is None else "sst2") / f"scale-{SCALE}"
    yield entry("perturb.sensing_cosine", cached(folder / "sensing.json", sensing_cosine), ">= 0.95")
    run = prepare(folder, data)
    yield entry("perturb.lift_cost", cached(folder / "cost.json", lambda: lift_cost(run)), "<= 0.5")
    whitened = measure(run, "npeff", "whiten", "lift")
    predictions = [prediction_error(record) for record in whitened.components]
    yield entry("perturb.prediction_error", statistics.median(predictions), "<= 0.1")
    yield entry("perturb.kl_ratio", ratio(whitened), ">= 16.5")
    rejected = measure(run, "npeff", "reject", "lift")
    fidelity = min(record.fidelity for results in (whitened, rejected) for record in results.components)
    yield entry("perturb.lift_fidelity", fidelity, ">= 0.95")
    yield entry("perturb.whiten_over_reject", ratio(whitened) / ratio(rejected), ">= 2")
    paper = measure(run, "npeff", "reject", "sensing")
    yield entry("perturb.whiten_over_paper", ratio(whitened) / ratio(paper), ">= 2")
    clusters = measure(run, "clusters", "reject", "lift")
    yield entry("perturb.npeff_over_clusters", ratio(rejected) / ratio(clusters), "> 1")


def cached(path: Path, measure_it: Callable[[], float]) -> float:
    if not path.is_file():
        write_json(path, measure_it())
    return float(read_json(path))


def prepare(folder: Path, data: Path | None) -> Run:
    """The run with its two decompositions; four copies of the sketch, so that compressed sensing has a fair chance."""
    texts = folder / "short.jsonl"
    if not texts.is_file():
        lines = [line for line in labelled_texts(data) if len(line["text"].split()) in WORDS][:EXAMPLES]
        with whole_file(texts) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = collect(
        CollectConfig(
            run=str(folder / "run"),
            data=DataConfig(task="sst2", data=str(texts)),
            sketch=SketchConfig(copies=4),
            activation=False,
            shard_examples=64,
        )
    )
    for method in ("npeff", "clusters"):
        decompose(DecomposeConfig(run=str(run.path), decomposition=method, method=method, components=COMPONENTS))
    return run


def labelled_texts(data: Path | None) -> Iterator[dict[str, str]]:
    if data is None:
        task = load_task("reviews")
        for row in load_dataset(task, DataConfig(task="reviews", shuffle_seed=0)).table.to_pylist():
            yield {"text": row["text"], "label": task.labels[row["label"]]}
        return
    with (data / "sst2.jsonl").open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            yield {"text": record["text"], "label": record["label"]}


def measure(run: Run, decomposition: str, direction: str, way: str) -> Results:
    """Results of a perturbation of the drawn components at equal KL of top examples."""
    results = perturb(
        PerturbConfig(
            run=str(run.path),
            decomposition=decomposition,
            count=PERTURBED,
            direction=direction,  # type: ignore[arg-type]
            way=way,  # type: ignore[arg-type]
            fidelity=FIDELITY,
            curve=(SMALL,) if direction == "whiten" else (),
            perturbation=f"{decomposition}-{direction}-{way}",
        )
    )
    return results[decomposition]


def ratio(results: Results) -> float:
    return results.summary.kl_ratio


def prediction_error(record: ComponentRecord) -> float:
    """Relative difference between the ratio that second order predicts and the one at a small magnitude."""
    (point,) = record.curve
    assert record.best.predicted_ratio is not None
    return abs(record.best.predicted_ratio / point.ratio - 1)


def sensing_cosine() -> float:
    """A planted sparse vector in 3.5 million parameters from 16384 numbers of the paper's sketch."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PLANTED_MODULES)]
    modules = [CapturedModule(f"layer.{i}", layer, True, False) for i, layer in enumerate(layers)]
    scaled = Scaled(make_sketch(SketchConfig(sketch="sparse", dim=16384), modules))
    return planted_cosine(scaled, PLANTED, THOROUGH)


def lift_cost(run: Run, repeats: int = 3) -> float:
    """Eight vectors lifted together ÷ eight forward and backward passes with weight gradients; same examples."""
    prepared = prepare_run(run, "cpu")
    prompts = read_prompts(run, prepared)
    lifter = Lifter(run, prepared, prompts)
    weights = torch.zeros(TOGETHER, int(run.source("fisher").ranks.sum()))
    weights[:, :BATCH] = torch.randn(TOGETHER, BATCH, generator=torch.Generator().manual_seed(0))
    sums = RowSums(torch.zeros(TOGETHER, run.source("fisher").dim), {"fisher": weights})
    examples = lifter.examples(sums)

    def steps() -> None:
        for _ in range(TOGETHER):
            training_step(prepared, [prompts[i] for i in examples])

    training_step(prepared, [prompts[i] for i in examples])
    return statistics.median(seconds(lambda: lifter.lift(sums)) / seconds(steps) for _ in range(repeats))


def training_step(prepared: Prepared, prompts: list[list[int]]) -> None:
    parameters: list[Any] = [module.module.weight for module in prepared.selection.modules]
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        z, _ = prepared.collector.answer_model.logits(prompts)
        torch.autograd.grad(z, parameters, torch.tensor([[0.5, -0.5]]).expand(len(prompts), 2))
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
