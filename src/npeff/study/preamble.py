"""What is said to annotators, people and judges alike, before the groups."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml

from npeff.store.schema import AskedTask
from npeff.study.kit import Sample
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError

_LISTED = 20
"""Answers of a task that are all listed; of more than these a few are."""


@dataclass(frozen=True)
class Texts:
    """The content of form/texts.yaml."""

    preamble: tuple[str, ...]
    """Paragraphs, with {size} and {about} to be filled in."""
    about: dict[str, str]
    """Built-in task → what its texts are, with {labels} and {count} to be filled in."""
    samples: tuple[Sample, ...]
    """Worked samples for a kit whose maker gives none."""


TEXTS = from_dict(Texts, yaml.safe_load((resources.files("npeff") / "study/form/texts.yaml").read_text("utf-8")))


def about_task(task: AskedTask) -> str:
    """What the texts of a run are.

    Args:
        task: The task as the run's manifest has it.

    Returns:
        A sentence or two.

    Raises:
        UserError: The run has no task that says it.
    """
    if not task.prompt:
        raise UserError("The run has no task that says what its texts are: say it with --about.")
    labels = task.labels
    listed = ", ".join(labels if len(labels) <= _LISTED else labels[:3])
    if task.name in TEXTS.about:
        return TEXTS.about[task.name].replace("{labels}", listed).replace("{count}", str(len(labels)))
    prompt = " ".join(task.prompt.replace("{text}", "[text]").split())
    sentence = f"The texts belong to the task “{task.name}”. A language model sees each of them as: {prompt}"
    if not labels:
        return sentence
    choice = f"{len(labels)} answers, such as" if len(labels) > _LISTED else "these answers:"
    return f"{sentence} It chooses one of {choice} {listed}."


def preamble(about: str, size: int) -> tuple[str, ...]:
    """All paragraphs before the samples."""
    return tuple(text.replace("{size}", str(size)).replace("{about}", about) for text in TEXTS.preamble)
