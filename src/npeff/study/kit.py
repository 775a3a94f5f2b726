"""A kit is a directory: what annotators see, and apart from it the key that says which group is which.

Beside it, `Sheet`: what an annotator answered, read from the page's download, or from a CSV file.

KIT/form.html              the form (form-1.html, form-2.html, ... where there are several)
KIT/groups.json            what the forms show, for programs: a `Kit`
KIT/key/key.json           which component each group is from, and how the kit was made: a `Key`
"""

import csv
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from npeff.explore.themes import PERSON
from npeff.utils import Record, UserError, __version__, read_record, to_dict

FORMAT = 1
GROUPS = "groups.json"
KEY = "key/key.json"
Choice = Literal["yes", "maybe", "no"]
CHOICES: tuple[Choice, ...] = ("yes", "maybe", "no")
LONGEST = {"who": 100, "words": 2000, "source": 200}
"""Characters that a file of answers may have in one place."""


class Group(Record):
    """Texts that an annotator judges together."""

    number: int
    """Counts from 1 through all forms of a kit."""
    form: int
    """Number of its form, from 1."""
    texts: tuple[str, ...]
    """What is shown."""


class Sample(Record):
    """A group with its answer, to show what is meant."""

    texts: tuple[str, ...]
    """What is shown."""
    theme: str
    """The answer: yes, maybe or no."""
    words: str
    """The theme in a few words; empty for `no`."""


class Kit(Record):
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
        shown = {name: value for name, value in to_dict(self).items() if name in ("preamble", "samples", "groups")}
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


class KeyEntry(Record):
    """Where a group is from."""

    number: int
    """Number of the group."""
    decomposition: str | None
    """Name of the decomposition; None for a control group of random examples."""
    component: int | None
    """The component whose top examples these are; None for a control group."""
    examples: tuple[int, ...]
    """Rows of the run's example table, in the order in which they are shown."""


class Key(Record):
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
    absent = f"{path} is not the kit of a study: it has no {GROUPS}. `npeff study make` makes one."
    kit = _read(Kit, Path(path) / GROUPS, absent)
    if kit.id != kit.kit:
        raise UserError(f"{path}/{GROUPS} was changed: its content is not what the forms show. Make the kit again.")
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
    absent = f"{path} has no {KEY}. Put the key that `npeff study make` wrote back in its place."
    key = _read(Key, Path(path) / KEY, absent)
    if key.kit != kit.id or [entry.number for entry in key.groups] != [group.number for group in kit.groups]:
        raise UserError(f"{path}/{KEY} is the key of another kit.")
    return key


Kept = TypeVar("Kept", Kit, Key)


def _read(kind: type[Kept], file: Path, absent: str) -> Kept:
    if not file.is_file():
        raise UserError(absent)
    record = read_record(kind, file)
    if record.format != FORMAT:
        raise UserError(f"{file} is of format {record.format}; this npeff reads format {FORMAT}.")
    return record


# --- what annotators answered -----------------------------------------------------------------------------------------


class Answer(Record):
    """What is said about a group."""

    theme: Choice
    """Whether its texts have a theme."""
    words: str = ""
    """The theme in a few words; empty for `no`."""

    @property
    def themed(self) -> bool:
        """Whether a theme was seen; as in the paper, maybe counts as yes."""
        return self.theme != "no"


class Sheet(Record):
    """All answers of one annotator: what the page downloads and a judge writes, and what is read from other forms."""

    who: str = ""
    """The annotator's name, or the model's."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Number of a group → what is said about it; a group that is missing was not answered."""
    source: str = PERSON
    """`person`, or `judge:MODEL`."""
    unread: dict[int, str] = field(default_factory=dict)
    """Number of a group → a judge's reply that is not in the form that was asked for."""
    kit: str = ""
    """Id of the kit as the file has it."""
    format: int = FORMAT
    """Version of the layout of this file."""

    @property
    def automatic(self) -> bool:
        """Whether a language model answered."""
        return self.source != PERSON

    @property
    def title(self) -> str:
        """The annotator's name; a judge's says what it is."""
        return f"{self.who} (automatic)" if self.automatic else self.who


def read_sheets(paths: Sequence[str | Path], kit: Kit) -> list[Sheet]:
    """Read filled forms; several forms of the same annotator are put together.

    Args:
        paths: The files.
        kit: The kit that they answer.

    Returns:
        One sheet per annotator, in the order of the files.

    Raises:
        UserError: Two files of one annotator answer the same group.
    """
    sheets: dict[tuple[str, str], Sheet] = {}
    for path in map(Path, paths):
        sheet = read_sheet(path, kit)
        earlier = sheets.setdefault((sheet.who, sheet.source), replace(sheet, answers={})).answers
        twice = sorted(earlier.keys() & sheet.answers.keys())
        if twice:
            raise UserError(
                f"{path}: {sheet.who!r} has answered group {twice[0]} in another of these files. If these are two "
                "people, give them different names; if not, leave one file out."
            )
        earlier.update(sheet.answers)
    return list(sheets.values())


def read_sheet(path: Path, kit: Kit) -> Sheet:
    """Read one filled form.

    Args:
        path: JSON or CSV file.
        kit: The kit that it answers.

    Returns:
        Its answers.

    Raises:
        UserError: The file is no filled form of this kit, or says something that is no answer.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    who, source, kind = "", PERSON, path.suffix.lower()
    if kind == ".json":
        sheet = read_record(Sheet, path)
        if sheet.kit != kit.id or sheet.format != FORMAT:
            raise UserError(f"{path} answers kit {sheet.kit[:20]} (format {sheet.format}), not this one ({kit.id}).")
        who, source = sheet.who, sheet.source
        rows: list[tuple[str, str, str]] = [
            (str(number), answer.theme, answer.words) for number, answer in sheet.answers.items()
        ]
    elif kind == ".csv":
        rows = _csv_rows(path)
    else:
        raise UserError(f"{path} is not a filled form: give JSON (from the page or a judge) or CSV files.")
    for text, place in ((who, "who"), (source, "source"), *((words, "words") for _, _, words in rows)):
        if len(text) > LONGEST[place]:
            raise UserError(f"{path}: {text[:40]!r}... is too long; it may have at most {LONGEST[place]} characters.")
    answers = _answers(path, kit, rows)
    if not answers:
        raise UserError(f"{path} has no answers. Was the form saved after it was filled in?")
    return Sheet((" ".join(who.split()) or path.stem)[: LONGEST["who"]], answers, source)


def _csv_rows(path: Path) -> list[tuple[str, str, str]]:
    """Group, yes/maybe/no, theme: the three columns that the paper asked for. A heading is passed over."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            rows = [[cell.strip() for cell in row] for row in csv.reader(handle) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {path}: {error}. Save it as CSV in UTF-8.") from error
    if rows and not re.fullmatch(r"(?i)(group\s*)?\d+", rows[0][0]):
        rows = rows[1:]
    if any(len(row) < 2 for row in rows):
        raise UserError(f"{path}: a line needs a group's number, yes, maybe or no, and the theme.")
    return [(re.sub(r"(?i)^group\s*", "", row[0]), row[1], row[2] if len(row) > 2 else "") for row in rows]


def _answers(path: Path, kit: Kit, rows: list[tuple[str, str, str]]) -> dict[int, Answer]:
    """Checked answers; a row without yes, maybe or no was not answered."""
    known = {str(group.number) for group in kit.groups}
    answers: dict[int, Answer] = {}
    for number, written, words in rows:
        choice = written.strip().lower()
        if number not in known:
            raise UserError(f"{path}: the kit has no group {number[:20]!r}.")
        if choice and choice not in CHOICES:
            raise UserError(f"{path}, group {number}: {choice[:40]!r} is not one of {', '.join(CHOICES)}.")
        if choice and int(number) in answers:
            raise UserError(f"{path} answers group {number} twice.")
        if choice:
            answers[int(number)] = Answer(choice, "" if choice == "no" else " ".join(words.split()))
    return answers
