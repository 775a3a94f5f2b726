"""`npeff reproduce`: measure a table or figure of the paper again, at a scale that the machine at hand can hold."""

from collections.abc import Mapping
from pathlib import Path

from npeff.paper.config import ReproduceConfig
from npeff.paper.measures import KEEP_SOLVER, MEASURES
from npeff.paper.recipe import Cell, Missing, Number, Recipe, Reproduction, Step, Value, load_recipe, recipe_names
from npeff.paper.runs import Experiment, Runs, needs, overview
from npeff.utils import UserError, __version__, remove_partials, replace, shorten, to_dict, write_record, write_text
from npeff.utils.report import BLUE, RED, Column, Table, new_figure, plain_axes, write_figure, write_report

SETTINGS = ("task", "model", "examples", "components", "directions", "rank", "sketch", "dim", "solver", "seed")
"""Settings that are always shown; others are where they differ."""


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
        print(f"{recipe.title}\n\nNeeds people: {recipe.people}\n\n{comparison(recipe, []).markdown()}")
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
    write(directory, recipe, result)
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
        seen: dict[object, Mapping[str, object]] = {}
        for values, paper in step.variations(recipe.setups[step.setup]):
            experiment = runs.experiment(paper, step.do in KEEP_SOLVER)
            if experiment.here in seen:
                why = f"at this scale the same as {_words(seen[experiment.here])}"
                result.missing.append(Missing(f"{step.setup}, {_words(values)}", why))
                continue
            seen[experiment.here] = values
            _measure_step(recipe, step, values, experiment, result)


def _measure_step(
    recipe: Recipe, step: Step, values: Mapping[str, object], experiment: Experiment, result: Reproduction
) -> None:
    cells = len(result.cells)
    for item in MEASURES[step.do](experiment, step, **step.options):
        if isinstance(item, Value):
            names = {"setup": step.setup, **values, **item.of}
            row, column = step.row.format(**names), step.column.format(**names)
            place = result.settings_number(experiment.settings(item.changed))
            result.cells.append(Cell(row, column, recipe.paper(row, column), item.value, place))
        elif isinstance(item, Missing):
            result.missing.append(item)
        else:
            result.listings.append(item)
    if len(result.cells) == cells:  # texts have settings too
        result.settings_number(experiment.settings({}))


def _words(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def write(directory: Path, recipe: Recipe, result: Reproduction) -> None:
    """Write table.csv, .md, .tex, .png, .svg and, last, .json.

    Args:
        directory: Where to write.
        recipe: The recipe.
        result: What was measured.
    """
    (directory / "table.json").unlink(missing_ok=True)
    remove_partials(directory)
    write_report(directory / "table", report(recipe, result), csv=_all_cells(result))
    if result.cells:
        _draw(directory / "table", recipe, result)
    write_record(directory / "table.json", result)


def number(value: Number) -> str:
    """A number as a table of the paper would have it; empty for none."""
    if value is None:
        return ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def report(recipe: Recipe, result: Reproduction) -> list[str | Table]:
    """What there is to read about a reproduction.

    Args:
        recipe: The recipe.
        result: What was measured.

    Returns:
        Texts in Markdown, the table of numbers, the settings, what is missing, and the listings.
    """
    blocks: list[str | Table] = [f"# {recipe.title}", f"`{recipe.name}`, {recipe.label} of the paper. {recipe.note}"]
    if recipe.rows or result.cells:
        only_measured = bool(result.options.get("tasks"))
        blocks.append(comparison(recipe, result.cells, only_measured))
    blocks += ["## Settings", _settings(result)]
    if result.missing:
        gaps = [f"- {gap.what}: {gap.why}" for gap in result.missing]
        blocks += ["## Not measured", "\n".join(gaps)]
    for listing in result.listings:
        examples = Table("In order of their coefficients:", [Column("example")], [[line] for line in listing.lines])
        blocks += [f"## {listing.title}", examples]
    return blocks


def comparison(recipe: Recipe, cells: list[Cell], only_measured: bool = False) -> Table:
    """The table of the paper with `measured (paper)` in every cell.

    Args:
        recipe: The recipe.
        cells: What was measured; may be more than the paper has.
        only_measured: Whether to leave out columns of which nothing was measured.

    Returns:
        The table.
    """
    rows, columns, measured = _layout(recipe, cells, only_measured)

    def text(row: str, column: str) -> str:
        paper = number(recipe.paper(row, column))
        return f"{number(measured.get((row, column))) or '-'}{f' ({paper})' if paper else ''}"

    table = Table("Measured, and in brackets the paper's number:", [Column(name) for name in ("", *columns)])
    table.rows += [[row, *(text(row, column) for column in columns)] for row in rows]
    return table


def _layout(
    recipe: Recipe, cells: list[Cell], only_measured: bool
) -> tuple[list[str], list[str], dict[tuple[str, str], Number]]:
    """Rows and columns: the paper's, then what was measured beyond. And (row, column) → what was measured."""
    measured = {(cell.row, cell.column): cell.measured for cell in cells}
    rows = dict.fromkeys([*recipe.rows, *(row for row, _ in measured)])
    columns = dict.fromkeys([*(() if only_measured else recipe.columns), *(column for _, column in measured)])
    return list(rows), list(columns), measured


def _settings(result: Reproduction) -> Table:
    first = result.settings[0].here if result.settings else {}
    shown = dict.fromkeys(name for name in SETTINGS if name in first)
    for each in result.settings:
        # the learning rates follow from the number of examples
        shown |= dict.fromkeys(n for n in each.here if each.here[n] != first[n] and not n.endswith("_rate"))

    def text(here: object, paper: object) -> str:
        values = ["none" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in (here, paper)]
        return values[0] if here == paper else f"{values[0]} ({values[1]})"

    table = Table("Here, and in brackets the paper's where they differ:", [Column(name) for name in shown])
    table.rows += [[text(each.here[name], each.paper[name]) for name in shown] for each in result.settings]
    return table


def _all_cells(result: Reproduction) -> Table:
    """A line per number, with the settings of both."""
    settings = [f"{side}_{name}" for side in ("here", "paper") for name in SETTINGS]
    table = Table(result.title, [Column(name) for name in ("row", "column", "paper", "measured", *settings)])
    for cell in result.cells:
        used = result.settings[cell.settings]
        values = [side[name] for side in (used.here, used.paper) for name in SETTINGS]
        table.rows.append([cell.row, cell.column, cell.paper, cell.measured, *values])
    return table


def _draw(path: Path, recipe: Recipe, result: Reproduction) -> None:
    """A panel per column, a line per row: a ring for the paper's number, a dot for the measured one."""
    rows, columns, measured = _layout(recipe, result.cells, bool(result.options.get("tasks")))
    figure = new_figure(2 + 1.7 * len(columns), 1.2 + 0.28 * len(rows))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
        paper = [recipe.paper(row, column) for row in rows]
        here = [measured.get((row, column)) for row in rows]
        # a ring is seen around the dot of an equal number
        for label, values, size, face, edge in (("paper", paper, 60, "none", BLUE), ("measured", here, 18, RED, RED)):
            known = [(value, place) for place, value in enumerate(values) if value is not None]
            x, y = zip(*known, strict=True) if known else ((), ())
            axes.scatter(x, y, s=size, facecolors=face, edgecolors=edge, label=label)
        axes.set_title(column, fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
        axes.tick_params(labelsize=7)
        plain_axes(axes)
    panels[0].set_yticks(range(len(rows)), [shorten(row, 40) for row in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    write_figure(path, figure, dpi=130)
