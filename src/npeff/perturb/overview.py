"""All perturbations of a run in one table: methods, directions and ways side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_object, remove_partials, write_csv
from npeff.utils.tables import write_tables

COLUMNS = (
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
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    markdown = "\n".join(lines) + "\n"
    with only_one(folder, wait=_PATIENCE):
        remove_partials(folder)
        write_csv(folder / "table.csv", [COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])
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
