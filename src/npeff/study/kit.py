"""A kit is a directory: what annotators see, and apart from it the key that says which group is which.

KIT/form.pdf, form.html    the form (form-1.pdf, form-2.pdf, ... where there are several)
KIT/groups.json            what the forms show, for programs: a `Kit`
KIT/key/key.json           which component each group is from, and how the kit was made: a `Key`
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from npeff.utils.configs import read_record, to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.version import __version__

FORMAT = 1
GROUPS = "groups.json"
KEY = "key/key.json"
INSTALL = "PDF forms need reportlab and pypdf: pip install 'npeff[study]'."


@dataclass(frozen=True)
class Group:
    """Texts that an annotator judges together."""

    number: int
    """Counts from 1 through all forms of a kit."""
    form: int
    """Number of its form, from 1."""
    texts: tuple[str, ...]
    """What is shown."""


@dataclass(frozen=True)
class Sample:
    """A group with its answer, to show what is meant."""

    texts: tuple[str, ...]
    """What is shown."""
    theme: str
    """The answer: yes, maybe or no."""
    words: str
    """The theme in a few words; empty for `no`."""


@dataclass(frozen=True)
class Kit:
    """What annotators see, and nothing more."""

    preamble: tuple[str, ...]
    """Paragraphs: what the texts are, what to do."""
    samples: tuple[Sample, ...]
    """Groups with their answers, shown first."""
    groups: tuple[Group, ...]
    """The groups of all forms, in order."""
    kit: str = ""
    """The kit's id as the file has it."""
    format: int = FORMAT
    """Version of the layout of this file."""

    @property
    def id(self) -> str:
        """Names the kit by its content, so that no answers are scored with the key of another kit."""
        content = to_dict(self)
        shown = {name: content[name] for name in ("preamble", "samples", "groups")}
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:12]

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

    def write(self, path: Path) -> None:
        """Write groups.json into the directory of the kit."""
        write_record(path / GROUPS, replace(self, kit=self.id))


@dataclass(frozen=True)
class KeyEntry:
    """Where a group is from."""

    number: int
    """Number of the group."""
    decomposition: str | None
    """Name of the decomposition; None for a control group of random examples."""
    component: int | None
    """The component whose top examples these are; None for a control group."""
    examples: tuple[int, ...]
    """Rows of the run's example table, in the order in which they are shown."""


@dataclass(frozen=True)
class Key:
    """Where all groups are from."""

    kit: str
    """Id of the kit."""
    run: str
    """Fingerprint of the run."""
    decompositions: dict[str, str]
    """Name → hash of the tensors."""
    groups: tuple[KeyEntry, ...]
    """In the order of the kit's groups."""
    config: dict[str, Any]
    """Options of `npeff study make`, without the directory of the kit."""
    npeff: str = __version__
    """Version that made the kit."""
    format: int = FORMAT
    """Version of the layout of this file."""


def read_kit(path: str | Path) -> Kit:
    """The kit in a directory, as annotators see it.

    Args:
        path: Directory of the kit.

    Returns:
        The kit.

    Raises:
        UserError: There is none, or it was changed since the forms were made.
    """
    file = Path(path) / GROUPS
    if not file.is_file():
        raise UserError(f"{path} is not the kit of a study: it has no {GROUPS}. `npeff study make` makes one.")
    kit = _read(Kit, file)
    if kit.id != kit.kit:
        raise UserError(f"{file} was changed: its content is not what the forms show. Make the kit again.")
    return kit


def read_key(path: str | Path, kit: Kit) -> Key:
    """The key of a kit.

    Args:
        path: Directory of the kit.
        kit: What `read_kit` gave for it.

    Returns:
        The key.

    Raises:
        UserError: There is none, or it is the key of another kit.
    """
    file = Path(path) / KEY
    if not file.is_file():
        raise UserError(f"{path} has no {KEY}. Put the key that `npeff study make` wrote back in its place.")
    key = _read(Key, file)
    if key.kit != kit.id or [entry.number for entry in key.groups] != [group.number for group in kit.groups]:
        raise UserError(f"{file} is the key of another kit.")
    return key


Record = TypeVar("Record", Kit, Key)


def _read(kind: type[Record], file: Path) -> Record:
    record = read_record(kind, file)
    if record.format != FORMAT:
        raise UserError(f"{file} is of format {record.format}; this npeff reads format {FORMAT}.")
    return record


def check_pdf_libraries() -> None:
    """Say what to install if the libraries for PDF are not there."""
    try:
        import pypdf  # noqa: F401
        import reportlab  # noqa: F401
    except ImportError as error:
        raise UserError(INSTALL) from error
