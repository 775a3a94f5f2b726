"""What a label in the data means: which of a task's answers it names."""

from __future__ import annotations

import re
from typing import Any

from npeff.tasks.task import Task
from npeff.utils.text import cut

_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")


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
        self._loose: dict[str, set[int]] = {}
        for text, index in self._exact.items():
            self._loose.setdefault(_loose(text), set()).add(index)

    def read(self, value: Any) -> int | None:
        """Find the answer that a label in the data names.

        Args:
            value: The label, as JSON holds it.

        Returns:
            Index into the task's labels; None for null, an empty text and -1, which stand for no label.

        Raises:
            ValueError: It names no answer, or may mean several; the message says so.
        """
        text = scalar_text(value)
        if text is None or not text.strip():
            return None
        if text in self._exact:
            return self._exact[text]
        meanings = self._loose.get(_loose(text), set())
        if len(meanings) > 1:
            both = " and ".join(repr(self._task.labels[index]) for index in sorted(meanings))
            raise ValueError(f"the label {cut(text, 60)!r} may mean {both}; write it exactly, or use label_map")
        if meanings:
            return next(iter(meanings))
        number = _NUMBER.fullmatch(text.strip())
        if number:
            index = int(number[1])
            if index == -1:  # how GLUE marks a test set whose labels are not public
                return None
            if self._numbers and 0 <= index < len(self._task.labels):
                return index
        labels = self._task.labels
        known = ", ".join(labels[:10]) + (f", ... ({len(labels)} in all)" if len(labels) > 10 else "")
        why = " (this task's labels are not numbered)" if number and not self._numbers else ""
        raise ValueError(
            f"unknown label {cut(text, 60)!r}{why}; known are {known}. Map others with label_map in a task file"
        )


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
        if value != value:
            return None
        return str(int(value)) if value.is_integer() else str(value)
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
