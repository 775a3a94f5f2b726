"""Recipes: what the paper did for a table or figure, its numbers, and the steps that measure them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from itertools import product
from typing import Any, Literal

import yaml

from npeff.collect.config import SketchKind
from npeff.decompose.config import Method, PaperConfig
from npeff.utils.configs import from_dict, replace
from npeff.utils.errors import UserError

Number = int | float | None
Setting = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Setup(PaperConfig):
    """One experiment's settings, as in the paper, with those of its solver."""

    task: str
    """Built-in task."""
    model: str
    """Hub id."""
    examples: int
    directions: str
    """How the expectation over answers is taken, as in `npeff collect --directions`."""
    sketch: SketchKind
    dim: int
    """Length of a projected gradient."""
    components: int
    rank: int | None = None
    """Rows of a Fisher after rank reduction."""
    seed: int = 1
    """Seed of the decomposition."""
    solver: Literal["als", "paper"] = "paper"
    holdout: float = 0.0
    """Share of examples that components are not fitted to."""


@dataclass(frozen=True)
class Step:
    """One kind of measurement, for every combination of the settings that vary."""

    do: str
    """Name of the function in `measures.MEASURES`."""
    setup: str
    """Name of the recipe's setup."""
    row: str = "{method}"
    """Row of the table where a number goes; {method}, {measure} and settings that vary stand for their values."""
    column: str = "{measure}"
    """Column of the table, likewise."""
    methods: tuple[Method, ...] = ("npeff",)
    vary: dict[str, list[Setting]] = field(default_factory=dict)
    """Setting → values, as in the paper."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the function takes, by the names of its parameters."""

    def variations(self, setup: Setup) -> list[tuple[dict[str, Setting], Setup]]:
        """Combinations of the settings that vary: their values, and `setup` with them."""
        values = [dict(zip(self.vary, chosen, strict=True)) for chosen in product(*self.vary.values())]
        return [(chosen, replace(setup, **chosen)) for chosen in values]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper."""

    name: str
    label: str
    """Label in the source of the paper."""
    title: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    numbers: dict[str, list[Number]] = field(default_factory=dict)
    """The paper's numbers: row → one per column, null where it has none."""
    setups: dict[str, Setup] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    note: str = ""
    """What the paper does not say, or what cannot be the same here."""
    people: str = ""
    """Why people are needed, for what no program can measure."""

    def paper(self, row: str, column: str) -> Number:
        """The paper's number in a cell."""
        if row not in self.numbers or column not in self.columns:
            return None
        return self.numbers[row][self.columns.index(column)]


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


def values(measured: Mapping[str, float | None], changed: Changed | None = None, **of: str) -> Iterator[Value]:
    """Several measures of the same thing, from their names and numbers."""
    return (Value({**of, "measure": measure}, value, changed or {}) for measure, value in measured.items())


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


def recipe_names() -> list[str]:
    """Names of all recipes, main text first."""
    return [str(name) for name in _read("order")]


def load_recipe(name: str) -> Recipe:
    """Find a recipe.

    Args:
        name: Its name, or the label of the table or figure in the paper's source, with or without `tab:` and `fig:`.

    Returns:
        The recipe.

    Raises:
        UserError: There is none.
    """
    names = recipe_names()
    for recipe in map(_load, [name] if name in names else names):
        if name in (recipe.name, recipe.label, recipe.label.partition(":")[2]):
            return recipe
    raise UserError(f"There is no recipe {name!r}. `npeff reproduce list` shows all; they are {', '.join(names)}.")


@lru_cache
def _load(name: str) -> Recipe:
    return parse_recipe(name, _read(name))


def _read(name: str) -> Any:
    path = resources.files("npeff") / "paper" / "recipes" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def parse_recipe(name: str, values: dict[str, Any]) -> Recipe:
    """Make a recipe of the content of its file.

    Args:
        name: Name of the recipe.
        values: What the YAML file holds.

    Returns:
        The recipe.

    Raises:
        UserError: The file has unknown keys, numbers that do not fit rows and columns, or steps without a setup.
    """
    recipe = from_dict(Recipe, {"name": name, **values})
    for row, numbers in recipe.numbers.items():
        if row not in recipe.rows or len(numbers) != len(recipe.columns):
            raise UserError(f"Recipe {name}: the numbers of {row!r} do not fit its rows and columns.")
    settings = {item.name for item in fields(Setup)}
    for step in recipe.steps:
        if step.setup not in recipe.setups or not set(step.vary) <= settings:
            raise UserError(f"Recipe {name}: step {step.do} names a setup or a setting that is not there.")
    return recipe
