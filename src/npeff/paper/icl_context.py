"""Predictions behind contexts of worked examples, and the best of several random contexts."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from npeff.collect.session import Prepared, tokenize
from npeff.models.answers import AnswerModel
from npeff.paper.config import IclConfig
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.tasks.data import Dataset
from npeff.tasks.task import Before, Task, Turns
from npeff.utils import Array, Record, UserError, read_record, write_record


class Key(Record):
    """What kept results depend on."""

    run: str
    """Fingerprint of the run."""
    sets: list[list[int]] = field(default_factory=list)
    """search.json: examples of each context."""
    scored: list[int] = field(default_factory=list)
    """search.json: examples that each context is scored on."""
    context: str = ""
    """predictions.json: text of the context."""
    turns: Turns = ()
    """predictions.json: the context of a chat."""


class Kept(Record):
    """Results that are written as they come: RUN/icl/SHOTS-SEED/search.json and predictions.json."""

    key: Key
    """What they depend on."""
    scores: list[float] = field(default_factory=list)
    """search.json: accuracy behind each of the first contexts."""
    predictions: list[int] = field(default_factory=list)
    """predictions.json: answer number of each of the first examples."""


class Context(Record):
    """The best context."""

    examples: list[int]
    """Its worked examples."""
    text: str
    """What stands before every prompt."""
    scores: list[float]
    """Accuracy behind each context that was tried."""
    turns: Turns = ()
    """What stands before every question of a chat."""


class Predictor(AnswerModel):
    """A run's model, asked with a context before every prompt; what all prompts begin with is read once."""

    def __init__(self, prepared: Prepared, batch_tokens: int | None = None) -> None:
        super().__init__(prepared.model, prepared.answers, share_prompt=prepared.config.share_prompt)
        self.prepared = prepared
        self._budget = batch_tokens or prepared.config.batch_tokens
        # suffixes bring an attention mask of their own, so they are read behind the whole context every time
        accepted = inspect.signature(prepared.model.network.forward).parameters
        self.shares = self.answers.kind != "suffixes" and "past_key_values" in accepted
        self._checked = False

    def predict(self, before: Before, examples: pa.Table) -> Array:
        """Predict examples behind a context.

        Args:
            before: The context: what stands before every question.
            examples: m rows of a run's table.

        Returns:
            The answer number of each example, int64 [m].

        Raises:
            UserError: A prompt with the context is too long for the model.
        """
        try:
            return self._predict(tokenize(self.prepared, Dataset(examples, *before)))
        except UserError as error:
            raise UserError(f"With the context of worked examples: {error} Or use fewer --shots.") from error

    @torch.inference_mode()
    def _predict(self, prompts: list[list[int]]) -> Array:
        predictions = np.empty(len(prompts), np.int64)
        shared = self._shared(prompts)
        past = self._read(prompts[0][:shared]) if shared else None
        rest = [ids[shared:] for ids in prompts]
        for batch in self.prepared.collector.batches(rest, self._budget):
            z = self._behind(past, [rest[i] for i in batch])
            if shared and not self._checked:
                self._checked = True
                if not self._agree(z, self._behind(None, [prompts[i] for i in batch])):
                    self.shares = False
                    return self._predict(prompts)
            predictions[batch] = z.argmax(1).cpu().numpy()
        return predictions

    def _shared(self, prompts: Sequence[list[int]]) -> int:
        """How many first tokens all prompts have in common, leaving one to each."""
        if not self.shares or len(prompts) < 2:
            return 0
        first, last = min(prompts), max(prompts)  # what these two have in common, all have
        same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        return min(same, min(map(len, prompts)) - 1)

    def _read(self, ids: list[int]) -> Any:
        """Keys and values of the first tokens."""
        # loaded late, because it takes a second
        from transformers import DynamicCache

        cache = DynamicCache()
        self.logits_after([ids], cache, [range(len(ids))], [range(0)])
        return cache

    def _behind(self, past: Any, prompts: list[list[int]]) -> torch.Tensor:
        """Answer logits [B, r] of prompts behind the tokens whose keys and values are `past`, if any."""
        if past is None:
            return self.logits(prompts)[0]
        cache, before = copy.deepcopy(past), past.get_seq_length()  # the forward pass adds to it
        cache.batch_repeat_interleave(len(prompts))
        positions = [range(before, before + len(prompt)) for prompt in prompts]
        return self.logits_after(prompts, cache, positions, [range(before)] * len(prompts))

    def _agree(self, z: torch.Tensor, plain: torch.Tensor) -> bool:
        """Whether sharing the context gives what the whole prompt gives; not every model's cache does."""
        tolerance = 1e-3 if self.prepared.config.model.dtype == "float32" else 3e-2
        return bool((z.softmax(1) - plain.softmax(1)).abs().max() <= tolerance)


def draw(run: Run, labels: Array, config: IclConfig) -> Key:
    """Draw contexts, and other examples to score them on: none meets its own answer in a context.

    Args:
        run: The run; its usable examples with a label are drawn from.
        labels: Label numbers of all examples, -1 where unknown, int64 [m].
        config: How many to draw, and the seed.

    Returns:
        The examples of each context, and the scored examples in ascending order.

    Raises:
        UserError: There are too few examples.
    """
    shots, scored, labelled = config.shots, config.scored, np.flatnonzero(run.usable & (labels >= 0))
    if len(labelled) < scored + shots:
        raise UserError(
            f"Only {len(labelled)} usable examples have a label: too few to score contexts of {shots} on {scored} "
            f"others. Lower --scored or --shots, or collect more."
        )
    random = np.random.default_rng(config.seed)
    shuffled = random.permutation(labelled)
    drawn = [random.choice(shuffled[scored:], shots, replace=False).tolist() for _ in range(config.sets)]
    return Key(run.fingerprint, drawn, np.sort(shuffled[:scored]).tolist())


def render(task: Task, table: pa.Table, examples: Sequence[int]) -> Before:
    """The context of worked examples, in this order."""
    worked = []
    for row in table.take(list(examples)).to_pylist():
        fields = {name: row[FIELD + name] for name in task.fields}
        worked.append({"text": row["text"], "label": task.labels[row["label"]], **fields})
    return task.before(worked)


def search(path: Path, key: Key, predictor: Predictor, run: Run, labels: Array) -> Context:
    """Score all contexts.

    Args:
        path: File that keeps the scores; an earlier search with the same key continues.
        key: The contexts, and the examples to score them on.
        predictor: The run's model.
        run: The run.
        labels: Label numbers of all examples, int64 [m].

    Returns:
        The best context (of equally good ones the first), and the accuracy behind each.
    """
    kept = _resumed(path, key)
    contexts = [render(predictor.prepared.task, run.table, chosen) for chosen in key.sets]
    examples, truth, done = run.table.take(key.scored), labels[key.scored], len(kept.scores)
    for before in tqdm(contexts[done:], desc="Contexts", unit="set", initial=done, total=len(contexts), disable=None):
        kept.scores.append(float((predictor.predict(before, examples) == truth).mean()))
        write_record(path, kept, sealed=True)
    best = int(np.argmax(kept.scores))
    text, turns = contexts[best]
    return Context(key.sets[best], text, kept.scores, turns)


def predict_all(path: Path, predictor: Predictor, run: Run, before: Before) -> Array:
    """Predict all examples behind a context.

    Args:
        path: File that keeps the predictions; an earlier call with the same context continues.
        predictor: The run's model.
        run: The run.
        before: The context: what stands before every question.

    Returns:
        Answer numbers, int64 [m].
    """
    kept = _resumed(path, Key(run.fingerprint, context=before[0], turns=before[1]))
    known, block = kept.predictions, run.manifest.shard_examples
    bar = tqdm(total=len(run.table), initial=len(known), desc="Behind the best context", unit="ex", disable=None)
    with bar:
        while len(known) < len(run.table):
            predictions = predictor.predict(before, run.table.slice(len(known), block)).tolist()
            known += predictions
            write_record(path, kept, sealed=True)
            bar.update(len(predictions))
    return np.array(known, np.int64)


def _resumed(path: Path, key: Key) -> Kept:
    """What earlier calls with the same key have kept, if anything."""
    kept = read_record(Kept, path) if path.is_file() else None
    return kept if kept and kept.key == key else Kept(key)
