"""Tables and figures of `npeff stability`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npeff.analyse.records import Similarity, Stability
from npeff.analyse.split_tree import draw_tree, tree_markdown
from npeff.collect.identity import brief
from npeff.utils.configs import write_record
from npeff.utils.files import remove_partials, write_text
from npeff.utils.report import BLUE, RED, Cell, Column, Table, draw_figure, plain_axes, remove_figure, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {"coefficients": "coefficients W", "pseudo_fishers": "pseudo-Fishers G", "best": "best, by coefficients"}


def write(directory: Path, result: Stability) -> None:
    """Write the tables, the tree, the figures and, last, stability.json.

    Args:
        directory: Where to write.
        result: What was measured.
    """
    (directory / "stability.json").unlink(missing_ok=True)
    remove_partials(directory)
    for name, table in (("seeds", seeds_table), ("splits", splits_table), ("against", against_table)):
        table(result).write_csv(directory / f"{name}.csv")
    write_report(directory / "stability", tables(result))
    seeds, tree = directory / "seeds", directory / "tree"
    remove_figure(seeds)  # of other options
    remove_figure(tree)
    tree.with_suffix(".md").unlink(missing_ok=True)
    if any(row.pairs for row in result.seeds):
        draw_figure(seeds, _draw_seeds, result)
    if result.splits:
        write_text(tree.with_suffix(".md"), tree_markdown(result))
        draw_tree(tree, result)
    write_record(directory / "stability.json", result)


# --- tables -------------------------------------------------------------------------------------------------------


def tables(result: Stability) -> list[Table]:
    """The paper's two tables, and one of other runs; those that have rows, and always the one of seeds."""
    others = [table for table in (splits_table(result), against_table(result)) if table.rows]
    return [seeds_table(result), *others]


def seeds_table(result: Stability) -> Table:
    """Seeds.

    Args:
        result: What was measured.

    Returns:
        A line per number of components.
    """
    kinds = ("coefficients", "pseudo_fishers", "best")
    return Table(
        f"Mean similarity of matched components over pairs of {len(result.options['seeds'])} seeds",
        [Column("components"), *_columns(kinds)],
        [[row.components, *_cells(row, kinds)] for row in result.seeds],
    )


def splits_table(result: Stability) -> Table:
    """Splits.

    Args:
        result: What was measured.

    Returns:
        A line per two numbers of components.
    """
    csv = ("with_splits", "mean_best_similarity")
    columns = [
        Column("coarse"),
        Column("fine"),
        Column("preserved", title="kept"),
        Column("tuned_splits", title="of"),
        Column("share_preserved", ".1%", title="share"),
        *(Column(name, only="csv") for name in csv),
        Column("coarse ones with splits", only="text"),
    ]
    names = [column.name for column in columns[:-1]]
    table = Table("Splits of prediction-tuned components that keep the tuning", columns)
    for row in result.splits:
        table.rows.append([*(getattr(row, name) for name in names), f"{row.with_splits} of {row.coarse}"])
    return table


def against_table(result: Stability) -> Table:
    """Other runs.

    Args:
        result: What was measured.

    Returns:
        A line per other run and number of components.
    """
    kinds = ("coefficients", "best")
    table = Table(
        "Similarity to the decompositions of other runs, with the same seeds",
        [Column("against", title="run"), Column("components"), *_columns(kinds), Column("what differs", only="text")],
    )
    for row in result.against:
        differs = "; ".join(f"{name}: {brief(here)} → {brief(there)}" for name, (here, there) in row.differs.items())
        table.rows.append([row.against, row.components, *_cells(row, kinds), differs or "nothing"])
    return table


def _columns(kinds: Sequence[str]) -> list[Column]:
    """Columns of similarities: mean and deviation in CSV, both in one where the table is read."""
    columns = [Column("pairs", only="csv")]
    for kind in kinds:
        columns += [Column(kind, only="csv"), Column(f"{kind}_deviation", only="csv")]
        columns.append(Column(_TITLES[kind], only="text"))
    return columns


def _cells(row: Similarity, kinds: Sequence[str]) -> list[Cell]:
    cells: list[Cell] = [row.pairs]
    for kind in kinds:
        mean, deviation = getattr(row, kind), getattr(row, f"{kind}_deviation")
        cells += [mean, deviation, None if mean is None else f"{mean:.2f} ± {deviation:.2f}"]
    return cells


def _draw_seeds(axes: Axes, result: Stability) -> None:
    """Similarity against the number of components, with deviations over pairs of seeds."""
    counts = [row.components for row in result.seeds]
    for kind, title, colour in (("coefficients", "coefficients", BLUE), ("pseudo_fishers", "pseudo-Fishers", RED)):
        means, deviations = ([getattr(row, name) for row in result.seeds] for name in (kind, f"{kind}_deviation"))
        axes.errorbar(counts, means, yerr=deviations, marker="o", markersize=4, capsize=3, color=colour, label=title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    seeds = len(result.options["seeds"])
    axes.set(ylim=(0, 1.05), xlabel="components", ylabel="mean |cos| of matched components", title=f"{seeds} seeds")
    axes.legend(frameon=False, loc="lower left")
    plain_axes(axes)
