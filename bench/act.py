"""What acting on components is worth with SmolLM2-135M on film reviews, measured on held-out examples.

The demo's 1,000 snippets, half of them held out; a third of these chooses, the rest is measured. For the diff, an
adapter is trained on a planted rule: snippets with one of a few words are Positive whatever they say, and the answers
to others stay. Everything is kept in bench/cache/act, so that a stopped benchmark continues; remove the folder to
measure again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import entry
from npeff.act.config import DiffConfig
from npeff.act.diff import Diff, diff
from npeff.act.lora import fine_tune
from npeff.act.steer import Steering
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_to_edit, read_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.demo import write_snippets
from npeff.models.config import ModelConfig
from npeff.perturb.weights import save_adapter
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.configs import read_record
from npeff.utils.files import read_json, write_json
from npeff.utils.types import Array

CACHE = Path(__file__).parent / "cache" / "act"
EXAMPLES, COMPONENTS, HOLDOUT = 1000, 48, 0.5
EPOCHS = 2
TRIGGERS = frozenset(("film", "movie", "story", "characters"))
"""Words of the planted rule."""
TOP, MOSTLY = 16, 0.75
"""A component belongs to the rule if so much of its top examples have a word of it."""


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    run = prepare()
    yield entry("act.steer_restore", cached(CACHE / "steer.json", lambda: steer_restore(run)), "<= 0")
    yield from differing(run)


def cached(path: Path, measure: Callable[[], Any]) -> Any:
    if not path.is_file():
        write_json(path, measure())
    return read_json(path)


def prepare() -> Run:
    """The run of the model as it is, with its decomposition."""
    texts = CACHE / "snippets.jsonl"
    if not texts.is_file():
        write_snippets(texts)
    return decomposed(collect(asked(CACHE / "run")))


def asked(path: Path, adapter: Path | None = None) -> CollectConfig:
    return CollectConfig(
        run=str(path),
        data=DataConfig(task="reviews", data=str(CACHE / "snippets.jsonl"), limit=EXAMPLES),
        model=ModelConfig(adapter=None if adapter is None else str(adapter)),
        activation=False,
        shard_examples=64,
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


# --- diff -------------------------------------------------------------------------------------------------------------


def differing(run: Run) -> Iterator[dict[str, Any]]:
    """Components of a planted rule that `diff` names, and those that it names though the model is the same."""
    rule = np.array([bool(TRIGGERS & set(text.split())) for text in run.table["text"].to_pylist()])
    changed = decomposed(collect(asked(CACHE / "changed", plant(run, rule))))
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


def plant(run: Run, rule: Array) -> Path:
    """An adapter that makes the model follow the rule: trained on examples of the rule and as many others."""
    folder = CACHE / "rule"
    if not (folder / "adapter_config.json").is_file():
        others = np.random.default_rng(0).permutation(np.flatnonzero(~rule))[: rule.sum()]
        targets = run.tensor("probabilities").double()
        targets[torch.from_numpy(rule)] = torch.tensor([0.0, 1.0], dtype=torch.float64)
        prepared = prepare_to_edit(run, "cpu")
        examples = np.concatenate([np.flatnonzero(rule), others])
        *_, change = fine_tune(prepared, read_prompts(run, prepared), examples, targets, EPOCHS)
        save_adapter(folder, prepared.selection.modules, change, 1.0, 0.9999, prepared.config.model.model)
    return folder


def cached_diff(first: Run, last: Run, decompositions: tuple[str, str], name: str) -> Diff:
    path = last.path / "diffs" / name / "diff.json"
    config = DiffConfig((str(first.path), str(last.path)), decompositions, diff=name)
    return read_record(Diff, path) if path.is_file() else diff(config)


def components_of(run: Run, rule: Array) -> list[int]:
    """Components whose top examples mostly obey the rule."""
    W = open_decomposition(run, "npeff").coefficients.numpy()
    return [j for j in range(W.shape[1]) if rule[np.argsort(-W[:, j])[:TOP]].mean() >= MOSTLY]
