"""`npeff stability`: do other seeds find the same components, and how do they split when there are more of them?"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import tyro

from npeff import __version__
from npeff.analyse import matching
from npeff.analyse.report import JSON
from npeff.analyse.run import AnalyseConfig, analyse_one
from npeff.configs import to_dict
from npeff.decompose import Decomposition
from npeff.decompose.config import Method
from npeff.decompose.run import DecomposeConfig, decompose
from npeff.errors import UserError
from npeff.files import read_json, whole_file, write_json, write_text
from npeff.store import Run

DIRECTORY = "stability"


@dataclass(frozen=True)
class StabilityConfig:
    """Decompose a run with several seeds and numbers of components, and compare the results. Continues if stopped."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    components: tuple[int, ...] = (32, 128)
    """Numbers of components; seeds are compared for each, and splits between each two of them."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds to compare; splits are those of the first."""
    method: Method = "npeff"
    """Method to decompose with."""
    top: int = 16
    """Top examples that must agree for a component to be tuned."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("components", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"--{name} should be different numbers, at least one.")
        if len(self.seeds) < 2 and len(self.components) < 2:
            raise UserError("Nothing to compare: give at least two seeds or two numbers of components.")


def stability(config: StabilityConfig) -> Path:
    """Make what is missing, write the tables and return their directory."""
    run = Run.open(config.run)
    counts = sorted(config.components)
    seeds = [_seed_row([_fit(config, count, seed) for seed in config.seeds], count) for count in counts]
    splits = [_split_row(config, run, coarse, fine) for coarse, fine in combinations(counts, 2)]
    directory = run.path / DIRECTORY / config.method
    options = {key: value for key, value in to_dict(config).items() if key not in ("run", "device")}
    found = {"npeff": __version__, "run": run.fingerprint, "options": options, "seeds": seeds, "splits": splits}
    _write(directory, found)
    print(f"\n{markdown(found)}\nin {directory}")
    return directory


def _name(config: StabilityConfig, components: int, seed: int) -> str:
    return f"{config.method}-{components}-{seed}"


def _fit(config: StabilityConfig, components: int, seed: int) -> Decomposition:
    name = _name(config, components, seed)
    options = {"method": config.method, "components": components, "seed": seed, "device": config.device}
    return decompose(DecomposeConfig(run=config.run, name=name, **options))  # type: ignore[arg-type]


def _seed_row(decompositions: list[Decomposition], components: int) -> dict[str, Any]:
    """Similarity of all pairs of decompositions, by coefficients (W) and by components (G)."""
    pairs = list(combinations(decompositions, 2))
    by_coefficients = [
        matching.matched_similarity(matching.coefficient_similarity(a.coefficients, b.coefficients)) for a, b in pairs
    ]
    by_components = [
        matching.matched_similarity(matching.component_similarity(a.components, b.components)) for a, b in pairs
    ]
    row: dict[str, Any] = {"components": components, "pairs": len(pairs)}
    for name, values in (("coefficients", by_coefficients), ("pseudo_fishers", by_components)):
        mean, deviation = matching.mean_and_deviation(values) if values else (None, None)
        row |= {name: mean, f"{name}_deviation": deviation, f"{name}_pairs": values}
    return row


def _split_row(config: StabilityConfig, run: Run, coarse: int, fine: int) -> dict[str, Any]:
    """Which fine components each coarse one splits into, and whether they keep its prediction tuning."""
    seed = config.seeds[0]
    first, second = _fit(config, coarse, seed), _fit(config, fine, seed)
    parent = matching.parents(first.coefficients, second.coefficients)
    tuned = [_tuned_to(config, run, _name(config, count, seed)) for count in (coarse, fine)]
    kept, splits = matching.preserved(parent, *tuned)
    similarity = matching.coefficient_similarity(first.coefficients, second.coefficients)
    children: list[list[int]] = [[] for _ in range(coarse)]
    for j, i in enumerate(parent.tolist()):
        children[i].append(j)
    return {
        "coarse": coarse,
        "fine": fine,
        "with_splits": sum(bool(found) for found in children),
        "tuned_splits": splits,
        "preserved": kept,
        "share_preserved": kept / splits if splits else None,
        "mean_best_similarity": matching.mean_best_similarity(similarity),
        "children": children,
    }


def _tuned_to(config: StabilityConfig, run: Run, name: str) -> list[str | None]:
    folder = analyse_one(run, name, AnalyseConfig(config.run, name, config.top), quiet=True)
    return tuned_predictions(read_json(folder / JSON))


def tuned_predictions(analysis: dict[str, Any]) -> list[str | None]:
    """The prediction that each component is tuned to, if it is, in its first ordering that is."""
    found: list[str | None] = []
    for component in analysis["component"]:
        tuned = [ordering for ordering in component["orderings"] if ordering["prediction_tuned"]]
        found.append(next(iter(tuned[0]["predictions"])) if tuned else None)
    return found


def _write(directory: Path, found: dict[str, Any]) -> None:
    for name in ("seeds", "splits"):
        path = directory / f"{name}.csv"
        with whole_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
            plain = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in found[name]]
            writer = csv.DictWriter(handle, list(plain[0]) if plain else [])
            writer.writeheader()
            writer.writerows(plain)
    write_text(directory / "stability.md", markdown(found))
    write_json(directory / "stability.json", found)


def markdown(found: dict[str, Any]) -> str:
    """The paper's two tables."""
    lines = [f"Mean similarity of matched components over pairs of {len(found['options']['seeds'])} seeds", ""]
    lines += ["| components | coefficients W | pseudo-Fishers G |", "|---|---|---|"]
    for row in found["seeds"]:
        cells = [
            "" if row[name] is None else f"{row[name]:.2f} ± {row[f'{name}_deviation']:.2f}"
            for name in ("coefficients", "pseudo_fishers")
        ]
        lines.append(f"| {row['components']} | {' | '.join(cells)} |")
    if found["splits"]:
        lines += ["", "Splits of prediction-tuned components that keep the tuning", ""]
        lines += ["| coarse | fine | kept | of | share | coarse ones with splits |", "|---|---|---|---|---|---|"]
    for row in found["splits"]:
        share = "" if row["share_preserved"] is None else f"{row['share_preserved']:.1%}"
        lines.append(
            f"| {row['coarse']} | {row['fine']} | {row['preserved']} | {row['tuned_splits']} | {share} "
            f"| {row['with_splits']} of {row['coarse']} |"
        )
    return "\n".join(lines) + "\n"
