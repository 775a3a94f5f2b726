"""`npeff probe`: which components does a new text use?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npeff.analyse.config import ProbeConfig
from npeff.analyse.ranking import top_examples
from npeff.collect.session import collect_texts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.store.rows import ArrayRows
from npeff.store.run import Run
from npeff.utils.errors import UserError


@dataclass(frozen=True)
class Probe:
    """What was found for one text."""

    text: str
    prediction: int
    probability: float
    residual: float
    """Share of the example that the components do not explain."""
    components: list[tuple[int, float, float]]
    """Component, coefficient, and its share of all coefficients, strongest first."""


@dataclass(frozen=True)
class Explained:
    """New texts in terms of a decomposition's components."""

    coefficients: torch.Tensor
    """[n, C]"""
    residuals: torch.Tensor
    """[n]"""
    found: dict[str, torch.Tensor]
    """What else was collected: prediction, probability, set_aside, probabilities, ..."""


def explain_texts(run: Run, decomposition: Decomposition, texts: Sequence[str], **options: Any) -> Explained:
    """Collect texts with a run's model (`options` as for `collect_texts`) and fit them, components fixed."""
    rows, found = collect_texts(run, texts, **options)
    coefficients, residuals = decomposition.explain(_rows(decomposition.kind, rows, found))
    return Explained(coefficients, residuals, found)


def probe(config: ProbeConfig) -> list[Probe]:
    """Print and return the components of each text."""
    run = Run.open(config.run)
    decomposition = open_decomposition(run, config.decomposition)
    results = probe_texts(run, decomposition, config.texts, config.top)
    ranking = decomposition.coefficients.abs().numpy()
    names, texts = run.manifest["task"]["labels"], run.table["text"].to_pylist()
    for found in results:
        answer = names[found.prediction] if names else str(found.prediction)
        print(f"{found.text!r}: {answer} ({found.probability:.1%}), unexplained {found.residual:.1%}")
        for j, coefficient, share in found.components:
            best = top_examples(ranking[:, j], run.usable, config.examples)
            print(f"  component {j:4d}  {coefficient:8.4f}  {share:6.1%}  " + " | ".join(texts[k] for k in best))
    return results


def probe_texts(run: Run, decomposition: Decomposition, texts: Sequence[str], top: int = 8) -> list[Probe]:
    """Collect texts as the run was, and explain them by at most `top` of the components each."""
    explained = explain_texts(run, decomposition, texts)
    coefficients, residuals, found = explained.coefficients, explained.residuals, explained.found
    results = []
    for i, text in enumerate(texts):
        sizes = coefficients[i].abs()
        total = float(sizes.sum())
        order = sizes.argsort(descending=True)[:top].tolist()
        strongest = [(j, float(coefficients[i, j]), float(sizes[j]) / total) for j in order if sizes[j] > 0]
        prediction, probability = int(found["prediction"][i]), float(found["probability"][i])
        results.append(Probe(text, prediction, probability, float(residuals[i]), strongest))
    return results


def _rows(kind: str, rows: ArrayRows, found: dict[str, Any]) -> ArrayRows:
    """The rows of the texts that a method is made of."""
    if kind == "fisher":
        return rows
    if kind not in found:
        raise UserError(f"The run has no {kind} rows. Collect a run with --{kind}.")
    usable = ~found["set_aside"].bool()
    values: torch.Tensor = found[kind]
    return ArrayRows(values[usable].float(), usable.long().numpy())
