"""What annotators are told before the groups."""

from __future__ import annotations

import pytest

from npeff.store.schema import AskedTask
from npeff.study.preamble import about_task
from npeff.tasks.config import BUILTIN
from npeff.tasks.task import load_task
from npeff.utils.errors import UserError


def test_every_built_in_task_is_described() -> None:
    for name in BUILTIN:
        task = load_task(name)
        said = about_task(AskedTask(name, task.prompt, labels=list(task.labels)))
        assert said.startswith("The texts are ")
        assert "{" not in said
        assert ("Politics & Government" in said) == (name == "yat")
    own = about_task(AskedTask("tickets", "Ticket: {text}\nUrgent:", labels=["Yes", "No"]))
    assert "Ticket: [text] Urgent:" in own
    assert "Yes, No" in own
    assert "3 answers" not in about_task(AskedTask("q", "{text}"))


def test_rows_from_elsewhere_need_a_description() -> None:
    with pytest.raises(UserError, match="--about"):
        about_task(AskedTask())
