"""What people (and judges) say about components: a journal beside each decomposition, and `npeff labels`.

    RUN/annotations/NAME.jsonl    one JSON object a line, the oldest first; nothing is ever changed or removed

A line names the decomposition's tensors, so that labels of one that was made anew are not taken for labels of the new
one. A line counts once its line break is there: what a killed writer left behind is ignored, and cut off by the next.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from npeff.explore.config import ThemesConfig
from npeff.store.layout import decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import disk_errors, only_one, read_json, with_seal, without_seal, write_csv, write_json
from npeff.utils.text import is_text

FOLDER = "annotations"
PERSON = "person"
LONGEST = {"label": 200, "note": 10_000, "who": 100, "source": 200}
"""Characters that an annotation may have."""
_PATIENCE = 10.0
"""Seconds to wait for another writer; an edit takes milliseconds."""


@dataclass(frozen=True)
class Annotation:
    """What somebody says about a component; without label and note, that nothing is to be said any more."""

    component: int
    label: str
    """Its theme in a few words."""
    note: str
    who: str
    when: str
    """UTC, as 2026-01-31T12:00:00Z."""
    source: str = PERSON
    """`person`, or `judge:MODEL` for an automatic label."""


class Annotations:
    """The annotations of the decomposition `name` as it is now."""

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self.path = run.path / FOLDER / f"{name}.jsonl"
        self._config = decomposition_folder(run.path, name) / "config.json"
        self._fingerprint, self.components = self._read_config()

    def current(self) -> dict[int, Annotation]:
        """Component → what is said about it. The latest counts, but a person's always before an automatic one."""
        latest: dict[int, Annotation] = {}
        for annotation in self._read():
            old = latest.get(annotation.component)
            if old is None or annotation.source == PERSON or old.source != PERSON:
                latest[annotation.component] = annotation
        return {j: latest[j] for j in sorted(latest) if latest[j].label or latest[j].note}

    def history(self, component: int) -> list[Annotation]:
        """Everything that was ever said about a component, the oldest first."""
        return [annotation for annotation in self._read() if annotation.component == component]

    def add(
        self, component: int, label: str, note: str = "", who: str | None = None, source: str = PERSON
    ) -> Annotation:
        """Append to the journal; when this returns, the annotation is on the disk. No label and no note: removed."""
        if not 0 <= component < self.components:
            raise UserError(f"{self.name} has components 0 to {self.components - 1}, not {component}.")
        texts = {"label": label, "note": note, "who": who or "", "source": source}
        for what, text in texts.items():
            if not is_text(text):
                raise UserError(f"The {what} is not valid text.")
            if len(text) > LONGEST[what]:
                raise UserError(f"The {what} has {len(text)} characters; it may have {LONGEST[what]}.")
        # one line each, so that lists and tables stay readable
        texts |= {
            "label": " ".join(label.split()),
            "note": note.strip(),
            "who": " ".join(texts["who"].split()) or system_user(),
        }
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        annotation = Annotation(component, when=when, **texts)
        values = with_seal({**dataclasses.asdict(annotation), "decomposition": self._fingerprint})
        line = json.dumps(values) + "\n"
        with only_one(self.path.parent, wait=_PATIENCE):
            if not self.is_current():
                raise UserError(f"Decomposition {self.name!r} was made anew meanwhile. Start again to see it.")
            with disk_errors(self.path):
                _append(self.path, line.encode("ascii"))
        return annotation

    def is_current(self) -> bool:
        """Whether the decomposition is still the one that this was opened for."""
        return self._config.is_file() and self._read_config()[0] == self._fingerprint

    def _read_config(self) -> tuple[str, int]:
        config = read_json(self._config)
        try:
            return str(config["sha256"]), int(config["components"][0])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise UserError(f"{self._config} does not describe a decomposition.") from error

    def _read(self) -> list[Annotation]:
        """Annotations of this decomposition, the oldest first."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.") from error
        lines = content[: _whole(content)].splitlines()
        found = [self._parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        return [annotation for fingerprint, annotation in found if fingerprint == self._fingerprint]

    def _parse(self, line: bytes, number: int) -> tuple[str, Annotation]:
        """The decomposition that a line is about, and what it says."""
        names = [field.name for field in dataclasses.fields(Annotation)]
        try:
            values: dict[str, Any] = without_seal(self.path, json.loads(line))
            annotation = Annotation(**{name: values[name] for name in names})
            if type(annotation.component) is not int or not all(
                is_text(values[name]) for name in (*names, "decomposition") if name != "component"
            ):
                raise ValueError("a value has the wrong type")
        except (ValueError, TypeError, KeyError, RecursionError, UserError) as error:
            raise UserError(
                f"{self.path}, line {number} is damaged ({error}). Correct or delete this line; the others are kept."
            ) from error
        return values["decomposition"], annotation


def _whole(content: bytes) -> int:
    """Length of the whole lines of a journal."""
    return content.rfind(b"\n") + 1


def _append(path: Path, line: bytes) -> None:
    """Put a line behind the whole ones of a file, on the disk; if that fails the file stays as it was."""
    new = not path.exists()
    with path.open("a+b", buffering=0) as handle:
        handle.seek(0)
        end = _whole(handle.read())
        handle.truncate(end)
        try:
            if handle.write(line) != len(line):  # the disk is full; the next write says so
                handle.truncate(end)
                handle.write(line)
            os.fsync(handle.fileno())
        except OSError:
            handle.truncate(end)
            raise
    if new:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make a new file's name last; not every system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def system_user() -> str:
    """Who is at work here, as the system calls them."""
    try:
        return getpass.getuser()[: LONGEST["who"]]
    except (KeyError, OSError):  # a container may know no name for its user
        return "unknown"


# --- the command ------------------------------------------------------------------------------------------------------


def themes(config: ThemesConfig) -> list[dict[str, Any]]:
    """Print or write the current annotations of a run; returns them."""
    run = Run.open(config.run)
    names = [config.decomposition] if config.decomposition is not None else decomposition_names(run.path)
    rows = [
        {"decomposition": name, **dataclasses.asdict(annotation)}
        for name in names
        for annotation in Annotations(run, name).current().values()
    ]
    if config.csv is not None:
        columns = ["decomposition", *(field.name for field in dataclasses.fields(Annotation))]
        write_csv(Path(config.csv), [columns, *([row[name] for name in columns] for row in rows)])
    if config.json is not None:
        write_json(Path(config.json), rows)
    if config.csv is None and config.json is None:
        for row in rows:
            print(_line(row))
    else:
        files = " and ".join(file for file in (config.csv, config.json) if file is not None)
        print(f"{len(rows)} labels in {files}")
    if not rows:
        print(f"No component of {run.path} has a label yet. `npeff explore {run.path}` is where to give one.")
    return rows


def _line(row: dict[str, Any]) -> str:
    by = row["who"] if row["source"] == PERSON else row["source"]
    text = f"{row['decomposition']} {row['component']:4d}  {row['label'] or '(no label)'}  [{by}, {row['when'][:10]}]"
    if row["note"]:
        text += f"\n      {row['note']}"
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no terminal codes from a note
