"""What makes two collections the same, and how two of them differ."""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from npeff.collect.config import CollectConfig
from npeff.models.load import LoadedModel
from npeff.models.prompts import Prompts
from npeff.store.schema import AskedChat, AskedTask
from npeff.tasks.task import Before, Task
from npeff.utils import to_dict

Values = dict[str, Any]
"""A config or an identity, as nested JSON values."""
_HOW = ("run", "batch_tokens", "share_prompt", "dry_run", "fisher", "gradient", "activation")
"""Options that say where and how fast to collect, or are summed up in `collected`."""
PLACES = ("data.data", "model.model", "model.revision", "model.adapter")
"""Entries that say where data and model lie. They may have moved: hashes tell whether they are the same."""


def identity_of(config: CollectConfig, task: Task, model: LoadedModel, before: Before) -> Values:
    """All that decides about the values of a collection, wherever and however fast it runs.

    Args:
        config: What is collected.
        task: The task, whose file may change under the same name.
        model: The model, known by the hash of its weights.
        before: What stands before every question, as few-shot examples.

    Returns:
        Nested JSON values.
    """
    values = to_dict(config)
    values["model"].pop("device")
    values["model"].pop("device_map")
    values["model"].pop("tensor_parallel")
    for name in ("chat", "no_chat"):  # the task says it
        values["data"].pop(name)
    unused = {"positions": not task.positions, "samples": task.answers != "generated"}
    for name in (*_HOW, *(name for name, without in unused.items() if without)):
        values.pop(name)
    prefix, turns = before
    chat = AskedChat(Prompts(task, model.tokenizer).describe(before), list(turns)) if task.is_chat else None
    shown = (task.pair or None, list(task.places) or None)
    asked = AskedTask(task.name, task.prompt, task.answers, list(task.labels), prefix, chat, *shown)
    return values | {"task": to_dict(asked), "collected": config.collected, "model_sha256": model.fingerprint()}


def differences(old: Values, new: Values, but: Collection[str] = ()) -> str:
    """The first differing entries of two nested dictionaries, for people to read; empty if there are none.

    Entries that `but` names (as "a.b") do not count.
    """
    some = islice(changes(old, new, but), 5)
    return "; ".join(f"{name} was {brief(before)} and is now {brief(now)}" for name, before, now in some)


def changes(old: Values, new: Values, but: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Differing entries of two nested dictionaries.

    Args:
        old: The one.
        new: The other.
        but: Entries to pass over, as "a.b".
        prefix: Where the dictionaries lie in larger ones, as "a.".

    Yields:
        (name, old value, new value) of each.
    """
    for name in sorted({*old, *new}):
        before, now, whole = old.get(name), new.get(name), prefix + name
        if isinstance(before, dict) and isinstance(now, dict) and whole not in but:
            yield from changes(before, now, but, f"{whole}.")
        elif before != now and whole not in but:
            yield whole, before, now


def brief(value: Any) -> str:
    """A value of a config, not too long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"
