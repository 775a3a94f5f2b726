"""A task: which prompt a model sees, which answers it chooses between, and where the examples come from.

The built-in tasks are YAML files in `builtin`, written the way a user writes one; see docs/tasks.md.
"""

import dataclasses
import os
import re
import string
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from npeff.tasks.config import BUILTIN, DataConfig
from npeff.utils import Record, UserError, did_you_mean, is_text

LARGEST = 1_000_000
"""Bytes that a task file may have; reading YAML takes a minute for a hundred times as many."""

Answers = Literal["tokens", "suffixes", "vocabulary", "classes", "generated"]
Turns = tuple[dict[str, str], ...]
"""Turns of a conversation, each a role (system, user or assistant) with what it says."""
Before = tuple[str, Turns]
"""What stands before every example's own question: text of a plain prompt, turns of a chat; one of them is empty."""
ASKED = "asked"
"""Column of what stands behind the prompt, in a task that asks at several places: answers so far, and what is asked."""
_ROLES = ("system", "user", "assistant")
_TEXTS = ("labels", "text_columns", "label_columns")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(_TEXTS, (tuple, "a list of texts")),
    "few_shot": (tuple, "a list of mappings with text and label"),
    "places": (tuple, "a list of mappings with ask, column and labels"),
    "label_map": (dict, "a mapping from labels in the data to answer texts"),
    **dict.fromkeys(("label_numbers", "positions"), (bool, "true or false")),
    "chat": ((bool, tuple), "true, false, or a list of turns, as `- system: You are a critic.`"),
}
"""Keys of a task that are not one text → what they are, in Python and in words."""


class Task(Record):
    """What is asked of a model. Checked when made: a task that exists can be used."""

    name: str
    """What the task is called in messages and run directories."""
    prompt: str
    """Template with {text} and, if wanted, other {column} names of the data; a literal brace is written twice."""
    answers: Answers
    """tokens: the first token of each label; suffixes: each whole label; vocabulary: every next token; classes: those
    of a classifier; generated: continuations that the model itself writes."""
    labels: tuple[str, ...] = ()
    """Answer texts, in order, without the leading space they are scored with; none for vocabulary. Classes have the
    names that the model gives them, if there are none here."""
    data: str | None = None
    """Default data: a Hub id, a path, embedded:reviews, or embedded:imdb."""
    config: str | None = None
    """Configuration name of the default data on the Hub."""
    split: str | None = None
    """Split of the default data, in the split syntax of `datasets`."""
    text_columns: tuple[str, ...] = ("text",)
    """Where the text is: the first of these columns that the data have."""
    label_columns: tuple[str, ...] = ("label",)
    """Where the label (or, for vocabulary, the right answer) is: the first of these that the data have, if any."""
    label_map: dict[str, str] = field(default_factory=dict)
    """Label in the data -> answer text, where they differ by more than case and underscores."""
    label_numbers: bool = True
    """Whether a whole number in the data counts the labels from 0; false where data sets number them differently."""
    few_shot: tuple[dict[str, str], ...] = ()
    """Fixed worked examples before every prompt: `text`, `label`, and the other columns of the prompt."""
    chat: bool | Turns = False
    """Whether the prompt is a user's turn, rendered by the model's own chat template; or the turns before that one."""
    answer_start: str = ""
    """Chat only: how the assistant's turn begins, before the answer."""
    positions: bool = False
    """Vocabulary only: texts are running documents, and an example is a position in one, as --every and others say."""
    places: tuple[dict[str, Any], ...] = ()
    """What is asked one after another behind the prompt; each place is an example, which is told the right answers of
    those before it: `ask` (a text), `column` (where the right answer is), `labels` (answers to choose between)."""
    pair: str = ""
    """Classes only: template of a second text, for models that take pairs of texts, as {hypothesis}."""

    def __post_init__(self) -> None:
        for name in _KINDS:
            if isinstance(getattr(self, name), list):  # YAML has no tuples, and in Python a list is as clear
                object.__setattr__(self, name, tuple(getattr(self, name)))
        try:
            if self.places:
                for mistake in chain(_wrong_types(self), _wrong_places(self)):
                    raise ValueError(mistake)
                every = tuple(dict.fromkeys(label for place in self.places for label in place["labels"]))
                if self.labels not in ((), every):
                    raise ValueError("labels are those of the places; leave them out.")
                object.__setattr__(self, "labels", every)
            for mistake in _mistakes(self):
                raise ValueError(mistake)
        except ValueError as error:  # from `_template`, too
            name = self.name if isinstance(self.name, str) else "?"
            raise UserError(f"Task {name!r}: {error}") from error

    @property
    def gold(self) -> str:
        """Column of the examples with what is right: an answer for vocabulary, or else a label."""
        return "answer" if self.is_open else "label"

    @property
    def is_open(self) -> bool:
        """Whether answers are not those of a list."""
        return self.answers in ("vocabulary", "generated")

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns other than `text` that the prompt names, or the second text."""
        parts = _template(self._whole) + _template(self.pair)
        return tuple(dict.fromkeys(name for _, name in parts if name and name != "text"))

    def render(self, text: str, fields: Mapping[str, str] = {}) -> str:
        """The prompt for one example, up to where the answer begins."""
        return self._fill(self._whole, text, fields)

    @property
    def _whole(self) -> str:
        return self.prompt + (f"{{{ASKED}}}" if self.places else "")

    def answers_at(self, asked: str) -> list[int]:
        """Which labels may follow.

        Args:
            asked: What stands behind the prompt.

        Returns:
            Numbers of the labels of the place that is asked last.
        """
        place = next(place for place in self.places if asked.endswith(place["ask"]))
        return [self.labels.index(label) for label in place["labels"]]

    def render_pair(self, text: str, fields: Mapping[str, str] = {}) -> str:
        """The second text of one example; empty where there is none."""
        return self._fill(self.pair, text, fields)

    def _fill(self, template: str, text: str, fields: Mapping[str, str]) -> str:
        values = {**fields, "text": text, "": ""}
        return "".join(literal + values[name] for literal, name in _template(template))

    @property
    def is_chat(self) -> bool:
        """Whether the model's chat template is used."""
        return self.chat is not False

    def before(self, worked: Iterable[Mapping[str, str]] = ()) -> Before:
        """What stands before every question.

        Args:
            worked: Worked examples: `text`, `label`, and the other columns of the prompt.

        Returns:
            Of a chat, its fixed turns and two for each example; else for each the prompt, its answer, a blank line.
        """
        asked = [(self.render(example["text"], example), example["label"]) for example in worked]
        if not self.is_chat:
            return "".join(f"{prompt} {answer}\n\n" for prompt, answer in asked), ()
        fixed, start = () if isinstance(self.chat, bool) else self.chat, self.answer_start
        start += self.gap if start else ""
        return "", (*fixed, *(turn for prompt, a in asked for turn in ({"user": prompt}, {"assistant": start + a})))

    @property
    def gap(self) -> str:
        """What stands before an answer: a space, unless the beginning of the assistant's turn brings white space."""
        return "" if self.answer_start.endswith("\n") else " "

    def text_start(self, fields: Mapping[str, str] = {}) -> int:
        """Where in the prompt an example's text begins.

        Args:
            fields: Other columns that the prompt names.

        Returns:
            The number of characters before it.
        """
        before = ""
        for literal, name in _template(self.prompt):
            before += literal
            if name == "text":
                break
            before += fields.get(name, "")
        return len(before)


def load_task(name_or_path: str) -> Task:
    """Read a task.

    Args:
        name_or_path: Name of a built-in task, or path of a YAML file. Data that lie beside that file are found,
            whatever directory the command runs in.

    Returns:
        The task.

    Raises:
        UserError: There is no such task, or something is wrong with its file.
    """
    if name_or_path in BUILTIN:
        source = resources.files("npeff") / "tasks" / "builtin" / f"{name_or_path}.yaml"
        return task_from_yaml(source.read_text(encoding="utf-8"), name_or_path, name_or_path)
    path = Path(name_or_path)
    try:
        content = path.read_bytes()
        if len(content) > LARGEST:
            raise UserError(f"{name_or_path} has {len(content)} bytes; a task file has at most {LARGEST}.")
        task = task_from_yaml(content.decode("utf-8-sig"), path.stem, name_or_path)
    except UnicodeDecodeError as error:
        raise UserError(f"{name_or_path}: byte {error.start} is not UTF-8. Save the task file as UTF-8.") from error
    except (OSError, ValueError) as error:
        if path.suffix.lower() in (".yaml", ".yml") and not isinstance(error, FileNotFoundError):
            raise UserError(f"Cannot read the task file {name_or_path!r}: {error}.") from error
        why = f"neither a built-in task ({', '.join(BUILTIN)}) nor a YAML file that exists"
        hint = did_you_mean(name_or_path.lower(), BUILTIN)
        raise UserError(f"Unknown task {name_or_path!r}: {why}.{hint}") from error
    beside = path.parent / (task.data or "")
    # unlike Path.is_file, false for a name too long or with a NUL in it
    return dataclasses.replace(task, data=str(beside)) if os.path.isfile(beside) else task  # noqa: PTH113


def asked_task(config: DataConfig) -> Task:
    """The task that a config names; as a chat, or not as one, if the config says so."""
    task = load_task(config.task)
    if config.no_chat:
        return dataclasses.replace(task, chat=False, answer_start="")
    return dataclasses.replace(task, chat=True) if config.chat and not task.is_chat else task


def task_from_yaml(text: str, name: str, source: str) -> Task:
    """Make a task from the text of a YAML file.

    Args:
        text: Content of the file.
        name: Name of the task, if the file gives none.
        source: What messages call the file.

    Returns:
        The task.

    Raises:
        UserError: The text is no YAML or no task; the message says what to write instead.
    """
    try:
        values = yaml.load(text, _StrictLoader)
    except Exception as error:
        # PyYAML lets built-in exceptions of every kind through when a scalar is malformed (an impossible date, say)
        raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise UserError(f"{source}: a task file is a mapping with prompt, answers and labels, see docs/tasks.md.")
    known = [field.name for field in dataclasses.fields(Task)]
    unknown = ", ".join(repr(key) for key in values if key not in known)
    if unknown:
        raise UserError(f"{source}: unknown key {unknown}; a task knows {', '.join(known)}.")
    if values.get("answers") == "classes":
        values.setdefault("prompt", "{text}")
    missing = [key for key in ("prompt", "answers") if values.get(key) is None]
    if missing:
        raise UserError(f"{source}: {' and '.join(missing)} missing; see docs/tasks.md.")
    # a key without a value stands for the default
    given = {"name": name, **{key: value for key, value in values.items() if value is not None}}
    try:
        return Task(**given)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """Safe, and a key that is given twice is an error instead of the last one winning.

    So are aliases: nobody needs them here, and a few lines of them can stand for a gigabyte.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", self.get_mark())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            twice = [key for key, count in counts.items() if count > 1]
            if twice:
                raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_COLUMN = re.compile(r"(?!\s)[^.\[\]{}]+(?<!\s)")
"""What may stand in the braces of a prompt."""


@lru_cache(maxsize=256)
def _template(prompt: str) -> tuple[tuple[str, str], ...]:
    """A prompt as (literal text, name of the column that follows) pairs; the name is empty where none follows."""
    parts: list[tuple[str, str]] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(prompt):
            if spec or conversion or (name is not None and not _COLUMN.fullmatch(name)):
                raise ValueError(f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}")
            parts.append((literal, name or ""))
    except ValueError as error:
        hint = "write {text} or {column}, and a literal brace twice."
        raise ValueError(f"the prompt is not a valid template ({error}); {hint}") from error
    return tuple(parts)


def _mistakes(task: Task) -> Iterator[str]:
    """What is wrong with `task`, and what to write instead. Each check counts on those before it."""
    yield from _wrong_types(task)
    if "text" not in (name for _, name in _template(task.prompt)):
        yield "the prompt has no {text}; that is where the example's text goes."
    if task.prompt != task.prompt.rstrip():
        hint = "Remove it (a YAML block starts with |-); instead of a chat template, write `chat: true`."
        yield f"the prompt ends with white space, but answers bring their own. {hint}"
    if task.answer_start.rstrip("\n") != task.answer_start.rstrip():
        yield "answer_start ends with white space, but answers bring their own. Remove it, or end with a newline."
    if task.answer_start and not task.is_chat:
        yield "answer_start belongs to a chat (chat: true); what a plain prompt ends with is written in the prompt."
    for number, turn in enumerate(() if isinstance(task.chat, bool) else task.chat, 1):
        if len(turn) != 1 or not set(turn) <= set(_ROLES):
            yield f"turn {number} of chat should have one of {', '.join(_ROLES)}, as `- system: You are a critic.`"
    if task.answers not in get_args(Answers):
        yield f"answers is {task.answers!r}; it should be one of {', '.join(get_args(Answers))}."
    if task.is_open and (task.labels or task.label_map):
        what = "every next token" if task.answers == "vocabulary" else "what the model writes"
        yield f"answers: {task.answers} takes {what} as an answer; leave out labels and label_map."
    if task.answers == "classes" and (task.is_chat or task.few_shot):
        yield "a classifier (answers: classes) takes neither a chat nor few-shot examples; leave them out."
    if task.positions and (task.answers != "vocabulary" or task.prompt != "{text}" or task.is_chat or task.few_shot):
        yield 'positions of documents need `prompt: "{text}"` and `answers: vocabulary`, and neither chat nor few_shot.'
    if task.pair and task.answers != "classes":
        yield "pair is for classifiers (answers: classes); in a prompt, write both texts."
    named_by_model = task.answers == "classes" and not task.labels
    if not task.is_open and not named_by_model and len(task.labels) < 2:
        count = "only one label" if task.labels else "no labels"
        yield f"{count}; a model needs at least two answers to choose between (or answers: vocabulary)."
    if not task.text_columns:
        yield "text_columns is empty; name the column with the text."
    for label in task.labels:
        if not label.strip() or label != label.strip():
            yield f"label {label!r} is empty or has space around it; the leading space is added for you."
        if task.labels.count(label) > 1:
            yield f"label {label!r} is given twice."
    for key, label in task.label_map.items():
        if label not in task.labels and not named_by_model:
            yield f"label_map gives {label!r} for {key!r}, which is not one of the labels."
    wanted = {"text", "label", *task.fields}
    for number, example in enumerate(task.few_shot, 1):
        if set(example) != wanted:
            yield f"few_shot example {number} should have {', '.join(sorted(wanted))}, nothing else."
        if task.labels and example["label"] not in task.labels:
            yield f"few_shot example {number} has the label {example['label']!r}, not one of the labels."


def _wrong_places(task: Task) -> Iterator[str]:
    """What is wrong with the places that a task asks at."""
    if task.answers not in ("tokens", "suffixes") or task.is_chat or task.few_shot:
        yield "several places need `answers: tokens` or `answers: suffixes`, and neither chat nor few_shot."
    for number, place in enumerate(task.places, 1):
        ask, labels = place.get("ask"), place.get("labels")
        if set(place) != {"ask", "column", "labels"} or not isinstance(labels, list) or len(labels) < 2:
            yield f"place {number} should have ask, column and at least two labels, nothing else."
        elif not all(isinstance(text, str) and text.strip() for text in (ask, place["column"], *labels)):
            yield f"place {number} has an ask, a column or a label that is no text; put it in quotes."
        elif ask != str(ask).rstrip():
            yield f"place {number} asks with white space at the end, but answers bring their own. Remove it."
        elif any(str(ask).endswith(str(other.get("ask"))) for other in task.places if other is not place):
            yield f"place {number} ends with what another one asks, so that they cannot be told apart."


def _wrong_types(task: Task) -> Iterator[str]:
    """Fields without the type that they declare; YAML reads unquoted yes, no and 1 as something else than text."""
    turns = task.chat if isinstance(task.chat, tuple) else ()
    mappings = {"few_shot": task.few_shot, "chat": turns, "places": task.places}
    for name, (kind, words) in _KINDS.items():
        value = getattr(task, name)
        if not isinstance(value, kind) or not all(isinstance(item, dict) for item in mappings.get(name, ())):
            yield f"{name} is {value!r}; it should be {words}."
    fields = dataclasses.fields(task)
    texts = [(f.name, v) for f in fields if f.name not in _KINDS and (v := getattr(task, f.name)) is not f.default]
    texts += [(name, item) for name in _TEXTS for item in getattr(task, name)]
    texts += [("label_map", item) for pair in task.label_map.items() for item in pair]
    texts += [(name, item) for name, each in mappings.items() for one in each for item in (*one, *one.values())]
    yield from (
        f"{name} has {item!r}, which is not text; put it in quotes."
        for name, item in texts
        if not is_text(item) and not (name == "places" and isinstance(item, list))
    )
