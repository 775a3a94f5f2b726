"""What perturbations reach with SmolLM2-135M on short reviews, measured on held-out examples.

Short SST2 phrases (of `NPEFF_BENCH_DATA`; else embedded reviews) of which no two share four words in a row, so that a
held-out phrase is no part of a fitted one. Half of them are held out; a third of these chooses ridge, sign and length,
the rest is measured. Everything is kept in bench/cache/perturb, so that a stopped benchmark continues; remove the
folder to measure again. NPEFF_BENCH_SCALE=4 takes four times the examples and components.
"""

from __future__ import annotations

import json
import os
import random
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
from npeff.decompose.config import DecomposeConfig, Method
from npeff.decompose.run import decompose, open_decomposition
from npeff.models.select import CapturedModule
from npeff.perturb.config import Direction, PerturbConfig
from npeff.perturb.evaluate import Divergence, Evaluator
from npeff.perturb.lift import Lifter, RowSums, scale_to_unit
from npeff.perturb.protocol import make_plan
from npeff.perturb.records import ComponentRecord, Results
from npeff.perturb.run import perturb
from npeff.perturb.sensing import THOROUGH, Scaled, planted_cosine
from npeff.perturb.statistics import compare_ratios
from npeff.perturb.whitening import DirectionMaker
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.task import load_task
from npeff.utils.files import read_json, whole_file, write_json

CACHE = Path(__file__).parent / "cache" / "perturb"
SCALE = int(os.environ.get("NPEFF_BENCH_SCALE", "1"))
EXAMPLES, COMPONENTS, PERTURBED = 6000 * SCALE, 128 * SCALE, 32 * SCALE
NULLS = 16
HOLDOUT = 0.5
WORDS = range(4, 11)
SHARED = 4
"""No two phrases have so many words in a row in common."""
CARRIERS = 0.15
"""Share of the examples that carry a direction, for all methods and directions: with fewer, a rejected one is not close
to the whole sum."""
SMALL = 0.05
"""Multiple of the magnitude at which second order should hold: a KL of 1/400 of the evaluation's."""
PLANTED, PLANTED_MODULES, WIDTH = 200, 6, 768
TOGETHER = 8
FEW = 4
BATCH = 32


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    folder = CACHE / ("reviews" if data is None else "sst2") / f"scale-{SCALE}"
    run = prepare(folder, data)
    whitened = measure(run, "npeff", "whiten", nulls=NULLS)
    yield from heldout(whitened)
    rejected = measure(run, "npeff", "reject")
    yield from compared("perturb.heldout_over_reject", whitened, rejected, paired=True, bar=2.5)
    for method, name in (("clusters", "clusters"), ("svd-gradients", "svd")):
        yield from compared(f"perturb.heldout_over_{name}", whitened, measure(run, method, "whiten"), paired=False)
    fidelity = min(record.fidelity for results in (whitened, rejected) for record in results.components)
    yield entry("perturb.lift_fidelity", fidelity, ">= 0.95")
    few = measure(run, "npeff", "whiten", count=FEW, curve=(SMALL,), predict=True, perturbation="predicted")
    error = statistics.median(prediction_error(record) for record in few.components)
    yield entry("perturb.prediction_error", error, "<= 0.1")
    yield entry("perturb.lift_cost", cached(folder / "cost.json", lambda: lift_cost(run)), "<= 0.5")
    yield entry("perturb.measure_cost", cached(folder / "measure.json", lambda: measure_cost(run)), "<= 4")
    yield entry("perturb.sensing_cosine", cached(folder / "sensing.json", sensing_cosine), ">= 0.95")


def heldout(results: Results) -> Iterator[dict[str, Any]]:
    """The default direction on held-out examples, and random groups in place of components by the same code."""
    summary, null = results.summary, results.summary.null
    assert null is not None
    assert null.interval is not None
    assert summary.interval is not None
    assert summary.elsewhere is not None
    yield entry("perturb.heldout_ratio", summary.kl_ratio, ">= 15")
    yield entry("perturb.heldout_ratio_low", summary.interval[0], "reported")
    yield entry("perturb.heldout_ratio_high", summary.interval[1], "reported")
    yield entry("perturb.heldout_above_chance", (summary.above_null or 0) / summary.components, "reported")
    yield entry("perturb.heldout_null", null.interval[1], "<= 2")
    yield entry("perturb.heldout_null_low", null.interval[0], "<= 1")
    yield entry("perturb.elsewhere", summary.elsewhere, "<= 0.02")


def compared(
    name: str, ours: Results, others: Results, paired: bool, bar: float | None = None
) -> Iterator[dict[str, Any]]:
    """The factor between the held-out ratios of two perturbations, and its interval."""
    ratios = [[record.best.ratio for record in each.components] for each in (ours, others)]
    found = compare_ratios(ratios[0], ratios[1], paired)
    yield entry(name, found.factor, "reported" if bar is None else f">= {bar}")
    yield entry(f"{name}_low", found.interval[0], "reported" if bar is None else ">= 1")
    yield entry(f"{name}_high", found.interval[1], "reported")


def cached(path: Path, measure_it: Callable[[], float]) -> float:
    if not path.is_file():
        write_json(path, measure_it())
    return float(read_json(path))


def prepare(folder: Path, data: Path | None) -> Run:
    """The run with its decompositions."""
    texts = folder / "short.jsonl"
    if not texts.is_file():
        lines = short_texts(data, EXAMPLES)
        with whole_file(texts) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = collect(
        CollectConfig(
            run=str(folder / "run"),
            data=DataConfig(task="sst2", data=str(texts)),
            sketch=SketchConfig(copies=4),
        )
    )
    methods: tuple[Method, ...] = ("npeff", "clusters", "svd-gradients")
    for method in methods:
        options = DecomposeConfig(
            run=str(run.path), decomposition=method, method=method, components=COMPONENTS, holdout=HOLDOUT
        )
        decompose(options)
    return run


def short_texts(data: Path | None, count: int) -> list[dict[str, str]]:
    """At most so many short texts with labels, of which no two share `SHARED` words in a row; always in one order."""
    lines: list[dict[str, str]] = []
    seen: set[tuple[str, ...]] = set()
    every = list(labelled_texts(data))
    random.Random(0).shuffle(every)
    for line in every:
        words = line["text"].split()
        runs = {tuple(words[at : at + SHARED]) for at in range(len(words) - SHARED + 1)}
        if len(words) in WORDS and not runs & seen and len(lines) < count:
            seen |= runs
            lines.append(line)
    return lines


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


def measure(
    run: Run, decomposition: str, direction: Direction, count: int = PERTURBED, nulls: int = 0, **options: Any
) -> Results:
    """Results of a perturbation of the drawn components at equal KL of top examples."""
    results = perturb(
        PerturbConfig(
            run=str(run.path),
            decomposition=decomposition,
            count=count,
            direction=direction,
            carriers=CARRIERS,
            nulls=nulls,
            **options,
        )
    )
    return results[decomposition]


def prediction_error(record: ComponentRecord) -> float:
    """Relative difference between the ratio that second order predicts and the one at a small magnitude."""
    (point,) = record.curve
    assert record.best.predicted_ratio is not None
    return abs(record.best.predicted_ratio / point.ratio - 1)


def measure_cost(run: Run, repeats: int = 3) -> float:
    """Measuring a component ÷ one forward pass over the examples that it is measured on."""
    config = PerturbConfig(str(run.path), count=1, carriers=CARRIERS)
    decomposition = open_decomposition(run, "npeff")
    plan = make_plan(run, decomposition, config)
    prepared = prepare_run(run, "cpu")
    prompts = read_prompts(run, prepared)
    subject = plan.component(plan.components[0])
    maker = DirectionMaker(run, decomposition, plan, config, prepared)
    (vector,) = Lifter(run, prepared, prompts).lift(maker.make([subject]).sums)
    scale_to_unit(vector)
    sketched = prepared.collector.sketch.matvec(vector)
    evaluator = Evaluator(plan, prepared, prompts)
    ranked = subject.test[0]
    measured = [*ranked.top.tolist(), *ranked.related.tolist(), *plan.test.random.tolist()]

    def forward() -> None:
        Divergence(prepared, prompts, measured)

    forward()
    return statistics.median(
        seconds(lambda: evaluator.measure(subject, vector, sketched, config)) / seconds(forward) for _ in range(repeats)
    )


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
