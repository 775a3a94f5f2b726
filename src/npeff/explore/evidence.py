"""Perturbations of a run's model along its components, as the page shows them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from npeff.decompose.base import Decomposition
from npeff.perturb.report import ComponentRecord, Made, compared_at, identity, read_components, summarise
from npeff.perturb.where import Place, by_layer_and_kind
from npeff.store.layout import PERTURBATIONS
from npeff.store.run import Run
from npeff.utils.configs import read_record
from npeff.utils.errors import UserError
from npeff.utils.files import sha256
from npeff.utils.text import short

_NUMBERS = ("magnitude", "top_kl", "related_kl", "random_kl", "ratio", "predicted_ratio", "norm_ratio")


@dataclass(frozen=True)
class Perturbation:
    """Results of one `npeff perturb`, as far as it has come."""

    label: str
    config: dict[str, Any]
    records: dict[int, ComponentRecord]
    """Component → what was measured."""


def digests(run: Run) -> dict[str, str]:
    """Label → digest of the files that a perturbation is read from."""
    found = {}
    for folder in _folders(run):
        files = [folder / "config.json", *_record_files(folder)]
        lines = "\n".join(f"{file.name} {sha256(file)}" for file in files)
        found[folder.name] = hashlib.sha256(lines.encode()).hexdigest()
    return found


def read_perturbations(run: Run, name: str, decomposition: Decomposition) -> list[Perturbation]:
    """Perturbations along the components of the decomposition `name`, in order of their labels.

    Those of a decomposition that has been replaced since then are left out.
    """
    found = []
    for folder in _folders(run):
        try:
            found += _read(run, folder, name, decomposition)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is damaged: no {error}. Run the same `npeff perturb` again, or delete it."
            ) from error
    return found


def _read(run: Run, folder: Path, name: str, decomposition: Decomposition) -> list[Perturbation]:
    """The perturbation in `folder`, if it is of this decomposition."""
    made = read_record(Made, folder / "config.json")
    if made.config["decomposition"] not in (None, name) or made.key != identity(run, decomposition, made.config):
        return []
    records = {record.component: record for record in read_components(folder, made.key)}
    return [Perturbation(folder.name, made.config, records)] if records else []


def _folders(run: Run) -> list[Path]:
    return sorted(path.parent for path in (run.path / PERTURBATIONS).glob("*/config.json"))


def _record_files(folder: Path) -> list[Path]:
    return sorted((folder / "components").glob("*.json"))


def overview(perturbations: Sequence[Perturbation], components: int) -> dict[str, Any]:
    """For the overview: each perturbation in a line, and the largest KL ratio of each component."""
    if not perturbations:
        return {}
    ratios = [[found.records[j].best.ratio for found in perturbations if j in found.records] for j in range(components)]
    lines = []
    for found in perturbations:
        whole = summarise(list(found.records.values()))
        numbers = {name: _finite(getattr(whole, name)) for name in ("kl_ratio", "norm_ratio", "predicted_ratio")}
        lines.append({**_about(found), "components": whole.components, **numbers})
    return {"perturbations": lines, "kl_ratio": [_finite(max(values, default=None)) for values in ratios]}


def of_component(perturbations: Sequence[Perturbation], component: int) -> list[dict[str, Any]]:
    """For a component's page: what each perturbation that has it measured."""
    return [
        {**_about(found), **_record(found.records[component])} for found in perturbations if component in found.records
    ]


def _about(found: Perturbation) -> dict[str, Any]:
    config = found.config
    return {
        "label": found.label,
        "direction": config["direction"],
        "way": config["way"],
        "at": compared_at(config),
        "top": config["top"],
        "random": config["random"],
    }


def _record(record: ComponentRecord) -> dict[str, Any]:
    outcomes = record.outcomes
    return {
        "fidelity": _finite(record.fidelity),
        "best": outcomes.index(record.best),
        "outcomes": [
            {
                **{name: getattr(outcome, name) for name in ("order", "sign", "flipped", "accuracy")},
                **{name: _finite(getattr(outcome, name)) for name in _NUMBERS},
            }
            for outcome in outcomes
        ],
        "curve": [[_finite(point.magnitude), _finite(point.ratio)] for point in record.curve],
        "heat": heat_map(record.where),
        "largest": [[entry.parameter, entry.index, _finite(entry.value)] for entry in record.largest],
    }


def heat_map(where: Sequence[Place]) -> dict[str, Any]:
    """Share of the squared length by layer and kind of module; the experts of a layer are put together."""
    places = [replace(place, kind=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place.kind)) for place in where]
    layers, kinds, shares = by_layer_and_kind(places)
    return {"layers": layers, "kinds": kinds, "shares": [[_finite(share) for share in row] for row in shares]}


def _finite(value: float | None) -> float | None:
    """Six digits of a number; None for what is none."""
    return None if value is None or not math.isfinite(value) else short(value)
