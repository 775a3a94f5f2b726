"""What acting on components is worth with SmolLM2-135M on short reviews, measured on held-out examples.

Short SST2 phrases (of `NPEFF_BENCH_DATA`; else embedded reviews) as in `bench.perturb`, half of them held out. An
adapter is trained on a planted rule: phrases with one of a few words are Positive whatever they say, and the answers to
all others stay. Everything is kept in bench/cache/act, so that a stopped benchmark continues; remove
the folder to measure again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch

from bench import entry
from bench.perturb import short_texts
from npeff.act.config import DiffConfig
from npeff.act.diff import Diff, diff
from npeff.act.steer import Steering
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import Prepared, prepare_run, read_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.models.config import ModelConfig
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.configs import read_record
from npeff.utils.files import read_json, whole_file, write_json
from npeff.utils.types import Array

CACHE = Path(__file__).parent / "cache" / "act"
EXAMPLES, COMPONENTS, HOLDOUT = 1000, 48, 0.5
LORA = {"r": 8, "lora_alpha": 16}
RATE, BATCH, EPOCHS = 5e-4, 16, 2
TRIGGERS = frozenset(("film", "movie", "story", "characters"))
"""Words of the planted rule."""
TOP, MOSTLY = 16, 0.75
"""A component belongs to the rule if so much of its top examples have a word of it."""


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    folder = CACHE / ("reviews" if data is None else "sst2")
    run = prepare(folder, data)
    yield entry("act.steer_restore", cached(folder / "steer.json", lambda: steer_restore(run)), "<= 0")
    yield from differing(folder, run)


def cached(path: Path, measure: Callable[[], Any]) -> Any:
    if not path.is_file():
        write_json(path, measure())
    return read_json(path)


def prepare(folder: Path, data: Path | None) -> Run:
    """The run of the model as it is, with its decomposition."""
    texts = folder / "short.jsonl"
    if not texts.is_file():
        with whole_file(texts) as temporary:
            lines = short_texts(data, EXAMPLES)
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return decomposed(collect(asked(folder / "run", texts)))


def asked(path: Path, texts: Path, adapter: Path | None = None) -> CollectConfig:
    return CollectConfig(
        run=str(path),
        data=DataConfig(task="sst2", data=str(texts)),
        model=ModelConfig(adapter=None if adapter is None else str(adapter)),
        sketch=SketchConfig(copies=4),
        activation=False,
    )


def decomposed(run: Run, seed: int = 0) -> Run:
    name = "npeff" if seed == 0 else f"npeff-seed-{seed}"
    decompose(DecomposeConfig(run=str(run.path), decomposition=name, components=COMPONENTS, holdout=HOLDOUT, seed=seed))
    return run


# --- steer ------------------------------------------------------------------------------------------------------------


def steer_restore(run: Run) -> int:
    """Parameters that differ in any bit after steering, and after an exception in it."""
    steering = Steering(run, open_decomposition(run, "npeff"), 0, device="cpu")
    network = steering.prepared.model.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    steering.say("a film of great charm", (2.0, -2.0), 4)
    try:
        with steering.hold(5.0):
            raise InterruptedError
    except InterruptedError:
        pass
    return sum(not torch.equal(value, before[name]) for name, value in network.state_dict().items())


def fine_tune(folder: Path, run: Run, examples: Array, targets: torch.Tensor) -> list[Path]:
    """Adapters after each epoch of LoRA fine-tuning; targets are probabilities of the answers [m, r]."""
    paths = [folder / str(epoch) for epoch in range(1, EPOCHS + 1)]
    if (paths[-1] / "adapter_config.json").is_file():
        return paths
    prepared: Prepared = prepare_run(run, "cpu")
    prompts = read_prompts(run, prepared)
    torch.manual_seed(0)
    names = [module.name for module in prepared.selection.modules]
    network: Any = peft.get_peft_model(prepared.model.network, peft.LoraConfig(target_modules=names, **LORA))  # type: ignore[arg-type]
    optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], RATE)
    for epoch, path in enumerate(paths):
        shuffled = np.random.default_rng(epoch).permutation(examples)
        for start in range(0, len(shuffled), BATCH):
            batch = shuffled[start : start + BATCH]
            z, _ = prepared.collector.answer_model.logits([prompts[i] for i in batch])
            loss = -(targets[batch].to(z) * z.log_softmax(1)).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        network.save_pretrained(path)
    return paths


# --- diff -------------------------------------------------------------------------------------------------------------


def differing(folder: Path, run: Run) -> Iterator[dict[str, Any]]:
    """Components of a planted rule that `diff` names, and those that it names though the model is the same."""
    rule = np.array([bool(TRIGGERS & set(text.split())) for text in run.table["text"].to_pylist()])
    targets = copy.copy(run.tensor("probabilities").double())
    targets[torch.from_numpy(rule)] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    adapter = fine_tune(folder / "rule", run, np.flatnonzero(run.usable), targets)[-1]
    changed = decomposed(collect(asked(folder / "changed", folder / "short.jsonl", adapter)))
    decomposed(run, seed=1)
    found = cached_diff(run, changed, ("npeff", "npeff"), "rule")
    null = cached_diff(run, run, ("npeff", "npeff-seed-1"), "null")
    belongs = components_of(changed, rule)
    yield entry("act.diff_components", len(belongs), "reported")
    named = [each.status != "kept" for each in found.changes if each.run == changed.path.name]
    recall = sum(named[j] for j in belongs) / max(len(belongs), 1)
    false = [each.status != "kept" for each in null.changes]
    share = sum(false) / len(false)
    yield entry("act.diff_recall", recall, ">= 0.8", holds=share <= 0.1)
    yield entry("act.diff_false", share, "<= 0.1")
    yield entry("act.diff_answers", len(found.answers), "reported")


def cached_diff(first: Run, last: Run, decompositions: tuple[str, str], name: str) -> Diff:
    path = last.path / "diffs" / name / "diff.json"
    config = DiffConfig((str(first.path), str(last.path)), decompositions, diff=name)
    return read_record(Diff, path) if path.is_file() else diff(config)


def components_of(run: Run, rule: Array) -> list[int]:
    """Components whose top examples mostly obey the rule."""
    W = open_decomposition(run, "npeff").coefficients.numpy()
    return [j for j in range(W.shape[1]) if rule[np.argsort(-W[:, j])[:TOP]].mean() >= MOSTLY]
