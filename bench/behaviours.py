"""Behaviours beyond one short answer: positions of running text, generated answers. CPU; cost on one thread."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf

from bench import entry
from bench.model_kinds import prompts, random_model
from npeff.analyse.ranking import columns, top_examples
from npeff.collect.batch import Collector
from npeff.collect.config import CollectConfig, DirectionsConfig, PositionsConfig, SketchConfig
from npeff.collect.estimate import peak_memory
from npeff.collect.positions import chosen_chunks
from npeff.collect.run import collect
from npeff.collect.sketch.make import make_sketch
from npeff.decompose.base import Decomposition
from npeff.decompose.config import HOLDOUT, DecomposeConfig, Method
from npeff.decompose.run import decompose
from npeff.models.answer_sets import AnswerSet, resolve_answers
from npeff.models.config import ModelConfig, SamplesConfig
from npeff.models.load import LoadedModel, load_model
from npeff.models.prompts import encode
from npeff.models.select import select_parameters
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset, load_documents
from npeff.tasks.task import load_task
from npeff.utils.types import Array

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 128
PLACES = range(16, TOKENS + 1, 16)
REPEATS = 3
EXAMPLES = 1000
COMPONENTS = 48
TOP = 16
"""Examples of a component that were fitted and say which target it has."""
HELD_OUT = 8
"""Held-out examples of a component that are compared with it."""
GROUPS = 2000
DRAWS = 2000
MEGABYTES = (64, 1024)


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    yield entry("behaviours.positions_error", positions_error(), "<= 1e-4")
    yield entry("behaviours.generated_error", generated_error(), "<= 1e-4")
    model = load_model(ModelConfig(device="cpu"))
    yield entry("behaviours.positions_ratio", positions_ratio(model), "<= 0.8")
    yield entry("behaviours.many_documents_ratio", positions_ratio(model, documents=8), "reported")
    with tempfile.TemporaryDirectory() as folder:
        yield entry("behaviours.memory_ratio", memory_ratio(Path(folder)), "<= 1.1")
        run = collect(corpus_config(Path(folder) / "run"))
        npeff, clusters = (coherence(run, decomposed(run, method)) for method in ("npeff", "clusters"))
    # both ends of the interval must be above the bar
    yield entry("behaviours.coherence", npeff.ratio, ">= 5", npeff.low >= 5)
    yield entry("behaviours.coherence_low", npeff.low, "reported")
    yield entry("behaviours.coherence_high", npeff.high, "reported")
    yield entry("behaviours.coherence_clusters", clusters.ratio, "reported")


# --- accuracy -------------------------------------------------------------------------------------------------------


def rows_by_autograd(
    collector: Collector, prompt: Sequence[int], suffixes: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [n] of each suffix behind a prompt, and its sketched gradient [n, p], one run for each."""
    selection, network = collector.selection, collector.model.network
    weights = {n: p for m in selection.modules for n, p in m.module.named_parameters(prefix=m.name, recurse=False)}
    scores, rows = [], []
    for weight in weights.values():
        weight.requires_grad_(True)
    for suffix in suffixes:
        log_p = network(input_ids=torch.tensor([[*prompt, *suffix]])).logits[0].log_softmax(-1)
        score = sum(log_p[len(prompt) - 1 + i, token] for i, token in enumerate(suffix))
        found = dict(zip(weights, torch.autograd.grad(score, list(weights.values())), strict=True))
        parts = {m.name: (found.get(f"{m.name}.weight"), found.get(f"{m.name}.bias")) for m in selection.modules}
        rows.append(collector.sketch.matvec({m.name: m.matrix(*parts[m.name]) for m in selection.modules}))
        scores.append(score.detach())
    for weight in weights.values():
        weight.requires_grad_(False)
    return torch.stack(scores), torch.stack(rows)


def fisher_error(found: dict[str, torch.Tensor], at: int, scores: torch.Tensor, rows: torch.Tensor) -> float:
    """Relative error of a collected Fisher against that of all answers' gradients."""
    p = scores.softmax(0)
    centred = rows - p @ rows
    expected = centred.T @ (p[:, None] * centred)
    fisher = found["rows"][at].T @ found["rows"][at] * found["pef_norm"][at]
    return float((fisher - expected).norm() / expected.norm())


def tiny_collector(answers: AnswerSet) -> Collector:
    model = random_model(hf.LlamaConfig(**SMALL, intermediate_size=96))
    model = dataclasses.replace(model, tokenizer=SimpleNamespace(eos_token_id=-1, decode=str))
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=512), selection.modules)
    config = CollectConfig("", directions=DirectionsConfig("exact"), gradient=False, activation=False)
    return Collector(config, model, answers, selection, sketch)


def positions_error() -> float:
    """Largest relative error of Fishers of eight positions of two documents, run once, against each prefix alone."""
    tokens = tuple((token,) for token in (3, 7, 30, 90, 200))
    collector = tiny_collector(AnswerSet("tokens", tuple("abcde"), tokens))
    ends = (4, 31, 32, 33, 64, 100)
    batch = [document[:end] for document in prompts(2, 100, 110) for end in ends]
    found = collector.collect(batch, list(range(len(batch))))
    return max(fisher_error(found, i, *rows_by_autograd(collector, prompt, tokens)) for i, prompt in enumerate(batch))


def generated_error() -> float:
    """Largest relative error of Fishers over sampled continuations against autograd for each continuation alone."""
    answers = AnswerSet("generated", [], [], SamplesConfig(samples=6, max_tokens=5, stop=""))
    collector, errors = tiny_collector(answers), []
    for prompt in prompts(3, 5, 20):
        written = collector.answer_model.sample(prompt)
        answers.write(prompt, written, collector.model.tokenizer)
        found = collector.collect([prompt], [0])
        errors.append(fisher_error(found, 0, *rows_by_autograd(collector, prompt, written)))
    return max(errors)


# --- cost -----------------------------------------------------------------------------------------------------------


def positions_ratio(model: LoadedModel, documents: int = 1) -> float:
    """Processor time of eight positions of each document ÷ of the same contexts as separate examples."""
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(), selection.modules)
    texts = load_dataset(load_task("corpus"), DataConfig("corpus", limit=4 * documents)).table["text"].to_pylist()
    long = [ids for ids in (encode(model.tokenizer, text) for text in texts) if len(ids) >= TOKENS][:documents]
    contexts = [ids[:place] for ids in long for place in PLACES]
    answers = resolve_answers(load_task("corpus"), model.tokenizer)
    shared, alone = (Collector(CollectConfig(""), model, answers, selection, sketch) for _ in range(2))
    alone.shares_prompts = False

    def cost(collector: Collector) -> float:
        begin = time.process_time()  # others that compute on the machine do not count
        for batch in collector.batches(contexts, collector.config.batch_tokens, shared=True):
            collector.collect([contexts[i] for i in batch], batch)
        return time.process_time() - begin

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cost(shared)
    ratio = statistics.median(cost(shared) / cost(alone) for _ in range(REPEATS))
    torch.set_num_threads(threads)
    return ratio


def memory_ratio(folder: Path) -> float:
    """Peak of memory after chunks of a gigabyte were drawn ÷ after those of a part of it."""
    line, peaks = "What comes next in this line of running text is not hard to tell. " * 30 + "\n", []
    for megabytes in MEGABYTES:
        path = folder / f"{megabytes}.txt"
        with path.open("w", encoding="utf-8") as file:
            for _ in range(megabytes * 2**20 // len(line)):
                file.write(line)
        config = CollectConfig("", DataConfig("corpus", str(path), limit=EXAMPLES, shuffle_seed=0))
        drawn = list(chosen_chunks(config, load_documents(load_task("corpus"), config.data), EXAMPLES))
        assert len(drawn) == EXAMPLES
        path.unlink()
        peaks.append(peak_memory(torch.device("cpu")))
    return peaks[1] / peaks[0]


# --- coherence ------------------------------------------------------------------------------------------------------


class Coherence(NamedTuple):
    """How much more often than by chance held-out users of a component have its target."""

    share: float
    chance: float
    ratio: float
    low: float
    high: float
    components: int


def corpus_config(run: Path) -> CollectConfig:
    """Confident positions of the embedded reviews."""
    return CollectConfig(
        str(run),
        DataConfig("corpus", limit=EXAMPLES, shuffle_seed=0),
        directions=DirectionsConfig("spectral:2"),
        positions=PositionsConfig(chunk=250, per_chunk=16, rule="loss < 0.1"),
        shard_examples=100,
    )


def decomposed(run: Run, method: Method) -> Decomposition:
    return decompose(
        DecomposeConfig(run=str(run.path), decomposition=method, method=method, components=COMPONENTS, holdout=HOLDOUT)
    )


def coherence(run: Run, decomposition: Decomposition) -> Coherence:
    """Share of the first held-out examples of a component that have the commonest target of its fitted ones.

    Beside it the same of random groups of fitted and held-out examples. Components with fewer than `HELD_OUT` held-out
    users are left out. The interval of the ratio is a bootstrap over components.
    """
    targets = np.array(run.table["answer"].to_pylist())
    out = np.zeros(len(targets), bool)
    out[decomposition.notes.held_out] = True
    fitted, held_out = run.usable & ~out, run.usable & out
    shares = []
    for column in columns(decomposition.coefficients.abs()):
        own, others = (top_examples(column, chosen) for chosen in (fitted, held_out))
        if len(own) >= TOP and len(others) >= HELD_OUT:
            shares.append(_agreement(targets, own[:TOP], others[:HELD_OUT]))
    draw = np.random.default_rng(0)
    pools = [(np.flatnonzero(fitted), TOP), (np.flatnonzero(held_out), HELD_OUT)]
    chance = np.mean(
        [_agreement(targets, *(draw.choice(pool, size, replace=False) for pool, size in pools)) for _ in range(GROUPS)]
    )
    means = [np.mean(draw.choice(shares, len(shares))) for _ in range(DRAWS)]
    low, high = np.quantile(means, [0.025, 0.975]) / chance
    share = float(np.mean(shares))
    return Coherence(share, float(chance), share / float(chance), float(low), float(high), len(shares))


def _agreement(targets: Array, fitted: Array, held_out: Array) -> float:
    ((target, _),) = Counter(targets[fitted].tolist()).most_common(1)
    return float(np.mean(targets[held_out] == target))
