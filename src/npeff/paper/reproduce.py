"""`npeff reproduce`: measure a table or figure of the paper again, at a scale that the machine at hand can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npeff.paper import report
from npeff.paper.config import ReproduceConfig
from npeff.paper.recipe import Recipe, Setup, Step, load_recipe, recipe_names
from npeff.paper.runs import Bench, Workshop
from npeff.paper.scaling import RULES, Scale, collections, estimate
from npeff.paper.values import Listing, Missing, Value
from npeff.utils.configs import replace, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import write_text
from npeff.utils.text import duration
from npeff.utils.version import __version__

ALL = "all"


def reproduce(config: ReproduceConfig) -> Path | None:
    """Run the recipe, write the comparison and return its directory; None after a list, a page of links after all."""
    scale = Scale(config.scale, config.model, config.sketch, config.solver, config.task_examples)
    if config.list or config.table == "list":
        print(overview(scale))
        return None
    if config.table == ALL:
        return _reproduce_all(config)
    recipe = _only(load_recipe(config.table), config.tasks)
    if recipe.people:
        print(f"{recipe.title}\n\nNeeds people: {recipe.people}\n\n{report.paper_table(recipe)}")
        return None
    data = Path(config.data) if config.data else None
    if data is not None and not data.is_dir():
        raise UserError(f"--data {config.data} is not a folder.")
    shop = Workshop(Path(config.out), scale, data, config.device)
    shop.check_data(recipe.setups[step.setup] for step in recipe.steps)
    print(f"{recipe.title}\n{' '.join([f'scale {config.scale:g}', *config.examples])}; {needs(recipe, scale)}")
    found = measure(recipe, shop)
    options = {key: value for key, value in to_dict(config).items() if key not in ("table", "list", "out", "device")}
    directory = Path(config.out) / recipe.name / "_".join([f"scale-{config.scale:g}", *config.examples, *config.tasks])
    report.write(directory, recipe, {"npeff": __version__, "options": options, **found})
    print(f"\n{(directory / 'table.md').read_text(encoding='utf-8')}\nin {directory}")
    return directory


def _reproduce_all(config: ReproduceConfig) -> Path:
    """Every recipe that a machine can measure, and a page with links to the tables; returns its path."""
    lines = ["# Tables and figures of the paper, measured again", ""]
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.people or not _of_tasks(recipe, config.tasks):
            continue
        directory = reproduce(replace(config, table=name))
        assert directory is not None
        lines.append(f"- [{recipe.title}]({directory.relative_to(config.out).as_posix()}/table.md)")
    page = Path(config.out) / "tables.md"
    write_text(page, "\n".join(lines) + "\n")
    print(f"All tables are listed in {page}.")
    return page


def _of_tasks(recipe: Recipe, tasks: tuple[str, ...]) -> tuple[Step, ...]:
    """The steps of a recipe that are about these tasks; all without any."""
    return tuple(step for step in recipe.steps if not tasks or recipe.setups[step.setup].task in tasks)


def _only(recipe: Recipe, tasks: tuple[str, ...]) -> Recipe:
    """The recipe without the steps of other tasks."""
    if not tasks or recipe.people:
        return recipe
    steps = _of_tasks(recipe, tasks)
    if not steps:
        have = ", ".join(dict.fromkeys(setup.task for setup in recipe.setups.values()))
        raise UserError(f"Recipe {recipe.name} has none of these tasks; it has {have}.")
    return replace(recipe, steps=steps)


def measure(recipe: Recipe, shop: Workshop) -> dict[str, Any]:
    """All cells of a recipe, the settings that they were measured with, what is missing and what is to be read."""
    from npeff.paper.measures import KEEP_SOLVER, STEPS  # pulls in all of the package

    cells: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    listings: list[dict[str, Any]] = []
    for step in recipe.steps:
        seen: dict[Setup, dict[str, Any]] = {}
        for values, paper in step.variations(recipe.setups[step.setup]):
            bench = shop.bench(paper, step.do in KEEP_SOLVER)
            if bench.here in seen:
                why = f"at this scale the same as {_words(seen[bench.here])}"
                missing.append({"what": f"{step.setup}, {_words(values)}", "why": why})
                continue
            seen[bench.here] = values
            listed = len(cells)
            for found in STEPS[step.do](shop, bench, step):
                if isinstance(found, Value):
                    names = {"setup": step.setup, **values, **found.of}
                    row, column = step.row.format(**names), step.column.format(**names)
                    cell = {"row": row, "column": column, "paper": recipe.paper(row, column), "measured": found.value}
                    pair = _settings(bench, found)
                    if pair not in settings:
                        settings.append(pair)
                    cells.append({**cell, "settings": settings.index(pair)})
                elif isinstance(found, Missing):
                    missing.append({"what": found.what, "why": found.why})
                elif isinstance(found, Listing):
                    listings.append({"title": found.title, "lines": [*found.lines]})
            if len(cells) == listed:  # texts have settings too
                settings.append(_settings(bench))
    return {"cells": cells, "settings": settings, "missing": missing, "listings": listings}


def _settings(bench: Bench, found: Value | None = None) -> dict[str, dict[str, Any]]:
    """The paper's settings of a number, and those here."""
    changed = found.changed if found else {}
    paper = {name: pair[0] for name, pair in changed.items()}
    here = {name: pair[1] for name, pair in changed.items()}
    return {"paper": to_dict(bench.paper) | paper, "here": to_dict(bench.here) | here}


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def needs(recipe: Recipe, scale: Scale) -> str:
    """What a recipe needs, and roughly what it costs."""
    if recipe.people:
        return "people"
    runs = collections(recipe, scale)
    tasks = ", ".join(dict.fromkeys(setup.task for setup in runs))
    models = ", ".join(dict.fromkeys(setup.model for setup in runs))
    examples = sum(setup.examples for setup in runs)
    count = f"{len(runs)} collections" if len(runs) > 1 else "1 collection"
    time = duration(estimate(recipe, scale))
    return f"{tasks}; {models}; {count}, {examples:,} examples; collecting takes about {time} on two CPU cores"


def overview(scale: Scale) -> str:
    """All recipes, and the rules of scaling."""
    lines = [f"Recipes at scale {scale.scale:g} (what is collected once serves all recipes under the same --out):", ""]
    for name in recipe_names():
        recipe = load_recipe(name)
        lines += [f"{name}  ({recipe.label})", f"    {recipe.title}", f"    needs {needs(recipe, scale)}"]
    return "\n".join([*lines, "", "What --scale does:", RULES])
