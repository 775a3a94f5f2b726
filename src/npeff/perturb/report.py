"""Tables and figures of perturbations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npeff.decompose.base import Decomposition
from npeff.perturb.evaluate import summary
from npeff.perturb.where import Place, by_layer_and_kind
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_object, remove_partials, write_csv, write_json
from npeff.utils.report import new_figure, write_figure
from npeff.utils.tables import write_tables

COLUMNS = ("ratio", "predicted_ratio", "norm_ratio", "magnitude", "top_kl", "related_kl", "random_kl")


def write_report(folder: Path, records: Sequence[dict[str, Any]], notes: dict[str, Any], key: str) -> dict[str, Any]:
    """Write results.json, results.csv, table.md and .tex, and figures of what `key` names; returns the summary."""
    found = summary(records)
    write_json(
        folder / "results.json",
        {"summary": found, "notes": notes, "components": list(records), "key": key},
        sealed=True,
    )
    write_csv(folder / "results.csv", _outcomes(records))
    write_tables(folder / "table", _markdown(records, found))
    if any(record["curve"] for record in records):
        _draw_curves(folder / "curve", records)
    _draw_places(folder / "where", records)
    return found


def _outcomes(records: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """One line for every component, order and sign, below a head."""
    rows = [["component", "fidelity", "order", "sign", *COLUMNS, "flipped_top", "flipped_random"]]
    for record in records:
        for outcome in record["outcomes"]:
            flipped = outcome["flipped"]
            values = [outcome[name] for name in COLUMNS]
            head = [record["component"], record["fidelity"], outcome["order"], outcome["sign"]]
            rows.append([*head, *values, flipped["top"], flipped["random"]])
    return rows


def _markdown(records: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """The best sign and order of every component, and geometric means."""
    lines = [
        "| component | KL ratio | predicted | norm ratio | magnitude | KL top | KL random | flipped top | random |"
        " accuracy top | random | fidelity |",
        "|---" * 12 + "|",
    ]
    for record in records:
        best = record["best"]
        accuracies = [_arrow(best["accuracy"].get(group)) for group in ("top", "random")]
        lines.append(
            f"| {record['component']} | {best['ratio']:.3g} | {_number(best['predicted_ratio'])} | "
            f"{best['norm_ratio']:.2f} | {best['magnitude']:.3g} | {best['top_kl']:.3g} | {best['random_kl']:.3g} | "
            f"{best['flipped']['top']} | {best['flipped']['random']} | {accuracies[0]} | {accuracies[1]} | "
            f"{record['fidelity']:.3f} |"
        )
    lines.append(
        f"| geometric mean | **{found['kl_ratio']:.3g}** | {_number(found['predicted_ratio'])} | "
        f"{found['norm_ratio']:.2f} |" + " |" * 8
    )
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _arrow(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.0%} → {pair[1]:.0%}"


def _draw_curves(path: Path, records: Sequence[dict[str, Any]]) -> None:
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    for record in records:
        if record["curve"]:
            points = record["curve"]
            axes.plot(
                [point["magnitude"] for point in points],
                [point["ratio"] for point in points],
                marker=".",
                label=str(record["component"]),
            )
    axes.set(xscale="log", yscale="log", xlabel="length of the change", ylabel="KL of top ÷ KL of random examples")
    axes.legend(title="component", fontsize="small", ncols=2)
    write_figure(path, figure, dpi=120)


def _draw_places(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A heat map for every component, at most 12: share of the squared length by layer and kind of module."""
    shown = list(records)[:12]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(3 * columns, 3.2 * rows)
    for number, record in enumerate(shown):
        places = [Place(**place) for place in record["where"]]
        layers, kinds, shares = by_layer_and_kind(places)
        axes = figure.add_subplot(rows, columns, number + 1)
        image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0)
        axes.set_title(f"component {record['component']}", fontsize="small")
        axes.set_xticks(range(len(kinds)), [kind.split(".")[-1] for kind in kinds], rotation=90, fontsize="x-small")
        shown_layers = range(0, len(layers), max(1, len(layers) // 6))
        axes.set_yticks(shown_layers, [str(layers[place]) for place in shown_layers])
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes, shrink=0.8)
    write_figure(path, figure, dpi=120)


OVERVIEW = (
    "label",
    "decomposition",
    "direction",
    "way",
    "compared at",
    "components",
    "KL ratio",
    "norm ratio",
    "predicted",
)
_PATIENCE = 10.0
"""Seconds to wait for another perturbation that writes its table; that takes milliseconds."""


def write_overview(folder: Path) -> str:
    """Write table.md, table.tex and table.csv of all finished results below `folder`; returns the table in Markdown."""
    rows = [_read_row(results) for results in sorted(folder.glob("*/results.json"))]
    rows.sort(key=lambda row: -row["KL ratio"])
    lines = ["| " + " | ".join(OVERVIEW) + " |", "|---" * len(OVERVIEW) + "|"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in OVERVIEW) + " |" for row in rows]
    markdown = "\n".join(lines) + "\n"
    with only_one(folder, wait=_PATIENCE):
        remove_partials(folder)
        write_csv(folder / "table.csv", [OVERVIEW, *([row[name] for name in OVERVIEW] for row in rows)])
        write_tables(folder / "table", markdown)
    return markdown


def _read_row(results: Path) -> dict[str, Any]:
    try:
        made_of, found = read_object(results.parent / "config.json"), read_object(results)
        if found["key"] != made_of["key"]:
            raise UserError(f"{results} is of something else. Delete it, and run `npeff perturb` again.")
        return _row(results.parent.name, made_of["config"], found["summary"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{results} is damaged: no {error}. Run the same `npeff perturb` again, or delete it."
        ) from error


def _row(label: str, config: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    fixed = config["magnitude"]
    return {
        "label": label,
        "decomposition": config["decomposition"] or "the only one",
        "direction": config["direction"],
        "way": config["way"],
        "compared at": f"KL {config['target_kl']:g}" if fixed is None else f"length {fixed:g}",
        "components": found["components"],
        "KL ratio": found["kl_ratio"],
        "norm ratio": found["norm_ratio"],
        "predicted": found["predicted_ratio"],
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# options that say where results go, how fast they come or what comes with them, not what they are
_NOT_IDENTITY = ("run", "label", "overwrite", "device", "memory_gb", "predict")


def identity(run: Run, decomposition: Decomposition, config: Mapping[str, Any]) -> str:
    """Digest of the run, the decomposition and those options of `config` that results depend on."""
    options = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    made_of = [run.fingerprint, run.manifest["examples_sha256"], _digest(decomposition), options]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _digest(decomposition: Decomposition) -> str:
    digest = hashlib.sha256(decomposition.components.contiguous().numpy().data)
    digest.update(decomposition.coefficients.contiguous().numpy().data)
    return digest.hexdigest()
