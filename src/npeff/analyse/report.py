"""An analysis for people and machines: JSON, CSV, Markdown, figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from npeff.analyse.tunings import KINDS
from npeff.utils.files import remove_partials, write_csv, write_json
from npeff.utils.report import draw_figure, plain_axes
from npeff.utils.tables import write_tables

JSON = "analysis.json"
FILES = (
    JSON,
    "components.csv",
    "tunings.md",
    "tunings.tex",
    "tunings.png",
    "tunings.svg",
    "density.png",
    "density.svg",
)
TITLES = {"prediction": "prediction-tuned", "label": "label-tuned", "lnp": "LnP-tuned"}
_SHOWN = 25


def write(directory: Path, analysis: dict[str, Any], table: pa.Table) -> None:
    """Write all files of an analysis; the JSON comes last, so a directory without it is not finished."""
    (directory / JSON).unlink(missing_ok=True)
    remove_partials(directory)
    write_components(directory / "components.csv", analysis)
    write_tables(directory / "tunings", markdown(analysis, table))
    for name, draw in (("tunings", _draw_tunings), ("density", _draw_density)):
        draw_figure(directory / name, draw, analysis)
    write_json(directory / JSON, analysis, sealed=True)


def in_words(analysis: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = [f"{analysis['name']}: {analysis['components']} components ({analysis['method']}), top {analysis['top']}"]
    if analysis["left_out"]:
        lines.append(f"  {analysis['left_out']} left out: fewer than {analysis['top']} active examples")
    lines += [f"  {TITLES[kind]:17} {_rate(analysis['tunings'][kind])}" for kind in KINDS]
    return "\n".join(lines)


def _rate(rate: dict[str, Any] | None) -> str:
    if rate is None:
        return "not known: the data have no labels"
    if rate["share"] is None:
        return "not known: no component has enough active examples"
    interval = f"95% interval {rate['low']:.1%} to {rate['high']:.1%}"
    return f"{rate['share']:.1%} ({rate['tuned']} of {rate['of']}; {interval}; {chance_in_words(rate)} by chance)"


def chance_in_words(rate: dict[str, Any]) -> str:
    """The share by chance, in percent, however small."""
    return f"{100 * rate['expected']:.2g}%"


def write_components(path: Path, analysis: dict[str, Any]) -> None:
    """One line per component; lists are joined with spaces, class shares are those of the top of the first ordering."""
    tuned = [f"{kind}_tuned" for kind in KINDS]
    plain = [*tuned, "prediction_purity", "label_purity", "used", "density", "energy"]
    rows = [["component", *plain, "labels", "predictions", "median", "max", "top", "shares", "correlated"]]
    for component in analysis["component"]:
        first = component["orderings"][0]
        quantiles = first["quantiles"]
        rows.append(
            [
                component["number"],
                *(_cell(component[name]) for name in plain),
                *("; ".join(f"{key}: {n}" for key, n in first[name].items()) for name in ("labels", "predictions")),
                *((quantiles[2], quantiles[-1]) if quantiles else ("", "")),
                " ".join(map(str, first["top"])),
                " ".join(map(str, first["shares"] or [])),
                " ".join(map(str, component["correlated"])),
            ]
        )
    write_csv(path, rows)


def _cell(value: Any) -> Any:
    """Empty for unknown, 0 or 1 for a flag."""
    return "" if value is None else int(value) if isinstance(value, bool) else value


def markdown(analysis: dict[str, Any], table: pa.Table) -> str:
    """Tables to paste: the rates, and the components with most energy."""
    eligible, top = analysis["eligible"], analysis["top"]
    lines = [
        f"# Tunings of {analysis['name']}",
        "",
        f"{analysis['components']} components of {analysis['examples']} examples (method {analysis['method']}). "
        f"A component is tuned if its top {top} {'distinct texts' if analysis['unique'] else 'examples'} agree; "
        f"{eligible} have so many active ones, {analysis['left_out']} are left out.",
        "",
        "| | tuned | of | share | 95% interval | by chance |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        rate = analysis["tunings"][kind]
        if rate is None or rate["share"] is None:
            lines.append(f"| {TITLES[kind]} | | | | | |")
            continue
        interval, chance = f"{rate['low']:.1%} to {rate['high']:.1%}", chance_in_words(rate)
        lines.append(
            f"| {TITLES[kind]} | {rate['tuned']} | {rate['of']} | {rate['share']:.1%} | {interval} | {chance} |"
        )
    if len(analysis["orders"]) > 1:
        lines += ["", f"Ranked by {', '.join(analysis['orders'])}: tuned if any is; chance is an upper bound."]
    lines += ["", f"## The {min(_SHOWN, analysis['components'])} components with most energy", ""]
    lines += ["| component | energy | density | tuned | labels in top | predictions in top | first example |"]
    lines += ["|---|---|---|---|---|---|---|"]
    by_energy = sorted(analysis["component"], key=lambda component: (-component["energy"], component["number"]))
    texts = table["text"]
    for component in by_energy[:_SHOWN]:
        first = component["orderings"][0]
        tuned = ", ".join(TITLES[kind].removesuffix("-tuned") for kind in KINDS if component[f"{kind}_tuned"]) or "none"
        text = texts[first["top"][0]].as_py() if first["top"] else ""
        labels, predictions = (as_literal(_most(first[name])) for name in ("labels", "predictions"))
        lines.append(
            f"| {component['number']} | {component['energy']:.2%} | {component['density']:.1%} | {tuned} "
            f"| {labels} | {predictions} | {as_literal(shorten(text, 100))} |"
        )
    return "\n".join(lines) + "\n"


def _most(counts: dict[str, int], shown: int = 4) -> str:
    more = ", ..." if len(counts) > shown else ""
    return ", ".join(f"{key} {n}" for key, n in list(counts.items())[:shown]) + more


def shorten(text: str, length: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def as_literal(text: str) -> str:
    """`text` as literal text of a Markdown table."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return "".join(f"\\{char}" if char in r"\`*_[]<>|#&!~$" else char for char in printable)


# --- figures ------------------------------------------------------------------------------------------------------


def _draw_tunings(axes: Any, analysis: dict[str, Any]) -> None:
    known = [kind for kind in KINDS if (analysis["tunings"][kind] or {}).get("share") is not None]
    rates = [analysis["tunings"][kind] for kind in known]
    places = range(len(known))
    shares = [100 * rate["share"] for rate in rates]
    error = [
        [max(0.0, 100 * (rate["share"] - rate["low"])) for rate in rates],
        [max(0.0, 100 * (rate["high"] - rate["share"])) for rate in rates],
    ]
    axes.bar(places, shares, yerr=error if known else None, width=0.55, color="#4c78a8", capsize=4)
    for place, rate in zip(places, rates, strict=True):
        chance = 100 * rate["expected"]
        axes.hlines(chance, place - 0.35, place + 0.35, color="#e45756", label="by chance" if place == 0 else None)
    axes.set_xticks(list(places), [TITLES[kind] for kind in known])
    axes.set(ylim=(0, 100), ylabel="% of components", title=f"{analysis['name']}: {analysis['eligible']} components")
    if known:
        axes.legend(frameon=False)
    plain_axes(axes)


def _draw_density(axes: Any, analysis: dict[str, Any]) -> None:
    densities = [100 * component["density"] for component in analysis["component"]]
    axes.hist(densities, bins=30, range=(0, 100) if max(densities, default=0) > 30 else None, color="#4c78a8")
    axes.set(xlabel="% of examples in which a component is active", ylabel="components", title=analysis["name"])
    plain_axes(axes)
