"""`npeff stability`: is the same found again with other seeds, other numbers of components, other collections?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from npeff.analyse import matching, stability_report
from npeff.analyse.config import AnalyseConfig, StabilityConfig
from npeff.analyse.run import analyse_one
from npeff.collect.identity import changes
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.store.examples import whole_texts
from npeff.store.layout import STABILITY
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.version import __version__

SIMILARITIES = ("coefficients", "pseudo_fishers", "best")
"""Of matched components by coefficients and by pseudo-Fishers, and the mean best similarity by coefficients."""


@dataclass(frozen=True)
class Level:
    """The decomposition of one number of components, as splits and their tree need it."""

    coefficients: torch.Tensor
    """[m, C]."""
    tuned: list[str | None]
    """The prediction that each component is tuned to, if it is."""
    texts: list[str]
    """The first example of each component."""


def stability(config: StabilityConfig) -> Path:
    """Make what is missing, write the tables and figures and return their directory."""
    run = Run.open(config.run)
    others = [_open_other(run, path) for path in config.against]
    counts = sorted(config.components)
    seeds = [
        {"components": count, **compare_seeds([_fit(config, run, count, seed) for seed in config.seeds])}
        for count in counts
    ]
    levels = [_level(config, run, count) for count in counts] if len(counts) > 1 else []
    found = {
        "npeff": __version__,
        "run": run.fingerprint,
        "options": {key: value for key, value in to_dict(config).items() if key not in ("run", "device")},
        "seeds": seeds,
        "splits": [_split_row(coarse, fine) for coarse, fine in combinations(levels, 2)],
        "levels": [{"components": len(level.tuned), "tuned": level.tuned, "texts": level.texts} for level in levels],
        "against": [_against_row(config, run, other, count) for other in others for count in counts],
    }
    directory = run.path / STABILITY / config.method
    stability_report.write(directory, found)
    print(f"\n{stability_report.markdown(found)}\nin {directory}")
    return directory


def _open_other(run: Run, path: str) -> Run:
    """A run to compare with, after a check that it is of the same examples."""
    other = Run.open(path)
    if not whole_texts(run.table).equals(whole_texts(other.table)):
        raise UserError(
            f"{path} has other examples than {run.path}, or the same in another order: their coefficients cannot be "
            f"compared. Collect both with the same --data, --limit and --shuffle-seed."
        )
    return other


def _fit(config: StabilityConfig, run: Run, components: int, seed: int) -> Decomposition:
    options = {"method": config.method, "components": components, "seed": seed, "device": config.device}
    name = _name(config, components, seed)
    chosen = DecomposeConfig(run=str(run.path), decomposition=name, **options)  # type: ignore[arg-type]
    return decompose(chosen, made_for="stability")


def _name(config: StabilityConfig, components: int, seed: int) -> str:
    return f"{config.method}-{components}-{seed}"


# --- seeds, and other runs ----------------------------------------------------------------------------------------


def compare_seeds(decompositions: Sequence[Decomposition]) -> dict[str, Any]:
    """Similarities of all pairs of decompositions of the same rows: mean, deviation and single values of each."""
    return _similarities(list(combinations(decompositions, 2)), SIMILARITIES)


def _similarities(pairs: Sequence[tuple[Decomposition, Decomposition]], kinds: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"pairs": len(pairs)}
    by_coefficients = [matching.coefficient_similarity(a.coefficients, b.coefficients) for a, b in pairs]
    values = {
        "coefficients": [matching.matched_similarity(similarity) for similarity in by_coefficients],
        "best": [matching.mean_best_similarity(similarity) for similarity in by_coefficients],
    }
    if "pseudo_fishers" in kinds:
        values["pseudo_fishers"] = [
            matching.matched_similarity(matching.component_similarity(a.components, b.components)) for a, b in pairs
        ]
    for kind in kinds:
        mean, deviation = matching.mean_and_deviation(values[kind]) if pairs else (None, None)
        row |= {kind: mean, f"{kind}_deviation": deviation, f"{kind}_pairs": values[kind]}
    return row


def _against_row(config: StabilityConfig, run: Run, other: Run, components: int) -> dict[str, Any]:
    """Similarity of the decompositions of two runs, seed by seed. Their components may live in different spaces."""
    pairs = [tuple(_fit(config, each, components, seed) for each in (run, other)) for seed in config.seeds]
    changed = changes(run.manifest["identity"], other.manifest["identity"], but=("data.data", "shard_examples"))
    return {
        "against": str(other.path),
        "components": components,
        **_similarities(pairs, ("coefficients", "best")),  # type: ignore[arg-type]
        "differs": {name: [here, there] for name, here, there in changed},
    }


# --- splits -------------------------------------------------------------------------------------------------------


def _level(config: StabilityConfig, run: Run, components: int) -> Level:
    seed = config.seeds[0]
    decomposition = _fit(config, run, components, seed)
    name = _name(config, components, seed)
    analysis = analyse_one(run, name, AnalyseConfig(str(run.path), name, config.top), quiet=True)
    tops = [component.orderings[0].top for component in analysis.component]
    texts = [run.table["text"][top[0]].as_py() if top else "" for top in tops]
    return Level(decomposition.coefficients, analysis.tuned_predictions, texts)


def _split_row(coarse: Level, fine: Level) -> dict[str, Any]:
    """Which coarse component each fine one is a split of, and whether splits keep the prediction tuning."""
    similarity = matching.coefficient_similarity(coarse.coefficients, fine.coefficients)
    parent = matching.parents(similarity)
    kept, splits = matching.preserved(parent, coarse.tuned, fine.tuned)
    return {
        "coarse": len(coarse.tuned),
        "fine": len(fine.tuned),
        "with_splits": len({*parent.tolist()} - {matching.NOBODY}),
        "tuned_splits": splits,
        "preserved": kept,
        "share_preserved": kept / splits if splits else None,
        "mean_best_similarity": matching.mean_best_similarity(similarity),
        "parent": [None if i == matching.NOBODY else i for i in parent.tolist()],
        "similarity": [round(value, 6) for value in similarity.max(dim=0).values.tolist()],
    }
