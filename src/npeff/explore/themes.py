"""What people and judges call components: a journal beside each decomposition, and `npeff themes`.

    RUN/annotations/NAME.jsonl    one JSON object a line, the oldest first; no line is ever changed or removed

A line names the decomposition's tensors, so that themes of a decomposition that was replaced are not shown for the new
one. A line counts once its line break is there: what is left of a torn one is ignored, and cut off by the next writer.
Lines of version 0.1.0 say `label` for `theme`.
"""

import dataclasses
import getpass
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from npeff.decompose.base import SavedDecomposition
from npeff.explore.config import ThemesConfig
from npeff.store.layout import THEMES, decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils import Record, UserError, from_dict, is_text, read_record, to_dict
from npeff.utils.files import only_one, remove_partials, whole_file, with_seal, without_seal
from npeff.utils.report import Column, Table

PERSON = "person"
LONGEST = {"theme": 200, "note": 10_000, "who": 100, "source": 200}
"""Characters that each text may have."""
_PATIENCE = 10.0
"""Seconds to wait for another writer; an edit takes milliseconds."""


class Theme(Record):
    """What somebody says about a component; an empty theme and note remove what was said before."""

    component: int
    """Number of the component."""
    theme: str
    """What its examples have in common, in a few words."""
    note: str
    """Anything else, in several lines if need be."""
    who: str
    """Who says so."""
    when: str
    """UTC, as 2026-01-31T12:00:00Z."""
    source: str
    """`person`, or `judge:MODEL` for an automatic theme."""

    renamed: ClassVar[dict[str, str]] = {"label": "theme"}


class Themes:
    """The themes of the decomposition `name` as it is now."""

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self.path = run.path / THEMES / f"{name}.jsonl"
        self._config = decomposition_folder(run.path, name) / "config.json"
        self.fingerprint, self.components = self._read_config()
        """SHA-256 of the decomposition's tensors, and the number of its components."""

    def current(self) -> dict[int, Theme]:
        """What is said about the components now.

        Returns:
            Component → its theme. The latest counts, but a person's always before an automatic one.
        """
        latest: dict[int, Theme] = {}
        for theme in self._read():
            old = latest.get(theme.component)
            if old is None or theme.source == PERSON or old.source != PERSON:
                latest[theme.component] = theme
        return {j: latest[j] for j in sorted(latest) if latest[j].theme or latest[j].note}

    def history(self, component: int) -> list[Theme]:
        """Everything that was ever said about a component, the oldest first."""
        return [theme for theme in self._read() if theme.component == component]

    def add(self, component: int, theme: str, note: str = "", who: str | None = None, source: str = PERSON) -> Theme:
        """Append to the journal; when this returns, the line is on the disk.

        Args:
            component: Number of the component.
            theme: Its theme; white space is made single blanks, so that lists stay readable.
            note: Anything else. Without theme and note, what is there is removed.
            who: Who says so; the user of this system if not given.
            source: `person`, or `judge:MODEL`.

        Returns:
            What was written.

        Raises:
            UserError: There is no such component, a text is too long or not valid, or the decomposition was replaced.
        """
        if not 0 <= component < self.components:
            raise UserError(f"{self.name} has components 0 to {self.components - 1}, not {component}.")
        texts = {"theme": theme, "note": note, "who": who or "", "source": source}
        for what, text in texts.items():
            if not is_text(text):
                raise UserError(f"The {what} is not valid text.")
            if len(text) > LONGEST[what]:
                raise UserError(f"The {what} has {len(text)} characters; it may have {LONGEST[what]}.")
        who = " ".join(texts["who"].split()) or system_user()
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        added = Theme(component, " ".join(theme.split()), note.strip(), who, when, source)
        line = json.dumps(with_seal({**to_dict(added), "decomposition": self.fingerprint})) + "\n"
        with only_one(self.path.parent, wait=_PATIENCE):
            if not self.is_current():
                raise UserError(f"Decomposition {self.name!r} was replaced meanwhile. Start again to see the new one.")
            remove_partials(self.path.parent)
            with whole_file(self.path) as new:
                new.write_bytes(self._whole_lines() + line.encode("ascii"))
        return added

    def is_current(self) -> bool:
        """Whether the decomposition is still the one that this was opened for."""
        return self._config.is_file() and self._read_config()[0] == self.fingerprint

    def _read_config(self) -> tuple[str, int]:
        """SHA-256 of the decomposition's tensors, and the number of its components."""
        saved = read_record(SavedDecomposition, self._config)
        return saved.sha256, next(iter(saved.components), 0)

    def _read(self) -> list[Theme]:
        """Themes of this decomposition, the oldest first."""
        lines = enumerate(self._whole_lines().splitlines(), 1)
        entries = [self._parse(line, number) for number, line in lines if line.strip()]
        return [theme for fingerprint, theme in entries if fingerprint == self.fingerprint]

    def _whole_lines(self) -> bytes:
        """The journal up to its last line break."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.") from error
        return content[: content.rfind(b"\n") + 1]

    def _parse(self, line: bytes, number: int) -> tuple[str, Theme]:
        """The decomposition that a line is about, and what it says. What only later versions know is left alone."""
        known = {*(field.name for field in dataclasses.fields(Theme)), *Theme.renamed}
        try:
            values = without_seal(self.path, json.loads(line))
            theme = from_dict(Theme, {name: value for name, value in values.items() if name in known})
            texts = [value for name, value in vars(theme).items() if name != "component"]
            if not all(is_text(text) for text in (*texts, values["decomposition"])):
                raise ValueError("a text is not valid")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
            raise UserError(
                f"{self.path}, line {number} is damaged ({error}). Correct or delete this line; the others are kept."
            ) from error
        return values["decomposition"], theme


def system_user() -> str:
    """Who is at work here, as the system calls them."""
    try:
        return getpass.getuser()[: LONGEST["who"]]
    except (KeyError, OSError):  # a container may know no name for its user
        return "unknown"


# --- the command ------------------------------------------------------------------------------------------------------


def themes(config: ThemesConfig) -> list[tuple[str, Theme]]:
    """List the themes and notes of a run's components, or write them to a file.

    Args:
        config: The run, which decomposition, and the file to write.

    Returns:
        Name of the decomposition and theme, for every component that has one.
    """
    run = Run.open(config.run)
    names = [config.decomposition] if config.decomposition is not None else decomposition_names(run.path)
    rows = [(name, theme) for name in names for theme in Themes(run, name).current().values()]
    if config.csv is not None:
        columns = [Column("decomposition"), *(Column(field.name) for field in dataclasses.fields(Theme))]
        Table("", columns, [[name, *vars(theme).values()] for name, theme in rows]).write_csv(Path(config.csv))
        print(f"{len(rows)} themes in {config.csv}")
    else:
        print("".join(f"{_line(name, theme)}\n" for name, theme in rows), end="")
    if not rows:
        print(f"No component of {run.path} has a theme yet. `npeff explore {run.path}` is where to give one.")
    return rows


def _line(name: str, theme: Theme) -> str:
    by = theme.who if theme.source == PERSON else theme.source
    text = f"{name} {theme.component:4d}  {theme.theme or '(no theme)'}  [{by}, {theme.when[:10]}]"
    if theme.note:
        text += f"\n      {theme.note}"
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no terminal codes from a note
