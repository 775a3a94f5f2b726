"""A kit is a directory: what annotators see, and apart from it the key that says which group is which.

KIT/form.pdf, form.html    the form (form-1.pdf, form-2.pdf, ... where there are several)
KIT/groups.json            what the forms show, for programs
KIT/key/key.json           which component each group is from, and how the kit was made
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npeff.utils.errors import UserError
from npeff.utils.files import read_json

FORMAT = 1
GROUPS = "groups.json"
KEY = "key/key.json"


@dataclass(frozen=True)
class Group:
    """Texts that an annotator judges together."""

    number: int
    """Counts from 1 through all forms of a kit."""
    form: int
    """Counts from 1."""
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """A group with its answer, to show what is meant."""

    texts: tuple[str, ...]
    theme: str
    words: str


@dataclass(frozen=True)
class Kit:
    """What annotators see, and nothing more."""

    preamble: tuple[str, ...]
    """Paragraphs: what the texts are, what to do."""
    samples: tuple[Sample, ...]
    groups: tuple[Group, ...]

    @property
    def id(self) -> str:
        """Names the kit by its content, so that no answers are scored with another one's key."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def forms(self) -> list[int]:
        """Numbers of the forms."""
        return sorted({group.form for group in self.groups})

    def of_form(self, form: int) -> list[Group]:
        """The groups of one form, in order."""
        return [group for group in self.groups if group.form == form]

    def form_name(self, form: int) -> str:
        """File name of a form, without its ending."""
        return "form" if len(self.forms) == 1 else f"form-{form}"

    def to_json(self) -> dict[str, Any]:
        """The content of groups.json."""
        return {"format": FORMAT, "kit": self.id, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class KeyEntry:
    """Where a group is from."""

    number: int
    decomposition: str | None
    """None for a control group of random examples."""
    component: int | None
    examples: tuple[int, ...]
    """Rows of the run's example table, in the order in which they are shown."""


@dataclass(frozen=True)
class Key:
    """Where all groups are from."""

    kit: str
    run: str
    """Fingerprint of the run."""
    decompositions: dict[str, str]
    """Name → hash of the tensors."""
    groups: tuple[KeyEntry, ...]


def read_kit(path: str | Path) -> Kit:
    """The kit in a directory, as annotators see it."""
    file = Path(path) / GROUPS
    if not file.is_file():
        raise UserError(f"{path} is not an evaluation kit: it has no {GROUPS}. `npeff evalkit make` makes one.")
    values = _checked(file)
    try:
        kit = Kit(
            preamble=tuple(str(text) for text in values["preamble"]),
            samples=tuple(_sample(sample) for sample in values["samples"]),
            groups=tuple(_group(group) for group in values["groups"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}). Make the kit again.") from error
    if kit.id != values.get("kit"):
        raise UserError(f"{file} was changed: its content is not what the forms show. Make the kit again.")
    return kit


def read_key(path: str | Path, kit: Kit) -> Key:
    """The key of `kit`, from the kit's directory."""
    file = Path(path) / KEY
    if not file.is_file():
        raise UserError(f"{path} has no {KEY}. Put the key that `npeff evalkit make` wrote back in its place.")
    values = _checked(file)
    try:
        key = Key(
            kit=str(values["kit"]),
            run=str(values["run"]),
            decompositions=dict(values["decompositions"]),
            groups=tuple(KeyEntry(**{**entry, "examples": tuple(entry["examples"])}) for entry in values["groups"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}). Make the kit again.") from error
    if key.kit != kit.id or [e.number for e in key.groups] != [g.number for g in kit.groups]:
        raise UserError(f"{file} is the key of another kit.")
    return key


def _checked(file: Path) -> dict[str, Any]:
    values = read_json(file)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{file} is not of format {FORMAT}, the one that this npeff reads.")
    return values


def _sample(values: dict[str, Any]) -> Sample:
    return Sample(tuple(values["texts"]), str(values["theme"]), str(values["words"]))


def _group(values: dict[str, Any]) -> Group:
    return Group(int(values["number"]), int(values["form"]), tuple(values["texts"]))
