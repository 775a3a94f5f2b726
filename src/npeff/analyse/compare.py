"""`npeff compare`: all methods on one collection, in the layout of the paper's table of tunings."""

from dataclasses import fields
from typing import Any

from npeff.analyse.config import CompareConfig
from npeff.analyse.records import KINDS, AnalysisOptions, Kind, Summary
from npeff.analyse.report import draw_rates
from npeff.analyse.run import analyse_one
from npeff.analyse.tunings import compare_rates
from npeff.decompose.config import METHOD_TITLES, DecomposeConfig, Method, SaeConfig, suggest_components, suggest_fitted
from npeff.decompose.methods import kind_of
from npeff.decompose.run import common_holdout, decompose
from npeff.store.layout import COMPARISONS
from npeff.store.run import Run
from npeff.utils import Record, UserError, __version__, percent, replace, to_dict
from npeff.utils.report import Axes, Cell, Column, Emphasis, Table, write_result

_COLUMNS: dict[Kind, str] = {"prediction": "Pred", "label": "Label", "lnp": "LnP"}
_NUMBERS = ("share", "low", "high", "expected", "tuned", "of")
"""What the CSV file has of each rate."""


class ComparedMethod(Summary, kw_only=True):
    """The tunings of one method, from its analysis."""

    title: str
    """What the paper calls the method."""
    lnp_p: float | None = None
    """Two-sided p of Fisher's exact test: its number of LnP-tuned components against that of the first method."""


class Comparison(Record):
    """The tunings of several methods on one run (table.json)."""

    npeff: str
    """Version that wrote it."""
    run: str
    """Fingerprint of the run."""
    task: str
    """Name of the task."""
    model: str
    """Name of the model."""
    options: dict[str, Any]
    """Options of the command."""
    rows: list[ComparedMethod]
    """The methods that were compared."""
    missing: dict[Method, str]
    """The methods that could not be, and why."""


def compare(config: CompareConfig) -> Comparison:
    """Decompose a run with several methods where that is not done, and write a table of their tunings.

    Args:
        config: The run, and what to compare.

    Returns:
        What table.json holds.

    Raises:
        UserError: The run has the rows of none of the methods.
    """
    run = Run.open(config.run)
    components = config.components or suggest_components(suggest_fitted(int(run.usable.sum())))
    config = replace(config, components=components)
    holdout = common_holdout(run, (f"{method}-{components}-{config.seed}" for method in config.methods))
    rows, missing = [], {}
    for method in dict.fromkeys(config.methods):
        reason = _cannot(run, method, components)
        if reason:
            missing[method] = reason
            print(f"{METHOD_TITLES[method]}: left out, {reason}.")
        else:
            rows.append(_measure(run, method, components, holdout, config))
    if not rows:
        raise UserError(f"{run.path} has the rows of none of these methods: {'; '.join(missing.values())}.")
    comparison = Comparison(
        npeff=__version__,
        run=run.fingerprint,
        task=run.manifest.task.name,
        model=run.manifest.model,
        options={key: value for key, value in to_dict(config).items() if key not in ("run", "device")},
        rows=_tested(rows),
        missing=missing,
    )
    directory = run.path / COMPARISONS / f"{components}-{config.seed}"
    absent = [f"{METHOD_TITLES[method]} is left out: {reason}." for method, reason in missing.items()]
    text = write_result(directory / "table", comparison, [table(comparison), *absent], _draw)
    print(f"\n{text}\nin {directory}")
    return comparison


def _cannot(run: Run, method: Method, components: int) -> str | None:
    """Why a method cannot be made of this run, if so."""
    kind = kind_of(method)
    if kind not in run.manifest.collected:
        return f"the run was collected without {kind} rows"
    if method.startswith("svd") and run.source(kind).dim < components:
        return f"rows of {run.source(kind).dim} entries have no {components} singular vectors"
    return None


def _measure(run: Run, method: Method, components: int, holdout: float, config: CompareConfig) -> ComparedMethod:
    """Decompose with one method, analyse that, and give the entry of the table."""
    sae = config.sae if method == "sae" else SaeConfig()  # no reason to fit the others again
    which = {"method": method, "components": components, "seed": config.seed, "holdout": holdout}
    wanted = DecomposeConfig(run=config.run, device=config.device, sae=sae, **which)  # type: ignore[arg-type]
    name = decompose(wanted, made_for="compare").config.name
    analysis = analyse_one(run, name, AnalysisOptions(config.top, config.unique), quiet=True)
    summary = {item.name: getattr(analysis, item.name) for item in fields(Summary)}
    return ComparedMethod(**summary, title=METHOD_TITLES[method])


def _tested(rows: list[ComparedMethod]) -> list[ComparedMethod]:
    """With tests of every other method against the first."""
    first = rows[0].tunings["lnp"]
    return [rows[0], *(replace(row, lnp_p=compare_rates(first, row.tunings["lnp"])) for row in rows[1:])]


def table(comparison: Comparison) -> Table:
    """Percentages of tuned components; the highest LnP is bold, the second highest underlined.

    Args:
        comparison: What was measured.

    Returns:
        A line per method; the CSV file has the rates with all their numbers.
    """
    caption = f"{comparison.task}, {comparison.model}, {comparison.options['components']} components"
    in_csv = ["components", "left_out", *(f"{kind}_{number}" for kind in KINDS for number in _NUMBERS)]
    against = f"LnP p, against {comparison.rows[0].title}"
    columns = [
        Column("method"),
        *(Column(name, only="csv") for name in in_csv),
        *(Column(_COLUMNS[kind], ".1f", only="text") for kind in KINDS),
        *(Column(name, only="text") for name in ("LnP 95% interval", "Pred by chance", "LnP by chance", "left out")),
        Column("lnp_p", ".2g", against),
    ]
    lines = Table(f"Components tuned, in %: {caption}. p of Fisher's exact test.", columns)
    ranks = sorted({share for row in comparison.rows if (share := _share(row, "lnp"))}, reverse=True)
    for row in comparison.rows:
        rates = [row.tunings[kind] for kind in KINDS]
        numbers = [getattr(rate, number, None) for rate in rates for number in _NUMBERS]
        cells: list[Cell] = [None if (share := _share(row, kind)) is None else 100 * share for kind in KINDS]
        if (lnp := _share(row, "lnp")) in ranks[:2]:
            cells[-1] = Emphasis(100 * lnp, "bold" if lnp == ranks[0] else "underlined")
        interval = None if rates[2] is None else f"{100 * rates[2].low:.1f} to {100 * rates[2].high:.1f}"
        chances = [interval, *(None if rate is None else percent(rate.expected) for rate in (rates[0], rates[2]))]
        left_out = f"{row.left_out} of {row.components}"
        lines.rows.append([row.title, row.components, row.left_out, *numbers, *cells, *chances, left_out, row.lnp_p])
    return lines


def _share(row: ComparedMethod, kind: Kind) -> float | None:
    rate = row.tunings[kind]
    return None if rate is None else rate.share


def _draw(axes: Axes, comparison: Comparison) -> None:
    """Bars of each tuning, a group per method, with intervals."""
    for k, kind in enumerate(KINDS):
        draw_rates(axes, kind, {n + 0.27 * (k - 1): row.tunings[kind] for n, row in enumerate(comparison.rows)}, 0.25)
    axes.set_xticks(range(len(comparison.rows)), [row.title for row in comparison.rows])
    axes.set(title=f"{comparison.task}, {comparison.options['components']} components")
    if axes.containers:
        axes.legend(frameon=False)
