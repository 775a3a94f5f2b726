"""A model, a task and a sketch, ready to collect; and the walk of an example from its table row to token ids."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from npeff.collect.batch import Collector
from npeff.collect.config import CollectConfig
from npeff.collect.identity import PLACES, differences, identity_of
from npeff.collect.positions import choose_positions
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import AnswerSet, resolve_answers
from npeff.models.config import confirm_trust
from npeff.models.load import LoadedModel, load_model, with_classes
from npeff.models.prompts import Prompts
from npeff.models.quantised import dequantise
from npeff.models.select import Selection, select_parameters
from npeff.store.examples import WRITTEN_COLUMNS, inputs_hash, inputs_of
from npeff.store.rows import ArrayRows
from npeff.store.run import Run
from npeff.tasks.config import FIELD, DataConfig
from npeff.tasks.data import Dataset, Reader, load_dataset, load_documents
from npeff.tasks.task import ASKED, Task, asked_task
from npeff.utils import Record, UserError, from_dict, replace
from npeff.utils.progress import progress

TEXTS_AT_ONCE = 1024
WRITTEN, WRITTEN_TEXTS = WRITTEN_COLUMNS


class Prepared(Record):
    """Everything that a collection needs before its first batch."""

    config: CollectConfig
    task: Task
    answers: AnswerSet
    model: LoadedModel
    selection: Selection
    collector: Collector


def prepare(config: CollectConfig, task: Task | None = None, model: LoadedModel | None = None) -> Prepared:
    """Load the model and set up capture for a task.

    Args:
        config: What to collect.
        task: The task, if it was loaded already.
        model: The model, if it was loaded already.

    Returns:
        What a collection needs before its first batch.

    Raises:
        UserError: The model is a classifier, and the task is none for it.
    """
    task = task or with_classes(asked_task(config.data), config.model)
    model = model or load_model(config.model)
    if model.classifies and task.answers != "classes":
        raise UserError(f"Model {config.model.model!r} is a classifier: it needs a task with `answers: classes`.")
    selection = select_parameters(model.network, config.model.include, config.model.exclude)
    answers = resolve_answers(task, model.tokenizer, config.samples)
    sketch = make_sketch(config.sketch, selection.modules, model.device)
    return Prepared(config, task, answers, model, selection, Collector(config, model, answers, selection, sketch))


def prepare_run(run: Run, device: str | None = None, model: LoadedModel | None = None) -> Prepared:
    """Set up a run's own model, sketch and task again.

    Args:
        run: The run.
        device: Where to compute; where the run was collected, if not given.
        model: The run's model, if it was loaded already.

    Returns:
        What the run was collected with.

    Raises:
        UserError: The model, the task or the config in the manifest are no longer the same.
    """
    config: CollectConfig = from_dict(CollectConfig, run.manifest.config)
    config = replace(config, model=replace(config.model, tensor_parallel=None))
    if device is not None:
        config = replace(config, model=replace(config.model, device=device, device_map=None))
    confirm_trust(config.model, run.path / "manifest.json")
    prepared = prepare(config, model=model)
    recorded = run.manifest.identity
    now = identity_of(config, prepared.task, prepared.model, run.manifest.task.before)
    for entry, what in (("model_sha256", f"Model {config.model.model!r}"), ("task", f"Task {config.data.task!r}")):
        if differences({entry: recorded.get(entry)}, {entry: now[entry]}):
            raise UserError(f"{what} is no longer the one that {run.path} was collected with.")
    changed = differences(recorded, now, but=(*PLACES, "data"))  # the data are read from the run itself
    if changed:
        raise UserError(f"The config in {run.path / 'manifest.json'} was changed: {changed}. Change it back.")
    return prepared


def prepare_to_edit(run: Run, device: str | None = None) -> Prepared:
    """`prepare_run`, with weights that can be changed: quantised ones become the plain numbers that they stand for.

    Args:
        run: The run.
        device: Where to compute; where the run was collected, if not given.

    Returns:
        What the run was collected with, up to the rounding of quantised computation.

    Raises:
        UserError: Some weights are in memory only while they are used.
    """
    prepared = prepare_run(run, device)
    model = prepared.model
    if any(parameter.is_meta for parameter in model.network.parameters()):
        raise UserError("Weights that lie on disk cannot be changed. Give one device that holds all, as --device cpu.")
    if not model.quantised:
        return prepared
    dequantise(model.network)
    return prepare(prepared.config, prepared.task, model)


def prepare_with_prompts(config: CollectConfig) -> tuple[Prepared, Dataset, list[list[int]]]:
    """Read the examples that a config asks for, then load the model: mistakes in the data are told at once.

    Args:
        config: What to collect.

    Returns:
        What a collection needs, the examples, and the token ids of their prompts.
    """
    task = with_classes(asked_task(config.data), config.model)
    examples = open_examples(task, config.data)
    prepared = prepare(config, task)
    return prepared, *fitting_prompts(prepared, examples)


def load_prompts(prepared: Prepared) -> tuple[Dataset, list[list[int]]]:
    """The examples that a config asks for, and the token ids of their prompts, where the model is loaded already."""
    return fitting_prompts(prepared, open_examples(prepared.task, prepared.config.data))


def open_examples(task: Task, config: DataConfig) -> Dataset | Reader:
    """The examples of a task, or the documents that positions are chosen from as soon as there is a model."""
    return load_documents(task, config) if task.positions else load_dataset(task, config)


def fitting_prompts(prepared: Prepared, dataset: Dataset | Reader) -> tuple[Dataset, list[list[int]]]:
    """The examples whose prompts fit the model, and the token ids of these prompts.

    Args:
        prepared: Model and task.
        dataset: The examples, or documents.

    Returns:
        The examples that fit, with a note about those that do not, and their prompts.

    Raises:
        UserError: A prompt does not fit and the config does not say --on-bad-example drop, or none fits.
    """
    if isinstance(dataset, Reader):
        dataset = choose_positions(prepared.collector.answer_model, prepared.config, dataset)
    prompts, misfits = _tokens(prepared, dataset)
    if prepared.task.answers == "generated" and WRITTEN not in dataset.table.column_names:
        own = [prepared.answers.own.get(tuple(ids), ()) for ids in prompts]
        written = [[list(prepared.answers.tokens[i]) for i in each] for each in own]
        texts = [[prepared.answers.names[i] for i in each] for each in own]
        table = dataset.table.append_column(WRITTEN, pa.array(written, pa.list_(pa.list_(pa.int32()))))
        table = table.append_column(WRITTEN_TEXTS, pa.array(texts, pa.list_(pa.string())))
        dataset = dataclasses.replace(dataset, table=table)
    if not misfits:
        return dataset, prompts
    first = next(iter(misfits.values()))
    if prepared.config.data.on_bad_example == "error":
        raise UserError(f"{first} (--on-bad-example drop leaves it out.)")
    if len(misfits) == len(prompts):
        raise UserError(f"No prompt fits the model. {first}")
    kept = [row for row in range(len(prompts)) if row not in misfits]
    rows = ", ".join(map(str, dataset.table["source_row"].take(list(misfits)[:5]).to_pylist()))
    more = ", ..." if len(misfits) > 5 else ""
    or_one = " or only one continuation" if prepared.task.answers == "generated" else ""
    note = f"{len(misfits)} examples with more than {longest_prompt(prepared)} tokens{or_one} (row {rows}{more})"
    fitting = dataclasses.replace(dataset, table=dataset.table.take(kept), dropped=(*dataset.dropped, note))
    return fitting, [prompts[row] for row in kept]


def tokenize(prepared: Prepared, dataset: Dataset) -> list[list[int]]:
    """Token ids of every prompt; one that does not fit the model is an error that names the example."""
    prompts, misfits = _tokens(prepared, dataset)
    for message in misfits.values():
        raise UserError(message)
    return prompts


def read_prompts(run: Run, prepared: Prepared) -> list[list[int]]:
    """Token ids of a run's prompts.

    Args:
        run: The run.
        prepared: Its model and task, from `prepare_run`.

    Returns:
        Token ids of every example.

    Raises:
        UserError: The example table is not the one that was collected.
    """
    inputs = inputs_of(run.table)
    if inputs_hash(inputs) != run.manifest.inputs_sha256:
        raise UserError(f"The example table of {run.path} is not what was collected. `npeff verify` repairs it.")
    return tokenize(prepared, Dataset(inputs, *run.manifest.task.before))


def longest_prompt(prepared: Prepared) -> int:
    """How many tokens a prompt may have, so that its longest answer fits behind it."""
    return prepared.model.context - prepared.answers.longest


def _tokens(prepared: Prepared, dataset: Dataset) -> tuple[list[list[int]], dict[int, str]]:
    """Token ids of every prompt; and for each prompt that does not fit the model, by its number, a message."""
    writer = Prompts(prepared.task, prepared.model.tokenizer)
    prompts: list[list[int]] = []
    same: dict[int, int] = {}  # one object for a token, however often it occurs: a quarter of the memory
    for start in range(0, len(dataset.table), TEXTS_AT_ONCE):
        part = dataclasses.replace(dataset, table=dataset.table.slice(start, TEXTS_AT_ONCE))
        prompts += [[same.setdefault(token, token) for token in ids] for ids in writer.tokens(part)]
    if prepared.task.places:
        for ids, asked in zip(prompts, dataset.table[FIELD + ASKED].to_pylist(), strict=True):
            prepared.answers.own[tuple(ids)] = prepared.task.answers_at(asked)
    room = longest_prompt(prepared)
    misfits = {
        row: f"The prompt of example {row} (row {dataset.table['source_row'][row]} of the data) has {len(ids)} tokens, "
        f"but the model takes 1 to {room}. Shorten or remove it, or choose a model with a longer context."
        for row, ids in enumerate(prompts)
        if not 0 < len(ids) <= room
    }
    if prepared.task.answers == "generated":
        misfits |= _write_answers(prepared, dataset, [(r, ids) for r, ids in enumerate(prompts) if r not in misfits])
    return prompts, misfits


def _write_answers(prepared: Prepared, dataset: Dataset, prompts: list[tuple[int, list[int]]]) -> dict[int, str]:
    """Make sure that prompts have continuations: those in the table, or new ones; and say which have only one."""
    answers, misfits = prepared.answers, {}
    known = dataset.table[WRITTEN] if WRITTEN in dataset.table.column_names else None
    for row, ids in progress(prompts, desc="Sampling", unit="prompt", active=known is None and len(prompts) > 8):
        if known is not None or tuple(ids) not in answers.own:
            written = known[row].as_py() if known is not None else prepared.collector.answer_model.sample(ids)
            answers.write(ids, written, prepared.model.tokenizer)
        own = answers.own[tuple(ids)]
        if len(own) < 2:
            where = f"example {row} (row {dataset.table['source_row'][row]} of the data)"
            only = f"all samples of {where} are the same, {answers.names[own[0]]!r}, so there is nothing to choose"
            misfits[row] = f"One continuation only: {only}. Raise --temperature, --max-tokens or --samples."
    return misfits


def answer_texts(prepared: Prepared, predictions: Iterable[int]) -> list[str]:
    """Predicted answers as texts: names of labels, or tokens of the vocabulary."""
    if prepared.answers.names:
        return [prepared.answers.names[index] for index in predictions]
    return [prepared.model.tokenizer.decode([int(token)]) for token in predictions]


def collect_prompts(
    prepared: Prepared,
    prompts: Sequence[Sequence[int]],
    examples: list[int],
    bar: Any = None,
    storage: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Collect prompts in batches.

    Args:
        prepared: Model, task and sketch.
        prompts: Token ids of n prompts.
        examples: Their numbers, which seed random directions, [n].
        bar: Progress bar to move, if any.
        storage: Type of rows and gradients from the moment that their batch is done: a shard of them waits in memory.

    Returns:
        As `Collector.collect` gives them, in the order of `prompts`, but rows are flat: [sum of ranks, p].
    """
    parts: list[dict[str, torch.Tensor]] = []
    row_lists: list[torch.Tensor] = []
    order: list[int] = []
    for batch in prepared.collector.batches(prompts, prepared.config.batch_tokens, shared=True):
        part = prepared.collector.collect([prompts[i] for i in batch], [examples[i] for i in batch])
        part |= {name: part[name].to(storage) for name in ("rows", "gradient") if name in part}
        if "rows" in part:
            row_lists += [rows[:rank].clone() for rows, rank in zip(part.pop("rows"), part["rank"], strict=True)]
        parts.append(part)
        order += batch
        if bar is not None:
            bar.update(len(batch))
    back = torch.tensor(order).argsort()
    collected = {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}
    if row_lists:
        collected["rows"] = torch.cat([row_lists[i] for i in back.tolist()])
    return collected


def text_prompts(
    run: Run, texts: Sequence[str], prepared: Prepared, fields: Sequence[Mapping[str, str]] = ()
) -> list[list[int]]:
    """Put new texts into a run's prompt.

    Args:
        run: The run.
        texts: n texts.
        prepared: From `prepare_run`.
        fields: For each text the other columns that the task's prompt names, if it names any.

    Returns:
        Token ids of n prompts.

    Raises:
        UserError: A text lacks a column that the prompt needs.
    """
    wanted = prepared.task.fields
    if wanted and [set(given) for given in fields] != [set(wanted)] * len(texts):
        raise UserError(f"The prompt of task {prepared.task.name!r} also needs {', '.join(wanted)} of every text.")
    columns = {FIELD + name: [given[name] for given in fields] for name in wanted}
    table = pa.table({"source_row": range(len(texts)), "text": list(texts), **columns})
    return tokenize(prepared, Dataset(table, *run.manifest.task.before))


def collect_texts(
    run: Run,
    texts: Sequence[str],
    prepared: Prepared | None = None,
    fields: Sequence[Mapping[str, str]] = (),
    numbers: Sequence[int] | None = None,
) -> tuple[ArrayRows, dict[str, torch.Tensor]]:
    """Collect new texts with a run's model, task and sketch.

    Args:
        run: The run.
        texts: n texts.
        prepared: From `prepare_run`, if it was called already.
        fields: For each text the other columns that the task's prompt names, if it names any.
        numbers: Example numbers that seed random directions; 0, 1, ... if not given.

    Returns:
        Fisher rows of the texts (none where the run has no Fishers), and all else that `collect_prompts` gives.
    """
    prepared = prepared or prepare_run(run)
    prompts = text_prompts(run, texts, prepared, fields)
    collected = collect_prompts(prepared, prompts, list(range(len(texts)) if numbers is None else numbers))
    for name in {"prediction", "top_tokens"} & collected.keys():
        chosen = collected[name].view(len(texts), -1)
        collected[name] = prepared.answers.number(prompts, chosen).view(collected[name].shape)
    if "rows" not in collected:  # a run without Fishers has only the other kinds
        return ArrayRows(torch.empty(0, prepared.config.sketch.dim), np.zeros(len(texts), np.int64)), collected
    return ArrayRows(collected["rows"], collected["rank"].numpy()), collected
