"""Recipes: what the paper did for a table or figure, its numbers, and the steps that measure them again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import product
from typing import Any, Literal

import yaml

from npeff.decompose.config import Method
from npeff.utils.configs import from_dict, replace
from npeff.utils.errors import UserError

Number = int | float | None


@dataclass(frozen=True)
class Setup:
    """One experiment's settings, as in the paper."""

    task: str
    """Built-in task."""
    model: str
    """Hub id."""
    examples: int
    directions: str
    """How the expectation over answers is taken, as in `npeff collect --directions`."""
    sketch: Literal["kron", "sparse", "dense"]
    dim: int
    """Length of a projected gradient."""
    components: int
    rank: int | None = None
    """Rows of a Fisher after rank reduction."""
    seed: int = 1
    """Seed of the decomposition."""
    solver: Literal["als", "paper"] = "paper"
    frozen_steps: int = 1000
    joint_steps: int = 3000
    frozen_rate: float = 1e-5
    joint_rate: float = 3e-4
    tau: float = 0.0
    """Early stopping; 0 is none."""
    holdout: float = 0.0
    """Share of examples that components are not fitted to."""


@dataclass(frozen=True)
class Step:
    """One kind of measurement, for every combination of the settings that vary."""

    do: str
    """Name of the function in `steps.STEPS`."""
    setup: str
    row: str = "{method}"
    """Row of the table where a number goes; {method}, {measure} and settings that vary stand for their values."""
    column: str = "{measure}"
    methods: tuple[Method, ...] = ("npeff",)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Setting → values, as in the paper."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the function takes."""

    def variations(self, setup: Setup) -> list[tuple[dict[str, Any], Setup]]:
        """The values of what varies, and the setup with them."""
        names = list(self.vary)
        values = [dict(zip(names, chosen, strict=True)) for chosen in product(*self.vary.values())]
        return [(chosen, replace(setup, **chosen)) for chosen in values]


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
    """The paper's: row → one per column, null where it has none."""
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


def recipe_names() -> list[str]:
    """Names of all recipes, main text first."""
    order = yaml.safe_load((_folder() / "order.yaml").read_text(encoding="utf-8"))
    return [str(name) for name in order]


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or by the label that the table or figure has in the paper's source."""
    names = recipe_names()
    if name not in names:
        labels = {load_recipe(known).label: known for known in names}
        found = labels.get(name) or next((labels[f"{kind}:{name}"] for kind in _kinds(name, labels)), None)
        if found is None:
            raise UserError(
                f"There is no recipe {name!r}. `npeff reproduce list` shows all; they are {', '.join(names)}."
            )
        name = found
    return _load(name)


@lru_cache
def _load(name: str) -> Recipe:
    text = (_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_recipe(name, yaml.safe_load(text))


def _kinds(name: str, labels: dict[str, str]) -> list[str]:
    return [kind for kind in ("tab", "fig") if f"{kind}:{name}" in labels]


def _folder() -> Any:
    return resources.files("npeff") / "paper" / "recipes"


def parse_recipe(name: str, values: dict[str, Any]) -> Recipe:
    """A recipe from what its file holds; unknown keys and rows of the wrong length are errors."""
    values = {"name": name, **values}
    setups = {key: from_dict(Setup, given) for key, given in values.pop("setups", {}).items()}
    steps = tuple(from_dict(Step, given) for given in values.pop("steps", []))
    recipe = replace(from_dict(Recipe, values), setups=setups, steps=steps)
    for row, numbers in recipe.numbers.items():
        if row not in recipe.rows or len(numbers) != len(recipe.columns):
            raise UserError(f"Recipe {name}: the numbers of {row!r} do not fit its rows and columns.")
    settings = {item.name for item in dataclasses.fields(Setup)}
    for step in steps:
        if step.setup not in setups or not set(step.vary) <= settings:
            raise UserError(f"Recipe {name}: step {step.do} names a setup or a setting that is not there.")
    return recipe
