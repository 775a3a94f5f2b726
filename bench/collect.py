"""Cost and accuracy of collection with SmolLM2-135M: prompts of about 20 tokens, p = 16384, 2 threads."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import entry
from npeff.collect.batch import Collector
from npeff.collect.capture import Capture
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.directions import projection, spectral
from npeff.collect.sketch.base import Captured, Sketch
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.config import ModelConfig
from npeff.models.load import LoadedModel, load_model
from npeff.models.prompts import encode
from npeff.models.select import Selection, select_parameters
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.task import load_task

TOKENS = 20
BATCH = 32
REPEATS = 5
SEEDS = 3


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    model = load_model(ModelConfig(device="cpu"))
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(), selection.modules)
    prompts = prompts_of("sst2", data, model)
    batch = [prompt for prompt in prompts if len(prompt) == TOKENS][:BATCH]
    yield entry("collect.cost_ratio", cost_ratio(model, selection, sketch, batch), "<= 0.9")
    yield entry("collect.row_ratio", row_ratio(model, selection, sketch, batch), "<= 0.75")
    yield entry("collect.sketch_error", sketch_error(model, selection, batch), "<= 1.4")
    trivia = prompts_of("triviaqa", data, model)[:4]
    yield entry("collect.directions_ratio", directions_ratio(model, selection, sketch, trivia), "< 1")
    yield entry("collect.suffix_ratio", suffix_ratio(model, prompts_of("clinc150", data, model)[:4]), "<= 0.3")


def prompts_of(task_name: str, data: Path | None, model: LoadedModel) -> list[list[int]]:
    """Tokenised prompts of a task; its texts are the embedded reviews where no data are at hand."""
    task = load_task(task_name)
    if data is None:
        texts = load_dataset(load_task("reviews"), DataConfig("reviews", limit=2000)).table["text"].to_pylist()
    else:
        with (data / f"{task_name}.jsonl").open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for _, line in zip(range(4000), file, strict=False)]
    return [encode(model.tokenizer, task.render(text)) for text in texts]


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def sentiment(model: LoadedModel) -> AnswerModel:
    return AnswerModel(model, resolve_answers(load_task("sst2"), model.tokenizer))


def cost_ratio(model: LoadedModel, selection: Selection, sketch: Sketch, batch: list[list[int]]) -> float:
    """One row per example, with all that a collection does for it ÷ the same loss's forward and weight gradients."""
    answer_model = sentiment(model)
    config = CollectConfig("", directions=DirectionsConfig("exact"))
    collector = Collector(config, model, answer_model.answers, selection, sketch)
    weights = [module.module.weight for module in selection.modules]

    def training_step() -> None:
        for weight in weights:
            weight.requires_grad_(True)
        z, _ = answer_model.logits(batch)
        torch.autograd.grad(z, weights, torch.tensor([[0.5, -0.5]]).expand(len(batch), 2))  # type: ignore[arg-type]
        for weight in weights:
            weight.requires_grad_(False)

    def collection() -> None:
        collector.collect(batch, list(range(len(batch))))

    training_step()
    collection()
    return statistics.median(seconds(collection) / seconds(training_step) for _ in range(REPEATS))


def rows_of(
    model: LoadedModel,
    selection: Selection,
    sketch: Sketch,
    answer_model: AnswerModel,
    batch: list[list[int]],
    directions: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    with Capture(selection.modules, sketch.fold_input) as capture:
        capture.start(len(batch), *answer_model.sequences(batch))
        z, _ = answer_model.logits(batch)
        return capture.rows(z, directions(z.detach().double().softmax(1)), sketch)


def row_ratio(model: LoadedModel, selection: Selection, sketch: Sketch, batch: list[list[int]]) -> float:
    """Cost of each of four further rows ÷ the first."""
    answer_model = sentiment(model)

    def rows(count: int) -> float:
        V = torch.tensor([0.5, -0.5]).expand(len(batch), count, 2)
        return seconds(lambda: rows_of(model, selection, sketch, answer_model, batch, lambda p: V))

    return statistics.median((rows(5) - first) / 4 / first for first in (rows(1) for _ in range(3)))


def sketch_error(model: LoadedModel, selection: Selection, batch: list[list[int]]) -> float:
    """RMS error of cosines between gradients × √p. Exact inner products: Σ_ts ⟨δ_t, δ'_s⟩ ⟨x_t, x'_s⟩ by module."""
    answer_model = sentiment(model)
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    gram = torch.zeros(len(batch), len(batch), dtype=torch.float64)

    def consumer(module: Captured, delta: torch.Tensor, x: torch.Tensor) -> None:
        kept[module.name] = (delta, x)
        pairs = (delta.flatten(0, 1) @ delta.flatten(0, 1).T) * (x.flatten(0, 1) @ x.flatten(0, 1).T)
        gram.add_(pairs.double().view(len(batch), TOKENS, len(batch), TOKENS).sum((1, 3)))

    with Capture(selection.modules, lambda module, x: x) as capture:
        capture.start(len(batch), *answer_model.sequences(batch))
        z, _ = answer_model.logits(batch)
        capture.backward(z, torch.tensor([[0.5, -0.5]]).expand(len(batch), 2), consumer, keep_graph=False)
    upper = torch.triu_indices(len(batch), len(batch), 1)
    errors = []
    for seed in range(SEEDS):
        sketch = make_sketch(SketchConfig(sketch_seed=seed), selection.modules)
        total = sketch.accumulator(len(batch))
        for name, (delta, x) in kept.items():
            sketch.accumulate(sketch.modules[name], delta, sketch.fold_input(sketch.modules[name], x), total)
        rows = sketch.finish(total).double()
        errors.append((cosines(rows @ rows.T) - cosines(gram))[upper[0], upper[1]].square().mean())
    return float(torch.stack(errors).mean().sqrt() * sketch.dim**0.5)


def cosines(gram: torch.Tensor) -> torch.Tensor:
    lengths = gram.diagonal().sqrt()
    return gram / lengths[:, None] / lengths[None, :]


def directions_ratio(model: LoadedModel, selection: Selection, sketch: Sketch, batch: list[list[int]]) -> float:
    """Error of F with 8 spectral directions ÷ with 64 projections, against 160 spectral ones; whole vocabulary."""
    answer_model = AnswerModel(model, resolve_answers(load_task("triviaqa"), model.tokenizer))
    reference = rows_of(model, selection, sketch, answer_model, batch, lambda p: spectral(p, 160))
    projected = rows_of(
        model, selection, sketch, answer_model, batch, lambda p: projection(p, 64, list(range(len(batch))), 0)
    )
    ratios = [fisher_error(G, G[:8]) / fisher_error(G, P) for G, P in zip(reference, projected, strict=True)]
    return statistics.geometric_mean(ratios)


def fisher_error(G: torch.Tensor, P: torch.Tensor) -> float:
    """‖GᵀG − PᵀP‖ / ‖GᵀG‖ in Frobenius norm, from small products."""
    GG, PP, GP = ((a.double() @ b.double().T).square().sum() for a, b in ((G, G), (P, P), (G, P)))
    return float(((GG + PP - 2 * GP).clamp_min(0) / GG).sqrt())


def suffix_ratio(model: LoadedModel, batch: list[list[int]]) -> float:
    """Scoring 151 suffixes of each prompt: one token tree ÷ one sequence per suffix."""
    answers = resolve_answers(load_task("clinc150"), model.tokenizer)

    def score(share_prompt: bool) -> float:
        answer_model = AnswerModel(model, answers, share_prompt=share_prompt)
        with torch.no_grad():
            return seconds(lambda: answer_model.logits(batch))

    score(True)
    return statistics.median(score(True) / score(False) for _ in range(3))
