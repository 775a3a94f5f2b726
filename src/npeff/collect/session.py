"""A model, a task and a sketch, ready to collect; and the walk of an example from its table row to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from npeff.collect.batch import Collector, Wanted
from npeff.collect.config import CollectConfig
from npeff.collect.identity import PLACES, differences, identity_of
from npeff.collect.sketch.make import make_sketch
from npeff.models.answers import AnswerSet, encode_all, resolve_answers
from npeff.models.config import confirm_trust
from npeff.models.load import LoadedModel, Selection, load_model, select_parameters
from npeff.store.examples import inputs_hash, inputs_of
from npeff.store.rows import ArrayRows
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.tasks.data import Dataset, load_dataset
from npeff.tasks.task import Task, load_task
from npeff.utils.configs import from_dict, replace
from npeff.utils.errors import UserError

TEXTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Prepared:
    """Everything that a collection needs before its first batch."""

    config: CollectConfig
    task: Task
    answers: AnswerSet
    model: LoadedModel
    selection: Selection
    collector: Collector


def prepare(config: CollectConfig, task: Task | None = None) -> Prepared:
    """Load the model and set up capture for a task."""
    task = task or load_task(config.data.task)
    model = load_model(config.model)
    selection = select_parameters(model.network, config.model.include, config.model.exclude)
    answers = resolve_answers(task, model.tokenizer)
    sketch = make_sketch(config.sketch, selection.modules, model.device)
    wanted = Wanted(config.fisher, config.gradient, config.activation)
    collector = Collector(
        model, answers, selection, sketch, config.directions, wanted, config.padding, config.share_prompt
    )
    return Prepared(config, task, answers, model, selection, collector)


def prepare_run(run: Run, device: str | None = None) -> Prepared:
    """Set up a run's own model, sketch and task again, and check that they are still the same."""
    config: CollectConfig = from_dict(CollectConfig, run.manifest["config"])
    if device is not None:
        config = replace(config, model=replace(config.model, device=device))
    confirm_trust(config.model, run.path / "manifest.json")
    prepared = prepare(config)
    recorded = run.manifest["identity"]
    now = identity_of(config, prepared.task, prepared.model, run.manifest["task"].get("prefix", ""))
    if now["model_sha256"] != recorded.get("model_sha256"):
        raise UserError(f"Model {config.model.model!r} is no longer the one that {run.path} was collected with.")
    if now["task"] != recorded.get("task"):
        raise UserError(f"Task {config.data.task!r} is no longer the one that {run.path} was collected with.")
    changed = differences(recorded, now, but=(*PLACES, "data"))  # the data are read from the run itself
    if changed:
        raise UserError(
            f"The config in {run.path / 'manifest.json'} was changed: {'; '.join(changed[:5])}. Change it back."
        )
    return prepared


def load_prompts(prepared: Prepared) -> tuple[Dataset, list[list[int]]]:
    """The examples that the config asks for, and the token ids of their prompts.

    A prompt that does not fit the model is a bad example: an error, or left out with --on-bad-example drop.
    """
    dataset = load_dataset(prepared.task, prepared.config.data)
    prompts, misfits = _tokens(prepared, dataset)
    if not misfits:
        return dataset, prompts
    if prepared.config.data.on_bad_example == "error":
        raise UserError(f"{_misfit(prepared, dataset, prompts, misfits[0])} (--on-bad-example drop leaves it out.)")
    if len(misfits) == len(prompts):
        raise UserError(f"No prompt fits the model. {_misfit(prepared, dataset, prompts, 0)}")
    bad = set(misfits)
    kept = [row for row in range(len(prompts)) if row not in bad]
    rows = ", ".join(str(dataset.table["source_row"][row].as_py()) for row in misfits[:5])
    note = (
        f"{len(misfits)} examples with more than {_room(prepared)} tokens (row {rows}{', ...' if misfits[5:] else ''})"
    )
    fitting = Dataset(dataset.table.take(kept), dataset.prefix, (*dataset.dropped, note))
    return fitting, [prompts[row] for row in kept]


def tokenize(prepared: Prepared, dataset: Dataset) -> list[list[int]]:
    """Token ids of every prompt; one that does not fit the model is an error that names the example."""
    prompts, misfits = _tokens(prepared, dataset)
    if misfits:
        raise UserError(_misfit(prepared, dataset, prompts, misfits[0]))
    return prompts


def read_prompts(run: Run, prepared: Prepared) -> list[list[int]]:
    """Token ids of a run's prompts, after a check that its texts are those that were collected."""
    inputs = inputs_of(run.table)
    if inputs_hash(inputs) != run.manifest["inputs_sha256"]:
        raise UserError(f"The example table of {run.path} is not the one that was collected. `npeff verify` mends it.")
    return tokenize(prepared, Dataset(inputs, run.manifest["task"]["prefix"]))


def _tokens(prepared: Prepared, dataset: Dataset) -> tuple[list[list[int]], list[int]]:
    """Token ids of every prompt, and the numbers of those that do not fit the model."""
    prompts: list[list[int]] = []
    same: dict[int, int] = {}  # one object for a token, however often it occurs: a quarter of the memory
    for start in range(0, len(dataset.table), TEXTS_AT_ONCE):
        part = Dataset(dataset.table.slice(start, TEXTS_AT_ONCE), dataset.prefix)
        for ids in encode_all(prepared.model.tokenizer, part.prompts(prepared.task)):
            prompts.append([same.setdefault(token, token) for token in ids])
    room = _room(prepared)
    return prompts, [row for row, ids in enumerate(prompts) if not 0 < len(ids) <= room]


def _room(prepared: Prepared) -> int:
    return prepared.model.context - prepared.answers.longest


def _misfit(prepared: Prepared, dataset: Dataset, prompts: list[list[int]], row: int) -> str:
    source = dataset.table["source_row"][row].as_py()
    return (
        f"The prompt of example {row} (row {source} of the data) has {len(prompts[row])} tokens, but the model takes "
        f"1 to {_room(prepared)}. Shorten or remove it, or choose a model with a longer context."
    )


def collect_prompts(
    prepared: Prepared,
    prompts: Sequence[Sequence[int]],
    examples: list[int],
    bar: Any = None,
    storage: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Collect prompts in batches; as `Collector.collect`, but rows are flat, [sum of ranks, p], in order.

    Rows and gradients are of type `storage`, from the moment that their batch is done: a shard of them waits in memory.
    """
    parts: list[dict[str, torch.Tensor]] = []
    order: list[int] = []
    for batch in prepared.collector.batches(prompts, prepared.config.batch_tokens):
        found = prepared.collector.collect([prompts[i] for i in batch], [examples[i] for i in batch])
        found |= {name: found[name].to(storage) for name in ("rows", "gradient") if name in found}
        if "rows" in found:
            used = torch.arange(found["rows"].shape[1]) < found["rank"][:, None]
            found["row_lists"] = [rows[mask] for rows, mask in zip(found.pop("rows"), used, strict=True)]  # type: ignore[assignment]
        parts.append(found)
        order += batch
        if bar is not None:
            bar.update(len(batch))
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    result = {name: torch.cat([part[name] for part in parts])[back] for name in parts[0] if name != "row_lists"}
    if "row_lists" in parts[0]:
        rows = [row for part in parts for row in part["row_lists"]]
        result["rows"] = torch.cat([rows[i] for i in back.tolist()])
    return result


def collect_texts(
    run: Run,
    texts: Sequence[str],
    prepared: Prepared | None = None,
    fields: Sequence[Mapping[str, str]] = (),
    numbers: Sequence[int] | None = None,
) -> tuple[ArrayRows, dict[str, torch.Tensor]]:
    """Fisher rows of new texts under a run's model, task and sketch, and all else that `Collector.collect` gives.

    `fields` holds for each text the other columns that the task's prompt names, if it names any; `numbers` are the
    example numbers that seed random directions, 0, 1, ... if not given.
    """
    prepared = prepared or prepare_run(run)
    wanted = prepared.task.fields
    if wanted and [set(given) for given in fields] != [set(wanted)] * len(texts):
        raise UserError(f"The prompt of task {prepared.task.name!r} also needs {', '.join(wanted)} of every text.")
    columns = {FIELD + name: [given[name] for given in fields] for name in wanted}
    table = pa.table({"source_row": range(len(texts)), "text": list(texts), **columns})
    prompts = tokenize(prepared, Dataset(table, run.manifest["task"]["prefix"]))
    found = collect_prompts(prepared, prompts, list(range(len(texts)) if numbers is None else numbers))
    if "rows" not in found:  # a run without Fishers; the other kinds are in `found`
        return ArrayRows(torch.empty(0, prepared.config.sketch.dim), np.zeros(len(texts), np.int64)), found
    return ArrayRows(found["rows"], found["rank"].numpy()), found
