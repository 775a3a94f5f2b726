"""Results of perturbations as files: tables and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npeff.perturb.elsewhere import RUNNING_TEXT
from npeff.perturb.evaluate import CurvePoint
from npeff.perturb.protocol import Plan
from npeff.perturb.records import ComponentRecord, Made, Results, chance_limit, read_results, summarise
from npeff.perturb.statistics import compare_ratios
from npeff.perturb.where import by_layer_and_kind
from npeff.perturb.whitening import Notes
from npeff.utils import only_one, read_record, remove_partials, write_record
from npeff.utils.report import Column, Emphasis, Table, draw_figure, new_figure, write_figure, write_report
from npeff.utils.text import shorten

_PATIENCE = 10.0
"""Seconds to wait for another perturbation that writes its table; that takes milliseconds."""
_SHOWN = 12
"""Most heat maps in a figure."""


def write_results(folder: Path, records: list[ComponentRecord], notes: Notes, key: str, plan: Plan) -> Results:
    """Write results.json, results.csv, table.md and .tex, and the figures.

    Args:
        folder: Directory of the results.
        records: All components and nulls so far.
        notes: What was chosen before the first of them.
        key: What they are made of.
        plan: Who took part in what.

    Returns:
        What results.json holds.
    """
    components, nulls = (
        sorted((record for record in records if record.kind == kind), key=lambda record: record.component)
        for kind in ("component", "null")
    )
    parts = {"fit": len(plan.fit), "tune": len(plan.tune.examples), "test": len(plan.test.examples)}
    results = Results(summarise([*components, *nulls], plan.protocol), notes, components, key, nulls, parts)
    write_record(folder / "results.json", results, sealed=True)
    table = _outcomes(results)
    table.write_csv(folder / "results.csv")
    write_report(folder / "table", [results.summary.in_words(), table, *_written(components)])
    curves = {record.component: record.curve for record in components if record.curve}
    if curves:
        draw_figure(folder / "curve", _draw_curves, curves)
    draw_figure(folder / "ratios", _draw_ratios, results)
    _draw_places(folder / "where", components[:_SHOWN])
    return results


_FORMATS = {"order": "", "sign": "", "predicted_ratio": ".3g", "norm_ratio": ".2f", "magnitude": ".3g"}
_FORMATS |= {"top_kl": ".3g", "related_kl": "", "random_kl": ".3g"}
"""What tables say of an outcome, and how; what has no format is only in results.csv."""


def _outcomes(results: Results) -> Table:
    """A line for each component and null."""
    sample = "Held-out" if results.summary.protocol == "heldout" else "In-sample"
    columns = [Column("component"), Column("fidelity", ".3f"), Column("ratio", ".3g", "KL ratio")]
    columns += [Column("low", ".3g"), Column("high", ".3g"), Column("chance", ".3g", "chance, at most")]
    columns.append(Column("effect"))
    for name, style in _FORMATS.items():
        columns.append(Column(name, style, name.replace("_", " ").replace("kl", "KL"), None if style else "csv"))
    columns += [Column("elsewhere", ".2g", "running text, KL a token")]
    columns += [Column(f"flipped_{group}", title=f"flipped {group}") for group in ("top", "random")]
    columns += [Column(f"accuracy {group}", only="text") for group in ("top", "random")]
    table = Table(f"{sample} outcomes of every component, with 95% intervals, and of random groups.", columns)
    for record in (*results.components, *results.nulls):
        best, is_null = record.best, record.kind == "null"
        limit = None if is_null else chance_limit(best, results.summary.null)
        effect = None if limit is None else ("yes" if best.ratio > limit else "none")
        damage = next((damage.kl for damage in best.elsewhere if damage.text == RUNNING_TEXT), None)
        values = [getattr(best, name) for name in _FORMATS]
        values += [damage, *(best.flipped[group] for group in ("top", "random"))]
        values += [_arrow(best.accuracy.get(group)) for group in ("top", "random")]
        name = f"random group {record.component}" if is_null else str(record.component)
        interval = best.interval or (None, None)
        table.rows.append([name, record.fidelity, Emphasis(best.ratio), *interval, limit, effect, *values])
    return table


def _written(records: Sequence[ComponentRecord]) -> list[Table]:
    """What the model writes before and after the changes, if it writes its answers."""
    table = Table(
        "What the model writes for top examples, with the same random numbers before and after the change.",
        [Column(name) for name in ("component", "example", "before", "after")],
    )
    for record in records:
        for each in record.best.written:
            table.rows.append([record.component, each.example, shorten(each.before, 200), shorten(each.after, 200)])
    return [table] if table.rows else []


def _arrow(pair: tuple[float, float] | None) -> str | None:
    return None if pair is None else f"{pair[0]:.0%} → {pair[1]:.0%}"


def _draw_curves(axes: Any, curves: Mapping[int, Sequence[CurvePoint]]) -> None:
    for component, points in curves.items():
        sizes, ratios = [point.magnitude for point in points], [point.ratio for point in points]
        axes.plot(sizes, ratios, marker=".", label=str(component))
    axes.set(xscale="log", yscale="log", xlabel="length of the change", ylabel="KL of top ÷ KL of random examples")
    axes.legend(title="component", fontsize="small", ncols=2)


def _draw_ratios(axes: Any, results: Results) -> None:
    """Ratios with their intervals, largest first, above what random groups give."""
    records = sorted(results.components, key=lambda record: -record.best.ratio)
    places = range(len(records))
    ratios = [record.best.ratio for record in records]
    ends = [record.best.interval or (record.best.ratio, record.best.ratio) for record in records]
    errors = [[at - low for at, (low, _) in zip(ratios, ends, strict=True)]]
    errors += [[high - at for at, (_, high) in zip(ratios, ends, strict=True)]]
    axes.errorbar(places, ratios, yerr=np.maximum(errors, 0), fmt="o", markersize=4, label="components, 95% intervals")
    null = results.summary.null
    if null is not None and null.single is not None:
        axes.axhspan(*null.single, color="0.5", alpha=0.2, linewidth=0, label="95% of random groups")
    axes.axhline(1, color="0.5", linewidth=0.8)
    sample = "held-out" if results.summary.protocol == "heldout" else "in-sample"
    axes.set(yscale="log", xlabel="component", ylabel=f"KL of top ÷ KL of random examples, {sample}")
    axes.set_xticks(places, [str(record.component) for record in records], fontsize="x-small", rotation=90)
    axes.legend(fontsize="small")


def _draw_places(path: Path, records: Sequence[ComponentRecord]) -> None:
    """A heat map for every component: share of the squared length by layer and kind of module."""
    columns = min(4, len(records))
    rows = -(-len(records) // columns)
    figure = new_figure(3 * columns, 3.2 * rows)
    for number, record in enumerate(records):
        layers, kinds, shares = by_layer_and_kind(record.where)
        axes = figure.add_subplot(rows, columns, number + 1)
        image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0)
        axes.set_title(f"component {record.component}", fontsize="small")
        names = [kind.removesuffix(".*").split(".")[-1] for kind in kinds]
        axes.set_xticks(range(len(kinds)), names, rotation=90, fontsize="x-small")
        shown = range(0, len(layers), max(1, len(layers) // 6))
        axes.set_yticks(shown, [str(layers[place]) for place in shown])
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, shrink=0.8)
    write_figure(path, figure, dpi=120)


# --- all perturbations of a run -----------------------------------------------------------------------------


def write_overview(folder: Path) -> Table:
    """Write table.md, table.tex and table.csv of all finished results of a run, the highest ratio first.

    Args:
        folder: RUN/perturbations.

    Returns:
        The table.
    """
    names = ("perturbation", "decomposition", "direction", "way", "protocol", "compared at", "components")
    numbers = ["KL ratio", "low", "high", "random groups", "elsewhere", "norm ratio"]
    numbers += ["÷ first", "÷ first, low", "÷ first, high"]
    caption = "All perturbations of the run: geometric means over components with 95% intervals; paper: in-sample."
    heads = [*map(Column, names), *(Column(name, ".3g") for name in numbers), Column("against the first")]
    table = Table(caption, heads)
    found = [
        (path.parent.name, read_results(path.parent), read_record(Made, path.parent / "config.json").config)
        for path in folder.glob("*/results.json")
    ]
    found.sort(key=lambda each: (each[1].summary.protocol, -each[1].summary.kl_ratio, each[0]))
    for name, results, config in found:
        summary = results.summary
        first, its = next((one, its) for _, one, its in found if one.summary.protocol == summary.protocol)
        paired = config.get("decomposition") == its.get("decomposition")
        against = [None] * 4 if first is results else _against(results, first, paired)
        options = [config.get(option) or "" for option in ("decomposition", "direction", "way")]
        means = [summary.kl_ratio, *(summary.interval or (None, None)), summary.null and summary.null.ratio]
        means += [summary.elsewhere, summary.norm_ratio]
        about = [name, *options, summary.protocol, compared_at(config), summary.components]
        table.rows.append([*about, *means, *against])
    with only_one(folder, wait=_PATIENCE):
        remove_partials(folder)
        write_report(folder / "table", [table], csv=table)
    return table


def _against(results: Results, first: Results, paired: bool) -> list[Any]:
    """Factor, its interval and a verdict of the ratios of one perturbation against those of the best."""
    one, other = ({record.component: record.best.ratio for record in each.components} for each in (results, first))
    same = sorted(set(one) & set(other)) if paired else []
    values = [[each[j] for j in same] if same else list(each.values()) for each in (one, other)]
    found = compare_ratios(values[0], values[1], bool(same))
    return [found.factor, *found.interval, f"{found.verdict} (p = {found.p:.2g}{', paired' if same else ''})"]


def compared_at(config: Mapping[str, Any]) -> str:
    """What components have in common: the divergence of their top examples, or the length of the change."""
    fixed = config.get("magnitude")
    default = 0.01 if config.get("protocol") == "heldout" else 0.1
    return f"KL {config.get('target_kl') or default:g}" if fixed is None else f"length {fixed:g}"
