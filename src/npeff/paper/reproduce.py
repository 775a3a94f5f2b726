"""`npeff reproduce`: measure a table or figure of the paper again, at a scale that the machine at hand can hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from npeff.collect.config import parse_directions
from npeff.models.config import EMBEDDED
from npeff.paper import report
from npeff.paper.config import ReproduceConfig
from npeff.paper.measures import KEEP_SOLVER, MEASURES
from npeff.paper.recipe import Changed, Missing, Recipe, Setting, Setup, Step, Value, load_recipe, recipe_names
from npeff.paper.report import Cell, Reproduction, Settings
from npeff.paper.runs import RULES, Experiment, Runs
from npeff.utils.configs import replace, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import write_text
from npeff.utils.text import duration
from npeff.utils.version import __version__

# Rough numbers for estimates only.
_TOKENS = {"sst2": 20, "yat": 110, "clinc150": 250, "triviaqa": 30}
_ANSWERS = {"sst2": 2, "yat": 10}
_MILLIONS = {EMBEDDED: 106, "HuggingFaceTB/SmolLM2-360M": 315, "HuggingFaceTB/SmolLM2-1.7B": 1610}
_TWO_CORES = 100e9
"""Useful floating-point operations a second of two CPU cores: 80 to 120 were measured for the four tasks."""


def reproduce(config: ReproduceConfig) -> Path | None:
    """Run a recipe and write the comparison with the paper.

    Args:
        config: Options of the command.

    Returns:
        The directory of the results; the page with links after `all`; None if there was nothing to measure.

    Raises:
        UserError: The recipe has none of the tasks.
    """
    runs = Runs(config)
    if config.table == "list":
        print(overview(runs))
        return None
    if config.table == "all":
        return _reproduce_all(config)
    recipe = load_recipe(config.table)
    if recipe.people:
        print(f"{recipe.title}\n\nNeeds people: {recipe.people}\n\n{report.comparison(recipe, []).markdown()}")
        return None
    recipe = replace(recipe, steps=_steps(recipe, config.tasks))
    if not recipe.steps:
        tasks = ", ".join(dict.fromkeys(setup.task for setup in recipe.setups.values()))
        raise UserError(f"Recipe {recipe.name} has none of these tasks; it has {tasks}.")
    for step in recipe.steps:  # a missing file is told before the first hour of work, not after it
        runs.data_file(recipe.setups[step.setup].task)
    print(f"{recipe.title}\n{' '.join([f'scale {config.scale:g}', *config.examples])}; {needs(recipe, runs)}")
    options = {key: value for key, value in to_dict(config).items() if key not in ("table", "out", "device")}
    result = Reproduction(recipe.name, recipe.label, recipe.title, __version__, options)
    measure(recipe, runs, result)
    directory = Path(config.out) / recipe.name / "_".join([f"scale-{config.scale:g}", *config.examples, *config.tasks])
    report.write(directory, recipe, result)
    print(f"\n{(directory / 'table.md').read_text(encoding='utf-8')}\nin {directory}")
    return directory


def _steps(recipe: Recipe, tasks: tuple[str, ...]) -> tuple[Step, ...]:
    """The steps of a recipe that are about these tasks; all without any."""
    return tuple(step for step in recipe.steps if not tasks or recipe.setups[step.setup].task in tasks)


def _reproduce_all(config: ReproduceConfig) -> Path:
    """Run every recipe that a program can measure, and write a page with links to the tables; returns its path."""
    lines = ["# Tables and figures of the paper, measured again", ""]
    for recipe in map(load_recipe, recipe_names()):
        if _steps(recipe, config.tasks):  # a recipe that needs people has none
            directory = reproduce(replace(config, table=recipe.name))
            assert directory is not None
            lines.append(f"- [{recipe.title}]({directory.relative_to(config.out).as_posix()}/table.md)")
    page = Path(config.out) / "tables.md"
    write_text(page, "\n".join(lines) + "\n")
    print(f"All tables are listed in {page}.")
    return page


def measure(recipe: Recipe, runs: Runs, result: Reproduction) -> None:
    """Measure all that a recipe asks for.

    Args:
        recipe: The recipe.
        runs: The runs to measure, made where they are missing.
        result: Takes the numbers, their settings, texts, and what is missing.
    """
    for step in recipe.steps:
        seen: dict[Setup, Mapping[str, Setting]] = {}
        for values, paper in step.variations(recipe.setups[step.setup]):
            experiment = runs.experiment(paper, step.do in KEEP_SOLVER)
            if experiment.here in seen:
                why = f"at this scale the same as {_words(seen[experiment.here])}"
                result.missing.append(Missing(f"{step.setup}, {_words(values)}", why))
                continue
            seen[experiment.here] = values
            _measure_step(recipe, step, values, experiment, result)


def _measure_step(
    recipe: Recipe, step: Step, values: Mapping[str, Setting], experiment: Experiment, result: Reproduction
) -> None:
    cells = len(result.cells)
    for item in MEASURES[step.do](experiment, step):
        if isinstance(item, Value):
            names = {"setup": step.setup, **values, **item.of}
            row, column = step.row.format(**names), step.column.format(**names)
            place = result.settings_number(_settings(experiment, item.changed))
            result.cells.append(Cell(row, column, recipe.paper(row, column), item.value, place))
        elif isinstance(item, Missing):
            result.missing.append(item)
        else:
            result.listings.append(item)
    if len(result.cells) == cells:  # texts have settings too
        result.settings_number(_settings(experiment, {}))


def _settings(experiment: Experiment, changed: Changed) -> Settings:
    """The settings of an experiment, but for those that are `changed`."""
    paper, here = ({name: pair[side] for name, pair in changed.items()} for side in (0, 1))
    return Settings(to_dict(experiment.paper) | paper, to_dict(experiment.here) | here)


def _words(values: Mapping[str, Setting]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def collections(recipe: Recipe, runs: Runs) -> list[Setup]:
    """The different collections that a recipe needs.

    Args:
        recipe: The recipe.
        runs: The scale to run it at.

    Returns:
        One setup, at this scale, for each collection.
    """
    setups: dict[Path, Setup] = {}
    for step in recipe.steps:
        wanted = [setup for _, setup in step.variations(recipe.setups[step.setup])]
        if step.options.against:
            wanted.append(replace(wanted[0], directions=step.options.against))
        setups |= {runs.folder(here): here for here in map(runs.setup, wanted)}
    return list(setups.values())


def estimate(setups: list[Setup]) -> float:
    """Seconds that collections take on two CPU cores, very roughly."""
    total = 0.0
    for setup in setups:
        kind, amount = parse_directions(setup.directions)
        passes = _ANSWERS.get(setup.task, 2) - 1 if kind in ("exact", "auto") else max(1, int(amount)) + 1
        parameters = 1e6 * _MILLIONS.get(setup.model, 300)
        total += setup.examples * 2 * parameters * _TOKENS.get(setup.task, 50) * (1 + 1.6 * passes) / _TWO_CORES
    return total


def needs(recipe: Recipe, runs: Runs) -> str:
    """What a recipe needs, and roughly what it costs; decompositions are not included.

    Args:
        recipe: The recipe.
        runs: The scale to run it at.

    Returns:
        Tasks, models, examples and time, in words.
    """
    if recipe.people:
        return "people"
    setups = collections(recipe, runs)
    tasks, models = (", ".join(dict.fromkeys(getattr(setup, name) for setup in setups)) for name in ("task", "model"))
    count = f"{len(setups)} collections" if len(setups) > 1 else "1 collection"
    examples, time = sum(setup.examples for setup in setups), duration(estimate(setups))
    return f"{tasks}; {models}; {count}, {examples:,} examples; collecting takes about {time} on two CPU cores"


def overview(runs: Runs) -> str:
    """All recipes, and the rules of scaling, in words."""
    lines = [f"Recipes at scale {runs.config.scale:g} (recipes with the same --out share their collections):", ""]
    for recipe in map(load_recipe, recipe_names()):
        lines += [f"{recipe.name}  ({recipe.label})", f"    {recipe.title}", f"    needs {needs(recipe, runs)}"]
    return "\n".join([*lines, "", "What --scale does:", RULES])
