"""What a step finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Value:
    """A number, and what it is of: `method`, `measure` and the like, which name its row and column."""

    of: dict[str, Any]
    value: float | None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that differ from those of the step: name → (the paper's, here)."""


@dataclass(frozen=True)
class Missing:
    """Something that could not be measured."""

    what: str
    why: str


@dataclass(frozen=True)
class Listing:
    """Text to look at, where the paper shows texts instead of numbers."""

    title: str
    lines: tuple[str, ...]


Finding = Value | Missing | Listing
Findings = Iterator[Finding]
