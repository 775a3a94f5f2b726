"""`npeff compare`: all methods on one collection, in the layout of the paper's table of tunings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npeff.analyse.config import AnalyseConfig, CompareConfig
from npeff.analyse.records import KINDS, TITLES
from npeff.analyse.run import analyse_one
from npeff.decompose.config import METHOD_TITLES, DecomposeConfig, Method, SaeConfig
from npeff.decompose.methods import kind_of
from npeff.decompose.run import decompose
from npeff.store.layout import COMPARISONS
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, write_csv, write_json
from npeff.utils.report import BLUE, PURPLE, RED, draw_figure, plain_axes
from npeff.utils.tables import write_tables
from npeff.utils.text import percent
from npeff.utils.version import __version__


def compare(config: CompareConfig) -> Path:
    """Make and analyse what is missing, write the table and return its directory."""
    run = Run.open(config.run)
    rows, missing = [], {}
    for method in dict.fromkeys(config.methods):
        reason = _cannot(run, method, config.components)
        if reason:
            missing[method] = reason
            print(f"{METHOD_TITLES[method]}: left out, {reason}.")
            continue
        name = f"{method}-{config.components}-{config.seed}"
        decompose(
            DecomposeConfig(
                run=config.run,
                decomposition=name,
                method=method,
                components=config.components,
                seed=config.seed,
                device=config.device,
                sae=config.sae if method == "sae" else SaeConfig(),  # no reason to fit the others again
            ),
            made_for="compare",
        )
        analysis = analyse_one(run, name, AnalyseConfig(config.run, name, config.top, config.unique), quiet=True)
        rows.append(_row(method, to_dict(analysis)))
    if not rows:
        raise UserError(f"{run.path} has the rows of none of these methods: {'; '.join(missing.values())}.")
    directory = run.path / COMPARISONS / f"{config.components}-{config.seed}"
    options = {key: value for key, value in to_dict(config).items() if key not in ("run", "device")}
    task, model = run.manifest["task"]["name"], run.manifest["config"]["model"]["model"]
    found = {"npeff": __version__, "run": run.fingerprint, "task": task, "model": model, "options": options}
    write(directory, {**found, "rows": rows, "missing": missing})
    print(f"\n{markdown(read_json(directory / 'table.json'))}\nin {directory}")
    return directory


def _cannot(run: Run, method: Method, components: int) -> str | None:
    """Why a method cannot be made of this run, if so."""
    kind = kind_of(method)
    if kind not in run.manifest["identity"]["collected"]:
        return f"the run was collected without {kind} rows"
    if method.startswith("svd") and run.source(kind).dim < components:
        return f"rows of {run.source(kind).dim} numbers have no {components} singular vectors"
    return None


def _row(method: Method, analysis: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "components", "eligible", "left_out", "top", "explained", "tunings", "orders")
    return {"method": method, "title": METHOD_TITLES[method], **{key: analysis[key] for key in kept}}


def write(directory: Path, found: dict[str, Any]) -> None:
    """Write the table as CSV, Markdown, LaTeX, figures and, last, JSON."""
    numbers = ("share", "low", "high", "expected", "tuned", "of")
    lines: list[list[Any]] = [["method", "components", "left_out", *(f"{kind}_{n}" for kind in KINDS for n in numbers)]]
    for row in found["rows"]:
        rates = [row["tunings"][kind] or {} for kind in KINDS]
        cells = [rate.get(number) for rate in rates for number in numbers]
        lines.append([row["title"], row["components"], row["left_out"], *cells])
    write_csv(directory / "table.csv", lines)
    write_tables(directory / "table", markdown(found))
    draw_figure(directory / "table", _draw, found)
    write_json(directory / "table.json", found)


def markdown(found: dict[str, Any]) -> str:
    """The table: percentages of tuned components; the highest LnP bold, the second highest underlined."""
    lnp = {row["title"]: _share(row, "lnp") for row in found["rows"]}
    ranks = sorted({value for value in lnp.values() if value}, reverse=True)
    lines = [
        f"Components tuned, in %: {found['task']}, {found['model']}, {found['options']['components']} components",
        "",
    ]
    lines += [
        "| method | Pred | Label | LnP | Pred by chance | LnP by chance | left out |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = ["" if _share(row, kind) is None else f"{100 * (_share(row, kind) or 0):.1f}" for kind in KINDS]
        value = lnp[row["title"]]
        if value and value == ranks[0]:
            cells[2] = f"**{cells[2]}**"
        elif value and len(ranks) > 1 and value == ranks[1]:
            cells[2] = f"<u>{cells[2]}</u>"
        chances = [
            "" if row["tunings"][k] is None else percent(row["tunings"][k]["expected"]) for k in ("prediction", "lnp")
        ]
        lines.append(
            f"| {row['title']} | {' | '.join([*cells, *chances])} | {row['left_out']} of {row['components']} |"
        )
    for method, reason in found["missing"].items():
        lines.append(f"| {METHOD_TITLES[method]} | | | | | | {reason} |")
    return "\n".join(lines) + "\n"


def _share(row: dict[str, Any], kind: str) -> float | None:
    rate = row["tunings"][kind]
    return None if rate is None else rate["share"]


def _draw(axes: Any, found: dict[str, Any]) -> None:
    """Bars of each tuning, a group per method, with intervals."""
    colours = {"prediction": BLUE, "label": PURPLE, "lnp": RED}
    rows = found["rows"]
    for k, kind in enumerate(KINDS):
        known = [(n, row["tunings"][kind]) for n, row in enumerate(rows) if _share(row, kind) is not None]
        if not known:
            continue
        shares = [100 * rate["share"] for _, rate in known]
        error = [
            [max(0.0, 100 * (rate["share"] - rate["low"])) for _, rate in known],
            [max(0.0, 100 * (rate["high"] - rate["share"])) for _, rate in known],
        ]
        places = [n + 0.27 * (k - 1) for n, _ in known]
        axes.bar(places, shares, width=0.25, yerr=error, capsize=2, color=colours[kind], label=TITLES[kind])
    axes.set_xticks(range(len(rows)), [row["title"] for row in rows])
    axes.set(
        ylim=(0, 100), ylabel="% of components", title=f"{found['task']}, {found['options']['components']} components"
    )
    if axes.containers:
        axes.legend(frameon=False)
    plain_axes(axes)
