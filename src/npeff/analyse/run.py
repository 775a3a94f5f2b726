"""`npeff analyse`: tunings, energies, correlations and top examples of a run's decompositions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npeff.analyse import matrix, report, tunings
from npeff.analyse.config import AnalyseConfig
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.store.examples import encode, whole_texts
from npeff.store.layout import ANALYSIS, decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object
from npeff.utils.types import Array
from npeff.utils.version import __version__

FORMAT = 1


def analyse(config: AnalyseConfig) -> list[Path]:
    """Analyse one or all decompositions of a run; returns their analysis directories."""
    run = Run.open(config.run)
    names = [config.name] if config.name else decomposition_names(run.path)
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff decompose {run.path}` makes one.")
    return [analyse_one(run, name, config) for name in names]


def analyse_one(run: Run, name: str, config: AnalyseConfig, quiet: bool = False) -> Path:
    """Analyse the decomposition `name`, unless that is done with the same options; `quiet` does not mention it."""
    folder = decomposition_folder(run.path, name)
    inputs = _inputs(run, folder, config)
    if is_current(folder, inputs):
        if not quiet:
            print(f"{name}: the analysis in {folder / ANALYSIS} is up to date.")
        return folder / ANALYSIS
    decomposition = open_decomposition(run, name)
    found = summarise(name, decomposition, read_examples(run), config)
    report.write(folder / ANALYSIS, {"format": FORMAT, "npeff": __version__, "inputs": inputs, **found}, run.table)
    print(report.in_words(found))
    print(f"  in {folder / ANALYSIS}")
    return folder / ANALYSIS


def _inputs(run: Run, folder: Path, config: AnalyseConfig) -> dict[str, Any]:
    """What an analysis depends on."""
    options = {key: value for key, value in to_dict(config).items() if key not in ("run", "name")}
    digest = read_object(folder / "config.json").get("sha256")
    # the table's own hash: verifying a run may mend predictions that the fingerprint does not cover
    return {"run": run.fingerprint, "examples": run.manifest["examples_sha256"], "tensors": digest, "options": options}


def is_current(folder: Path, inputs: dict[str, Any]) -> bool:
    """Whether the analysis in `folder` was made of these inputs by this version of the analysis, and is whole."""
    if not all((folder / ANALYSIS / name).is_file() for name in report.FILES):
        return False
    old = read_object(folder / ANALYSIS / report.JSON)
    return old.get("format") == FORMAT and old.get("inputs") == inputs


def read_examples(run: Run) -> tunings.Examples:
    """What tunings need of a run's example table."""
    table, names = run.table, run.manifest["task"]["labels"]
    labels = table["label"].fill_null(tunings.UNKNOWN).to_numpy().astype(np.int64)
    if names:  # the task's own order of classes
        codes, texts = table["prediction"].to_numpy().astype(np.int64), names
    else:
        codes, texts = encode(table["prediction_text"])
    return tunings.Examples(
        predictions=tunings.Classes(codes, texts),
        labels=tunings.Classes(labels, names),
        texts=encode(whole_texts(table))[0],
        usable=run.usable,
    )


def summarise(
    name: str, decomposition: Decomposition, examples: tunings.Examples, config: AnalyseConfig
) -> dict[str, Any]:
    """Everything about one decomposition, as JSON values. `coefficients` [m, C] are held once, and a copy if signed."""
    coefficients, orders = decomposition.coefficients, decomposition.orders

    def scores() -> Iterator[tuple[str, torch.Tensor]]:
        for order in orders:
            yield order, decomposition.scores(order)

    components = tunings.find_tunings(scores(), examples, config.top, config.unique)
    expected = tunings.expected_rates(examples, config.top, len(orders), config.unique)
    energy, used = decomposition.energy, decomposition.used
    related, correlations = matrix.strongest_correlations(coefficients, config.correlated)
    rates = tunings.rates(components, expected)
    usable = int(examples.usable.sum())
    eligible = sum(component.tuned["prediction"] is not None for component in components)
    return {
        "name": name,
        "method": decomposition.config.method,
        "orders": list(orders),
        "examples": usable,
        "components": len(components),
        "eligible": eligible,
        "left_out": len(components) - eligible,
        "top": config.top,
        "unique": config.unique,
        "tunings": {kind: rate and {**vars(rate), "share": rate.share} for kind, rate in rates.items()},
        "labels": _class_shares(examples.labels, examples.usable),
        "predictions": _class_shares(examples.predictions, examples.usable),
        "explained": _explained(decomposition, examples.usable),
        "component": [
            {
                "number": component.number,
                **{f"{kind}_tuned": flag for kind, flag in component.tuned.items()},
                "prediction_purity": component.purity("prediction"),
                "label_purity": component.purity("label"),
                "used": int(used[component.number]),
                "density": int(used[component.number]) / max(usable, 1),
                "energy": float(energy[component.number]),
                "correlated": related[component.number].tolist(),
                "correlation": _rounded(correlations[component.number].tolist()),
                "orderings": [
                    _ordering(ordering, component.number, decomposition) for ordering in component.orderings
                ],
            }
            for component in components
        ],
    }


def _ordering(ordering: tunings.Ordering, number: int, decomposition: Decomposition) -> dict[str, Any]:
    values = {**vars(ordering), "scores": _rounded(ordering.scores), "quantiles": _rounded(ordering.quantiles)}
    shares = decomposition.shares(decomposition.coefficients[ordering.top], number)
    values["shares"] = None if shares is None else _rounded(shares.tolist())
    return values


def _class_shares(classes: tunings.Classes, usable: Array, most: int = 200) -> dict[str, float] | None:
    """Share of each class among usable examples, largest first, at most `most` of them; None if none is known."""
    codes = classes.codes[usable & (classes.codes != tunings.UNKNOWN)]
    if not len(codes):
        return None
    counts = np.bincount(codes, minlength=len(classes.names))
    order = np.argsort(-counts, kind="stable")[:most]
    return {classes.names[i]: counts[i] / len(codes) for i in order.tolist() if counts[i]}


def _explained(decomposition: Decomposition, usable: Array) -> float | None:
    """Mean over usable examples of 1 − residual."""
    residuals = decomposition.residuals[torch.from_numpy(usable)]
    return float(1 - residuals.double().mean()) if len(residuals) else None


def _rounded(values: list[float]) -> list[float]:
    """Six significant digits: what float32 holds, and half the JSON."""
    return [float(f"{value:.6g}") for value in values]
