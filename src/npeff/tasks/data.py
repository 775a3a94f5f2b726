"""Examples of a task: read, checked, labelled, without duplicates, in a reproducible order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from npeff.tasks.config import FIELD, DataConfig
from npeff.tasks.label_parsing import Labels, answer_text, scalar_text
from npeff.tasks.readers import Source
from npeff.tasks.sources import open_source
from npeff.tasks.task import Task
from npeff.utils.errors import UserError
from npeff.utils.text import is_text

_CHUNK = 65_536


@dataclass(frozen=True)
class Dataset:
    """The examples of a run."""

    table: pa.Table
    """source_row int64, text string, label int32 (index into the task's labels) and answer string, both nullable, and
    a string column `field:NAME` for every other column that the prompt names."""
    prefix: str = ""
    """Few-shot prefix of every prompt."""
    dropped: tuple[str, ...] = ()
    """What was left out, for people to read."""

    def prompts(self, task: Task) -> list[str]:
        """What the model sees, an entry per example."""
        texts = self.table["text"].to_pylist()
        columns = {name: self.table[FIELD + name].to_pylist() for name in task.fields}
        return [
            self.prefix + task.render(text, {name: values[row] for name, values in columns.items()})
            for row, text in enumerate(texts)
        ]


def load_dataset(task: Task, config: DataConfig) -> Dataset:
    """The examples that `config` asks for, as `task` understands them.

    Order of steps: read, drop duplicates, draw the few-shot examples, shuffle, limit. So the few-shot prefix depends
    neither on the shuffle nor on the limit, and a larger limit only adds examples.
    """
    table, notes = _read(task, config, _open(task, config))
    if config.unique:
        kept = _first_of_each(table.select(_identity(task)))
        if len(kept) < len(table):
            notes.append(f"{len(table) - len(kept)} duplicates of earlier examples")
        table = table.take(kept)
    prefix, table = _few_shot(task, config, table, notes)
    if config.shuffle_seed is not None:
        table = table.take(_shuffled(len(table), config.shuffle_seed))
    if config.limit is not None:
        table = table.slice(0, min(config.limit, len(table)))
    return Dataset(table.combine_chunks(), prefix, tuple(notes))


def _open(task: Task, config: DataConfig) -> Source:
    """The data that are asked for, or else the task's own with its configuration and split."""
    if config.data in (None, task.data):
        if task.data is None:
            raise UserError(f"Task {task.name!r} has no data of its own; give a file or a Hub id with --data.")
        return open_source(task.data, config.data_config or task.config, config.split or task.split)
    return open_source(config.data, config.data_config, config.split)


def _read(task: Task, config: DataConfig, source: Source) -> tuple[pa.Table, list[str]]:
    """All usable rows as a table, and notes on those that were dropped."""
    examples = _Examples(task, config, source)
    wanted = {*examples.text_columns, *examples.label_columns, *task.fields}
    used, bad = _Builder(task.fields), 0
    shown: list[str] = []
    for number, row in source.rows(wanted):
        try:
            used.add(number, *examples.read(row))
        except ValueError as error:
            message = f"{source.unit} {number}: {error}"
            if config.on_bad_example == "error":
                raise UserError(
                    f"{source.name}, {message}. (--on-bad-example drop leaves such examples out.)"
                ) from error
            bad += 1
            if bad <= 5:
                shown.append(message)
    table = used.table()
    if not len(table):
        raise UserError(f"{source.name} has no usable example. {'; '.join(shown)}.")
    examples.check_label_column()
    more = "; ..." if bad > len(shown) else ""
    return table, [f"{bad} bad examples ({'; '.join(shown)}{more})"] if bad else []


class _Examples:
    """Finds text, label and fields in the rows of one source."""

    def __init__(self, task: Task, config: DataConfig, source: Source) -> None:
        self._config, self._source = config, source
        self._labels = Labels(task)
        self.text_columns: Sequence[str] = (config.text_column,) if config.text_column else task.text_columns
        self.label_columns: Sequence[str] = (config.label_column,) if config.label_column else task.label_columns
        for names in (self.text_columns, *((name,) for name in task.fields)):
            if not set(names) & set(source.columns):
                expected = " or ".join(map(repr, names))
                hint = " Name the right one with --text-column." if names is self.text_columns else ""
                raise UserError(f"{source.name} has no column {expected}. {source.describe_columns()}{hint}")
        self._text_column = next(name for name in self.text_columns if name in source.columns)
        self._label_column: str | None = None
        self._fields = task.fields
        self._vocabulary = task.answers == "vocabulary"

    def read(self, row: Mapping[str, Any]) -> tuple[str, int | None, str | None, list[str]]:
        """Text, label index, free answer and fields of one row; ValueError says what is wrong with it."""
        text = row.get(self._text_column)
        if not isinstance(text, str):
            found = "missing" if text is None else f"{type(text).__name__}, not text"
            raise ValueError(f"the value of {self._text_column!r} is {found}")
        if not text.strip():
            raise ValueError(f"the text in {self._text_column!r} is empty")
        if self._label_column is None:
            # JSON records may leave the label out, so the first record that has one decides which column it is
            self._label_column = next((name for name in self.label_columns if name in row), None)
        value = None if self._label_column is None else row.get(self._label_column)
        label = None if self._vocabulary else self._labels.read(value)
        answer = answer_text(value) if self._vocabulary else None
        fields = []
        for name in self._fields:
            field = scalar_text(row.get(name))
            if field is None:
                raise ValueError(f"the value of {name!r} is missing")
            fields.append(field)
        for part in (text, answer or "", *fields):
            if not is_text(part):
                raise ValueError("there is half of a surrogate pair in it, which no UTF-8 file can hold")
        return text, label, answer, fields

    def check_label_column(self) -> None:
        """A label column that was asked for by name must exist; one of the task's may be absent."""
        if self._config.label_column and self._label_column is None:
            raise UserError(
                f"{self._source.name} has no column {self._config.label_column!r}. {self._source.describe_columns()}"
            )


class _Builder:
    """Collects examples in Arrow chunks, so that a million of them never exist as Python objects at once."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._schema = pa.schema(
            [("source_row", pa.int64()), ("text", pa.string()), ("label", pa.int32()), ("answer", pa.string())]
            + [(FIELD + name, pa.string()) for name in fields]
        )
        self._columns: list[list[Any]] = [[] for _ in self._schema]
        self._batches: list[pa.RecordBatch] = []

    def add(self, number: int, text: str, label: int | None, answer: str | None, fields: list[str]) -> None:
        for column, value in zip(self._columns, (number, text, label, answer, *fields), strict=True):
            column.append(value)
        if len(self._columns[0]) == _CHUNK:
            self._flush()

    def _flush(self) -> None:
        arrays = [pa.array(column, field.type) for column, field in zip(self._columns, self._schema, strict=True)]
        self._batches.append(pa.record_batch(arrays, schema=self._schema))
        for column in self._columns:
            column.clear()

    def table(self) -> pa.Table:
        self._flush()
        return pa.Table.from_batches(self._batches, self._schema)


def _identity(task: Task) -> list[str]:
    """The columns that make the prompt: two examples that agree in them are duplicates."""
    return ["text", *(FIELD + name for name in task.fields)]


def _first_of_each(table: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of the first occurrence of every distinct row, in order."""
    codes = np.zeros(len(table), np.int64)
    for column in table.columns:
        chunks = pc.dictionary_encode(column).chunks
        values = np.concatenate([chunk.indices.to_numpy(zero_copy_only=False) for chunk in chunks])
        # both factors are below the row count, so their product stays far from overflowing
        codes = np.unique(codes * (values.max() + 1) + values, return_inverse=True)[1]
    return np.sort(np.unique(codes, return_index=True)[1])


def _shuffled(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A random order. From the raw bits of PCG64, which NumPy keeps the same for ever, unlike its `permutation`."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def _few_shot(task: Task, config: DataConfig, table: pa.Table, notes: list[str]) -> tuple[str, pa.Table]:
    """The few-shot prefix and the examples without those in it."""
    worked = list(_draw(task, config, table)) if config.few_shot else [dict(example) for example in task.few_shot]
    if not worked:
        return "", table
    prefix = "".join(task.render_worked(example["text"], example["label"], example) for example in worked)
    rest = table
    for example in worked:  # duplicates go too: none should meet its own answer in the prefix
        same = [pc.not_equal(rest[name], example[name.removeprefix(FIELD)]) for name in _identity(task)]
        rest = rest.filter(functools.reduce(pc.or_, same))
    if len(rest) < len(table):
        notes.append(f"{len(table) - len(rest)} examples that are in the few-shot prefix")
    if not len(rest):
        raise UserError("Every example is in the few-shot prefix, none is left; choose a smaller --few-shot.")
    return prefix, rest


def _draw(task: Task, config: DataConfig, table: pa.Table) -> Iterator[dict[str, str]]:
    """`config.few_shot` random labelled examples, in the order drawn."""
    gold = table["answer" if task.answers == "vocabulary" else "label"]
    labelled = table.filter(pc.is_valid(gold))
    if config.few_shot > len(labelled):
        raise UserError(
            f"--few-shot is {config.few_shot}, but only {len(labelled)} examples have a label; draw fewer of them."
        )
    for row in labelled.take(_shuffled(len(labelled), config.few_shot_seed)[: config.few_shot]).to_pylist():
        label = row["answer"] if task.answers == "vocabulary" else task.labels[row["label"]]
        yield {"text": row["text"], "label": label, **{name: row[FIELD + name] for name in task.fields}}
