"""An analysis for people and machines: JSON, CSV, Markdown, LaTeX, figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from npeff.analyse.records import KINDS, TITLES, Analysis, ComponentAnalysis, Kind, Rate
from npeff.store.examples import shown_texts
from npeff.utils import percent, remove_partials, shorten, write_record
from npeff.utils.report import BLUE, PURPLE, RED, Axes, Cell, Column, Table, draw_figure, write_report

JSON = "analysis.json"
_TUNINGS = tuple(f"tunings.{ending}" for ending in ("md", "tex", "png", "svg"))
FILES = (JSON, "components.csv", *_TUNINGS, "density.png", "density.svg")
_SHOWN = 25
_COLOURS: dict[Kind, str] = {"prediction": BLUE, "label": PURPLE, "lnp": RED}
_MEANINGLESS = 0.5
"""Where so many components would be tuned by chance, being tuned says nothing."""


def write(directory: Path, analysis: Analysis, table: pa.Table) -> None:
    """Write all files of an analysis; the JSON comes last, so a directory without it is not finished.

    Args:
        directory: Where to write.
        analysis: What to write.
        table: The run's table of examples, for their texts.
    """
    (directory / JSON).unlink(missing_ok=True)
    remove_partials(directory)
    components_table(analysis).write_csv(directory / "components.csv")
    heading, energies = f"# Tunings of {analysis.name}", energy_table(analysis, shown_texts(table))
    write_report(directory / "tunings", [heading, rates_table(analysis), *_remarks(analysis), energies])
    draw_figure(directory / "tunings", _draw_tunings, analysis)
    draw_figure(directory / "density", _draw_density, analysis)
    write_record(directory / JSON, analysis, sealed=True)


def in_words(analysis: Analysis) -> str:
    """The result in a few lines.

    Args:
        analysis: The analysis.

    Returns:
        The lines.
    """
    lines = [f"{analysis.name}: {analysis.components} components ({analysis.method}), top {analysis.top}"]
    if analysis.left_out:
        lines.append(f"  {analysis.left_out} left out: fewer than {analysis.top} active examples")
    lines += [f"  {TITLES[kind]:17} {_rate_in_words(analysis.tunings[kind])}" for kind in KINDS]
    lines += [f"  {line}" for line in _structure_in_words(analysis)]
    return "\n".join([*lines, *(f"  {line}" for line in one_class_in_words(analysis))])


def _structure_in_words(analysis: Analysis) -> list[str]:
    """How many components recur, and how many belong to groups."""
    lines = []
    if analysis.recurrence_by_chance is not None:
        count, fits = sum(each.recurs for each in analysis.component), analysis.inputs.options.refits
        chance = percent(analysis.recurrence_by_chance)
        lines.append(f"{count} recur in half or more of {fits} other fits ({chance} by chance)")
    argued = Counter(each.argues_for for each in analysis.component if each.argues_for)
    if argued and analysis.agreement_by_chance is not None:
        agreement = fmean(each.agreement for each in analysis.component if each.agreement is not None)
        counts = ", ".join(f"{name.strip()} {count}" for name, count in argued.most_common(4))
        chance = percent(analysis.agreement_by_chance)
        lines.append(f"argue for {counts}; top examples agree {percent(agreement)} (random ones {chance})")
    grouped = {j for group in analysis.groups for j in group.members}
    if grouped:
        lines.append(f"{len(grouped)} belong to groups that the same examples respond to")
    return lines


def one_class_in_words(analysis: Analysis) -> list[str]:
    """Warnings where nearly all examples are of one class, so that agreeing on it is no sign of anything.

    Args:
        analysis: The analysis.

    Returns:
        A sentence about predictions, one about labels, or none.
    """
    lines = []
    for kind, rate, shares, verb in (
        ("prediction", analysis.tunings["prediction"], analysis.predictions, "were predicted"),
        ("label", analysis.tunings["label"], analysis.labels, "are labelled"),
    ):
        # the chance of several orderings is the sum over them
        if rate is None or not shares or rate.expected / len(analysis.orders) < _MEANINGLESS:
            continue
        name, share = next(iter(shares.items()))
        count = round(share * analysis.examples)
        which = f"All {count}" if share == 1 else f"{count} of {analysis.examples}"
        lines.append(f"{which} examples {verb} {name.strip()}: being tuned to a {kind} means nothing here.")
    return lines


def _rate_in_words(rate: Rate | None) -> str:
    if rate is None:
        return "not known: the data have no labels"
    if rate.share is None:
        return "not known: no component has enough active examples"
    interval = f"95% interval {rate.low:.1%} to {rate.high:.1%}"
    return f"{rate.share:.1%} ({rate.tuned} of {rate.of}; {interval}; {percent(rate.expected)} by chance)"


# --- tables -------------------------------------------------------------------------------------------------------


def components_table(analysis: Analysis) -> Table:
    """All components, for components.csv.

    Args:
        analysis: The analysis.

    Returns:
        A line per component; lists are joined with spaces, and classes are counted in the top of the first ordering.
    """
    tuned = [f"{kind}_tuned" for kind in KINDS]
    plain = [*tuned, "prediction_purity", "label_purity", "used", "density", "energy", "recurrence"]
    plain += ["argues_for", "agreement"]
    names = ["component", *plain, "labels", "predictions", "median", "max", "top", "shares", "correlated"]
    table = Table(f"Components of {analysis.name}", [Column(name) for name in names])
    for component in analysis.component:
        first = component.orderings[0]
        counts = (
            "; ".join(f"{key}: {n}" for key, n in classes.items()) for classes in (first.labels, first.predictions)
        )
        extremes = (first.quantiles[2], first.quantiles[-1]) if first.quantiles else (None, None)
        lists = (" ".join(map(str, values or ())) for values in (first.top, first.shares, component.correlated))
        table.rows.append([component.number, *(getattr(component, name) for name in plain), *counts, *extremes, *lists])
    return table


def rates_table(analysis: Analysis) -> Table:
    """How many components are tuned.

    Args:
        analysis: The analysis.

    Returns:
        A line for each way of being tuned.
    """
    agreeing = "distinct texts" if analysis.unique else "examples"
    caption = (
        f"{analysis.components} components of {analysis.examples} examples (method {analysis.method}). "
        f"A component is tuned if its top {analysis.top} {agreeing} agree; {analysis.eligible} have so many active "
        f"ones, {analysis.left_out} are left out."
    )
    columns = [Column(""), Column("tuned"), Column("of"), Column("share", ".1%"), Column("95% interval")]
    table = Table(caption, [*columns, Column("by chance")])
    for kind in KINDS:
        rate = analysis.tunings[kind]
        cells: list[Cell] = [None] * 5
        if rate is not None and rate.share is not None:
            interval = f"{rate.low:.1%} to {rate.high:.1%}"
            cells = [rate.tuned, rate.of, rate.share, interval, percent(rate.expected)]
        table.rows.append([TITLES[kind], *cells])
    return table


def _remarks(analysis: Analysis) -> list[str]:
    """What to know when reading the table of rates."""
    remarks = one_class_in_words(analysis)
    if len(analysis.orders) > 1:
        remarks.append(f"Ranked by {', '.join(analysis.orders)}: tuned if any is; chance is an upper bound.")
    return remarks


def energy_table(analysis: Analysis, texts: pa.ChunkedArray) -> Table:
    """The components with most energy, those that recur first where that is known.

    Args:
        analysis: The analysis.
        texts: Texts of all examples, [m].

    Returns:
        A line per component.
    """
    recurring = analysis.recurrence_by_chance is not None
    shares = {"energy": ".2%", **({"recurrence": ".0%"} if recurring else {}), "density": ".1%"}
    columns = [Column("component"), *(Column(name, style) for name, style in shares.items())]
    argued = analysis.agreement_by_chance is not None
    columns += [Column("argues for"), Column("agreement", ".0%")] * argued
    columns += map(Column, ("tuned", "labels in top", "predictions in top", "first example"))
    order = ", those that recur first" if recurring else ""
    table = Table(f"## The {min(_SHOWN, analysis.components)} components with most energy{order}", columns)
    leading = sorted(analysis.component, key=lambda each: (not each.recurs, -each.energy, each.number))
    for component in leading[:_SHOWN]:
        first = component.orderings[0]
        text = texts[first.top[0]].as_py() if first.top else ""
        counts = (_most_frequent(classes) for classes in (first.labels, first.predictions))
        numbers = [component.number, *(getattr(component, name) for name in shares)]
        numbers += [component.argues_for, component.agreement] * argued
        table.rows.append([*numbers, _tuned(component), *counts, shorten(text, 100)])
    return table


def _tuned(component: ComponentAnalysis) -> str:
    return ", ".join(TITLES[kind].removesuffix("-tuned") for kind in KINDS if component.tuned(kind)) or "none"


def _most_frequent(counts: dict[str, int], shown: int = 4) -> str:
    more = ", ..." if len(counts) > shown else ""
    return ", ".join(f"{key} {n}" for key, n in list(counts.items())[:shown]) + more


# --- figures ------------------------------------------------------------------------------------------------------


def draw_rates(axes: Axes, kind: Kind, rates: Mapping[float, Rate | None], width: float) -> None:
    """Bars with intervals: how many components are tuned in one way.

    Args:
        axes: Where to draw.
        kind: The way of being tuned, which has a colour of its own.
        rates: Place on the axis → rate; those that are not known are left out.
        width: Width of a bar.
    """
    known = {place: rate for place, rate in rates.items() if rate is not None and rate.share is not None}
    if known:
        ends = np.array([(rate.share, rate.low, rate.high) for rate in known.values()], dtype=float)
        share, low, high = 100 * ends.T
        errors = np.maximum([share - low, high - share], 0)
        axes.bar(list(known), share, width, yerr=errors, color=_COLOURS[kind], label=TITLES[kind], capsize=3)
    axes.set(ylim=(0, 100), ylabel="% of components")


def _draw_tunings(axes: Axes, analysis: Analysis) -> None:
    for place, kind in enumerate(KINDS):
        rate = analysis.tunings[kind]
        draw_rates(axes, kind, {place: rate}, width=0.55)
        if rate is not None and rate.share is not None:
            axes.hlines(100 * rate.expected, place - 0.35, place + 0.35, color="black", linestyle="--")
    axes.set_xticks(range(len(KINDS)), [TITLES[kind] for kind in KINDS])
    axes.set(title=f"{analysis.name}: {analysis.eligible} components; dashed: by chance")


def draw_by_count(axes: Axes, rows: Sequence[Any], lines: Mapping[str, str], ylabel: str, scale: float = 1) -> None:
    """Lines against the number of components.

    Args:
        axes: Where to draw.
        rows: A record for each number of `components`.
        lines: Field of the records → label of its line. A field `NAME_deviation` gives it
            error bars; None is not drawn.
        ylabel: What the values are.
        scale: What to multiply values with.
    """
    counts = [row.components for row in rows]
    for (name, label), colour in zip(lines.items(), (BLUE, RED), strict=True):
        columns = ([getattr(row, field, None) for row in rows] for field in (name, f"{name}_deviation"))
        values, deviations = (scale * np.array(column, dtype=float) for column in columns)
        errors = None if np.isnan(deviations).all() else deviations
        axes.errorbar(counts, values, yerr=errors, marker="o", markersize=4, capsize=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set(xlabel="components", ylabel=ylabel)
    axes.legend(frameon=False)


def _draw_density(axes: Axes, analysis: Analysis) -> None:
    densities = [100 * component.density for component in analysis.component]
    axes.hist(densities, bins=30, range=(0, 100) if max(densities, default=0) > 30 else None, color="#4c78a8")
    axes.set(xlabel="% of examples in which a component is active", ylabel="components", title=analysis.name)
