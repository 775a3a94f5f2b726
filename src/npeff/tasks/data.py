"""Examples of a task: read, checked, labelled, without duplicates, in a reproducible order. No model is needed."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from npeff.tasks.config import FIELD, DataConfig
from npeff.tasks.readers import Row, Source, open_source
from npeff.tasks.task import ASKED, Before, Task, Turns
from npeff.utils import Array, Record, UserError, cut, is_text

_CHUNK = 65_536
_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")
_SHOWN = 5
"""Bad examples that are described when such are left out."""


class Dataset(Record):
    """The examples of a run."""

    table: pa.Table
    """source_row int64, text string, label int32 (index into the task's labels) and answer string, both nullable, and
    a string column `field:NAME` for every other column that the prompt names."""
    prefix: str = ""
    """Few-shot prefix of every plain prompt."""
    turns: Turns = ()
    """Turns of a chat before every question: its system prompt, its few-shot examples."""
    dropped: tuple[str, ...] = ()
    """What was left out, for people to read."""
    notes: tuple[str, ...] = ()
    """What is unusual about the data, as labels that are missing: sentences for people to read."""

    @property
    def before(self) -> Before:
        """What stands before every question."""
        return self.prefix, self.turns

    def prompts(self, task: Task) -> list[str]:
        """Write out what is asked.

        Args:
            task: What is asked.

        Returns:
            The prompt of each example, with the few-shot prefix; of a chat, the user's last turn.
        """
        rows = self.table.select(_identity(task)).to_pylist()
        return [self.prefix + task.render(row["text"], {f: row[FIELD + f] for f in task.fields}) for row in rows]

    def pairs(self, task: Task) -> list[str] | None:
        """The second text of each example, if the task has pairs of texts."""
        rows = self.table.select(_identity(task)).to_pylist()
        fill = task.render_pair
        return [fill(row["text"], {f: row[FIELD + f] for f in task.fields}) for row in rows] if task.pair else None


def load_dataset(task: Task, config: DataConfig) -> Dataset:
    """Read the examples that a config asks for.

    Order of steps: read, drop duplicates, draw the few-shot examples, shuffle, limit. So the few-shot prefix depends
    neither on the shuffle nor on the limit, and a larger limit only adds examples.

    Args:
        task: What is asked; it says where text and label are.
        config: Which examples.

    Returns:
        The examples, as `task` understands them.
    """
    reader = Reader(task, config, _open(task, config))
    table = reader.table()
    dropped = reader.dropped()
    if config.unique:
        kept = _first_of_each(table.select(_identity(task)))
        if len(kept) < len(table):
            dropped.append(f"{len(table) - len(kept)} duplicates of earlier examples")
        table = table.take(kept)
    notes = reader.notes(table)
    before, table = _few_shot(task, config, table, dropped)
    if config.shuffle_seed is not None:
        table = table.take(_shuffled(len(table), config.shuffle_seed))
    return Dataset(table[: config.limit].combine_chunks(), *before, tuple(dropped), tuple(notes))


def load_documents(task: Task, config: DataConfig) -> "Reader":
    """Open the documents of a task whose examples are positions in them; they are read one by one."""
    if config.few_shot or config.chat:
        raise UserError("Positions of documents take neither few-shot examples nor a chat; leave out such options.")
    return Reader(task, config, _open(task, config))


def _open(task: Task, config: DataConfig) -> Source:
    """The data that are asked for, or else the task's own with its configuration and split."""
    if config.data in (None, task.data):
        if task.data is None:
            raise UserError(f"Task {task.name!r} has no data of its own; give a file or a Hub id with --data.")
        return open_source(task.data, config.data_config or task.config, config.split or task.split, task.positions)
    return open_source(config.data, config.data_config, config.split, task.positions)


class Reader:
    """Finds text, label and fields in the rows of one source."""

    def __init__(self, task: Task, config: DataConfig, source: Source) -> None:
        self._task, self._config, self.source = task, config, source
        self._labels = Labels(task)
        text_columns = (config.text_column,) if config.text_column else task.text_columns
        hint = " Name the right one with --text-column, or with text_columns: [NAME] in the task file."
        self._text_column = self._required(text_columns, hint)
        self._fields = [name for name in task.fields if not (task.places and name == ASKED)]
        for name in self._fields:
            self._required((name,), f" The prompt names it as {{{name}}}.")
        self._places = [self._required((place["column"],), " A place of the task names it.") for place in task.places]
        self._label_columns = (config.label_column,) if config.label_column else task.label_columns
        self._label_columns = () if task.places else self._label_columns
        self._label_column = next((name for name in self._label_columns if name in source.columns), None)
        others = set() if self._label_column or not task.labels or task.places else {*source.plain_columns}
        others -= {self._text_column, *task.fields}
        self._undeclared: dict[str, set[int | None]] = {name: set() for name in source.columns if name in others}
        self._bad = 0
        self._shown: list[str] = []

    def table(self) -> pa.Table:
        """All usable rows. They become Arrow in chunks: a million never exist as Python objects at once.

        Returns:
            One line per row.

        Raises:
            UserError: None is usable, or the column of labels that was asked for is missing.
        """
        types = {"source_row": pa.int64(), "text": pa.string(), "label": pa.int32(), "answer": pa.string()}
        schema = pa.schema(types | dict.fromkeys(_identity(self._task), pa.string()))
        examples = self.examples()
        chunks = iter(lambda: list(islice(examples, _CHUNK)), [])
        table = pa.Table.from_batches([pa.RecordBatch.from_pylist(chunk, schema) for chunk in chunks], schema)
        if not len(table):
            raise UserError(f"{self.source.name} has no usable example. {'; '.join(self._shown)}.")
        if self._config.label_column and self._label_column is None:
            self._required(self._label_columns, "")
        return table

    def dropped(self) -> list[str]:
        """What was left out."""
        more = "; ..." if self._bad > _SHOWN else ""
        return [f"{self._bad} bad examples ({'; '.join(self._shown)}{more})"] if self._bad else []

    def notes(self, table: pa.Table) -> list[str]:
        """What people should know who expect that their data have labels.

        Args:
            table: What `table` gave.

        Returns:
            Sentences.
        """
        if table[self._task.gold].null_count < len(table):
            return []
        if self._label_column is not None:
            why = f"Every value of its column {self._label_column!r} is empty or -1."
        else:
            likely = [name for name, labels in self._undeclared.items() if len(labels - {None}) > 1]
            but = f", but the values of {likely[0]!r} are labels of this task" if likely else ""
            name = likely[0] if likely else "NAME"
            hint = f"Use --label-column {name}, or label_columns: [{name}] in the task file."
            why = f"It has no column {' or '.join(map(repr, self._label_columns)) or 'for them'}{but}. {hint}"
        return [f"{self.source.name} has no labels that this task knows of, so there is no accuracy. {why}"]

    def _required(self, names: Sequence[str], hint: str) -> str:
        """The first of `names` that is a column."""
        name = next((name for name in names if name in self.source.columns), None)
        if name is None:
            expected = " or ".join(map(repr, names))
            raise UserError(f"{self.source.name} has no column {expected}. {self.source.describe_columns()}{hint}")
        return name

    def examples(self) -> Iterator[Row]:
        """Read the usable rows; to be called once.

        Yields:
            Number in the data, text, label or answer, and fields of a row.

        Raises:
            UserError: A row is not usable, and bad examples are not to be dropped.
        """
        wanted = {self._text_column, *self._label_columns, *self._fields, *self._places, *self._undeclared}
        for number, row in self.source.rows(wanted):
            try:
                example = {"source_row": number, **self._example(row)}
                yield from list(self._at_places(example, row)) if self._places else [example]
            except ValueError as error:
                message = f"{self.source.unit} {number}: {error}"
                if self._config.on_bad_example == "error":
                    hint = "(--on-bad-example drop leaves such examples out.)"
                    raise UserError(f"{self.source.name}, {message}. {hint}") from error
                self._bad += 1
                self._shown += [message] * (self._bad <= _SHOWN)

    def _example(self, row: Row) -> dict[str, str | int | None]:
        """Text, label or answer, and fields of one row; ValueError says what is wrong with it."""
        text = row.get(self._text_column)
        if not isinstance(text, str):
            kind = "missing" if text is None else f"{type(text).__name__}, not text"
            raise ValueError(f"the value of {self._text_column!r} is {kind}")
        if not text.strip():
            raise ValueError(f"the text in {self._text_column!r} is empty")
        if self._label_column is None:
            # JSON records may leave the label out, so the first record that has one decides which column it is
            self._label_column = next((name for name in self._label_columns if name in row), None)
            self._look_for_labels(row)
        value = None if self._label_column is None else row.get(self._label_column)
        gold = answer_text(value) if self._task.gold == "answer" else self._labels.read(value)
        fields = {FIELD + name: scalar_text(row.get(name)) for name in self._fields}
        for name, field in fields.items():
            if field is None:
                raise ValueError(f"the value of {name.removeprefix(FIELD)!r} is missing")
        if not all(is_text(part) for part in (text, *fields.values(), gold) if isinstance(part, str)):
            raise ValueError("there is half of a surrogate pair in it, which no UTF-8 file can hold")
        return {"text": text, self._task.gold: gold, **fields}

    def _at_places(self, example: Row, row: Row) -> Iterator[Row]:
        """An example for each place, with the right answers of those before it; so a missing one ends them."""
        asked, labels = "", self._task.labels
        for place in self._task.places:
            label, asked = self._labels.read(row.get(place["column"])), asked + place["ask"]
            if label is not None and labels[label] not in place["labels"]:
                raise ValueError(f"{place['column']!r} is {labels[label]!r}, which is no answer to {place['ask']!r}")
            yield example | {"label": label, FIELD + ASKED: asked}
            if label is None:
                return
            asked += f" {labels[label]}"

    def _look_for_labels(self, row: Row) -> None:
        """Note which labels the columns hold that are not declared; one with anything else is no label column."""
        for name in list(self._undeclared):
            try:
                self._undeclared[name].add(self._labels.read(row.get(name)))
            except ValueError:
                del self._undeclared[name]


def _identity(task: Task) -> list[str]:
    """The columns that make the prompt: two examples that agree in them are duplicates."""
    return ["text", *(FIELD + name for name in task.fields)]


def _first_of_each(table: pa.Table) -> Array:
    """Positions of the first occurrence of every distinct row, in order."""
    numbered = table.append_column("row", pa.array(np.arange(len(table))))
    return np.sort(numbered.group_by(table.column_names).aggregate([("row", "min")])["row_min"].to_numpy())


def _shuffled(count: int, seed: int) -> Array:
    """A random order. From the raw bits of PCG64, which NumPy keeps the same for ever, unlike its `permutation`."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def _few_shot(task: Task, config: DataConfig, table: pa.Table, dropped: list[str]) -> tuple[Before, pa.Table]:
    """What stands before every question, and the examples without the worked ones in it."""
    if config.few_shot and task.answers == "classes":
        raise UserError("A classifier takes no few-shot examples. Leave out --few-shot.")
    worked = list(_draw(task, config, table)) if config.few_shot else task.few_shot
    rest = table
    for example in worked:  # duplicates go too: none should meet its own answer in the prefix
        same = [pc.not_equal(rest[name], example[name.removeprefix(FIELD)]) for name in _identity(task)]
        rest = rest.filter(functools.reduce(pc.or_, same))
    if len(rest) < len(table):
        dropped.append(f"{len(table) - len(rest)} examples that are in the few-shot prefix")
    if not len(rest):
        raise UserError("Every example is in the few-shot prefix, none is left; choose a smaller --few-shot.")
    return task.before(worked), rest


def _draw(task: Task, config: DataConfig, table: pa.Table) -> Iterator[dict[str, str]]:
    """`config.few_shot` random labelled examples, in the order drawn."""
    labelled = table.filter(pc.is_valid(table[task.gold]))
    if config.few_shot > len(labelled):
        few = f"only {len(labelled)} examples have a label; draw fewer of them."
        raise UserError(f"--few-shot is {config.few_shot}, but {few}")
    for row in labelled.take(_shuffled(len(labelled), config.few_shot_seed)[: config.few_shot]).to_pylist():
        label = task.labels[row["label"]] if task.labels else row["answer"]
        yield {"text": row["text"], "label": label, **{name: row[FIELD + name] for name in task.fields}}


class Labels:
    """Reads the labels of one task.

    In this order, a label is what `label_map` says, an answer text as it stands, the same up to case and underscores,
    or the number of an answer counted from 0. Numbers do not count where answers are numbers themselves (1 to 5 stars
    would be off by one without anybody noticing) or where the task says that they do not.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._numbers = task.label_numbers and not any(_NUMBER.fullmatch(label) for label in task.labels)
        self._exact = {label: index for index, label in enumerate(task.labels)}
        self._exact |= {key: self._exact[label] for key, label in task.label_map.items()}
        self._loose: dict[str, set[int]] = defaultdict(set)
        for text, index in self._exact.items():
            self._loose[_loose(text)].add(index)

    def read(self, value: Any) -> int | None:
        """Find the answer that a label in the data names.

        Args:
            value: The label, as JSON holds it.

        Returns:
            Index into the task's labels; None for null, an empty text and -1, which stand for no label.

        Raises:
            ValueError: It names no answer, or may mean several; the message says so.
        """
        text, labels = scalar_text(value), self._task.labels
        if text is None or not text.strip():
            return None
        meanings = {self._exact[text]} if text in self._exact else self._loose.get(_loose(text), set())
        if len(meanings) == 1:
            return min(meanings)
        if meanings:
            both = " and ".join(repr(labels[index]) for index in sorted(meanings))
            raise ValueError(f"the label {cut(text, 60)!r} may mean {both}; write it exactly, or use label_map")
        number = _NUMBER.fullmatch(text.strip())
        if number and int(number[1]) == -1:  # how GLUE marks a test set whose labels are not public
            return None
        if number and self._numbers and 0 <= int(number[1]) < len(labels):
            return int(number[1])
        known = ", ".join(labels[:10]) + (f", ... ({len(labels)} in all)" if len(labels) > 10 else "")
        why = " (this task's labels are not numbered)" if number and not self._numbers else ""
        hint = "Map others with label_map in a task file"
        raise ValueError(f"unknown label {cut(text, 60)!r}{why}; known are {known}. {hint}")


def scalar_text(value: Any) -> str | None:
    """Write a JSON scalar as text.

    Args:
        value: Any JSON value.

    Returns:
        The text; None for null and not-a-number.

    Raises:
        ValueError: It is a list or an object.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python refuses to write out integers of thousands of digits
        return str(value) if value.bit_length() < 10_000 else hex(value)
    if isinstance(value, float):
        return None if value != value else str(int(value)) if value.is_integer() else str(value)
    raise ValueError(f"expected a text or a number, found {type(value).__name__}")


def answer_text(value: Any) -> str | None:
    """Find the right answer of an open question.

    Args:
        value: A text, a list that begins with it, or an object with a `value`, as TriviaQA has it.

    Returns:
        The answer; None where there is none.
    """
    if isinstance(value, dict) and "value" in value:
        value = value["value"]
    if isinstance(value, list):
        value = value[0] if value else None
    text = scalar_text(value)
    return text if text and text.strip() else None


def _loose(text: str) -> str:
    return " ".join(text.replace("_", " ").split()).casefold()
