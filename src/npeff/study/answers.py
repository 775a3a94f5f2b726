"""What an annotator answered: read from a filled PDF, from the page's download, or from a CSV file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from npeff.explore.themes import PERSON
from npeff.study.kit import FORMAT, Kit
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, write_json

Theme = Literal["yes", "maybe", "no"]
THEMES: tuple[Theme, ...] = ("yes", "maybe", "no")
LONGEST = {"who": 100, "words": 2000, "source": 200}
"""Characters that a file of answers may have in one place."""


@dataclass(frozen=True)
class Answer:
    """What is said about a group."""

    theme: Theme
    words: str = ""
    """The theme in a few words; empty for `no`."""

    @property
    def themed(self) -> bool:
        """Whether a theme was seen; as in the paper, maybe counts as yes."""
        return self.theme != "no"


@dataclass(frozen=True)
class Sheet:
    """All answers of one annotator; a group that is missing was not answered."""

    who: str
    answers: Mapping[int, Answer]
    source: str = PERSON
    """`person`, or `judge:MODEL`."""

    @property
    def automatic(self) -> bool:
        return self.source != PERSON

    @property
    def title(self) -> str:
        """The annotator's name; a judge's says what it is."""
        return f"{self.who} (automatic)" if self.automatic else self.who


def read_sheets(paths: Sequence[str | Path], kit: Kit) -> list[Sheet]:
    """One sheet per annotator, in the order of the files; several forms of the same annotator are put together."""
    found: dict[tuple[str, str], Sheet] = {}
    for path in map(Path, paths):
        sheet = read_sheet(path, kit)
        name = (sheet.who, sheet.source)
        old = found.get(name)
        if old is not None:
            twice = sorted(set(old.answers) & set(sheet.answers))
            if twice:
                raise UserError(
                    f"{path}: {sheet.who!r} has answered group {twice[0]} in another of these files. If these are two "
                    "people, give them different names; if not, leave one file out."
                )
            sheet = Sheet(sheet.who, {**old.answers, **sheet.answers}, sheet.source)
        found[name] = sheet
    return list(found.values())


def read_sheet(path: Path, kit: Kit) -> Sheet:
    """The answers in one file."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    kind = path.suffix.lower()
    if kind == ".pdf":
        from npeff.study.pdf import read_form

        who, pairs = read_form(path, kit.id)
        sheet = Sheet(_who(who, path), _answers(path, kit, pairs))
    elif kind == ".json":
        sheet = _from_json(path, kit)
    elif kind == ".csv":
        sheet = Sheet(_who("", path), _answers(path, kit, _csv_rows(path)))
    else:
        raise UserError(f"{path} is not a filled form: give PDF, JSON (from the page or a judge) or CSV files.")
    if not sheet.answers:
        raise UserError(f"{path} has no answers. Was the form saved after it was filled in?")
    return sheet


def write_sheet(path: Path, kit: Kit, sheet: Sheet, **more: Any) -> None:
    """Write answers the way the page does."""
    answers = {str(number): asdict(answer) for number, answer in sorted(sheet.answers.items())}
    write_json(
        path,
        {"format": FORMAT, "kit": kit.id, "who": sheet.who, "source": sheet.source, **more, "answers": answers},
    )


def _from_json(path: Path, kit: Kit) -> Sheet:
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("answers"), dict):
        raise UserError(f"{path} is not a file of answers.")
    if values.get("kit") != kit.id:
        raise UserError(f"{path} answers kit {_text(values.get('kit'), path, 'who')}, not this one ({kit.id}).")
    source = _text(values.get("source", PERSON), path, "source")
    rows = []
    for number, answer in values["answers"].items():
        if not isinstance(answer, dict):
            raise UserError(f"{path}: the answer of group {number} cannot be read.")
        rows.append((number, answer.get("theme"), answer.get("words", "")))
    return Sheet(_who(_text(values.get("who", ""), path, "who"), path), _answers(path, kit, rows), source)


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


def _answers(path: Path, kit: Kit, rows: Iterable[tuple[Any, Any, Any]]) -> dict[int, Answer]:
    """Checked answers; a row without yes, maybe or no was not answered."""
    known = {str(group.number) for group in kit.groups}
    found: dict[int, Answer] = {}
    for number, theme, words in rows:
        if str(number) not in known:
            raise UserError(f"{path}: the kit has no group {str(number)[:20]!r}.")
        theme = "" if theme is None else _text(theme, path, "words").strip().lower()
        words = " ".join(_text(words, path, "words").split())
        if not theme:
            continue
        if theme not in THEMES:
            raise UserError(f"{path}, group {number}: {theme[:40]!r} is not one of {', '.join(THEMES)}.")
        if int(number) in found:
            raise UserError(f"{path} answers group {number} twice.")
        found[int(number)] = Answer(theme, "" if theme == "no" else words)
    return found


def _text(value: Any, path: Path, place: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST[place]:
        raise UserError(f"{path}: {str(value)[:40]!r} is no text of at most {LONGEST[place]} characters.")
    return value


def _who(given: str, path: Path) -> str:
    """The annotator's name; without one, the file's."""
    return (" ".join(given.split()) or path.stem)[: LONGEST["who"]]
