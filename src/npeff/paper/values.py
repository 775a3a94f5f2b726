"""What measurements yield, and the record that `npeff reproduce` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npeff.paper.recipe import Number, Setting

Changed = Mapping[str, tuple[Setting, Setting]]
"""Settings that differ from those of the step: name → (the paper's, here)."""


@dataclass(frozen=True)
class Value:
    """A measured number."""

    of: Mapping[str, str | int]
    """What it is a number of: `method`, `measure` and the like, which name its row and column."""
    value: float | None
    """The number; None if it is not defined here."""
    changed: Changed = field(default_factory=dict)
    """Settings that differ from those of the step."""


@dataclass(frozen=True)
class Missing:
    """Something that could not be measured."""

    what: str
    """What is missing."""
    why: str
    """The reason."""


@dataclass(frozen=True)
class Listing:
    """Texts to read, where the paper shows texts instead of numbers."""

    title: str
    """What the texts are."""
    lines: tuple[str, ...]
    """The texts."""


Measured = Value | Missing | Listing


@dataclass(frozen=True)
class Cell:
    """A number of the paper's table, measured again."""

    row: str
    """Row of the table."""
    column: str
    """Column of the table."""
    paper: Number
    """The paper's number, if it prints one."""
    measured: Number
    """The number here."""
    settings: int
    """Place of the number's settings in the list of settings."""


@dataclass(frozen=True)
class Settings:
    """Settings that numbers were measured with."""

    paper: dict[str, Setting]
    """The paper's."""
    here: dict[str, Setting]
    """Those here."""


@dataclass
class Reproduction:
    """A table or figure of the paper, measured again: OUT/RECIPE/scale-SCALE/table.json."""

    recipe: str
    """Name of the recipe."""
    label: str
    """Label in the source of the paper."""
    title: str
    """Title of the table or figure."""
    npeff: str
    """Version of npeff."""
    options: dict[str, Any]
    """Options of the command."""
    cells: list[Cell] = field(default_factory=list)
    """All numbers."""
    settings: list[Settings] = field(default_factory=list)
    """The different settings that numbers were measured with."""
    missing: list[Missing] = field(default_factory=list)
    """What was not measured."""
    listings: list[Listing] = field(default_factory=list)
    """Texts to read."""

    def settings_number(self, settings: Settings) -> int:
        """Place of `settings` in the list; added if they are new."""
        if settings not in self.settings:
            self.settings.append(settings)
        return self.settings.index(settings)
