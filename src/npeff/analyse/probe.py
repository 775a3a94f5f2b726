"""`npeff probe`: which components does a new text use?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from npeff.analyse.config import ProbeConfig
from npeff.analyse.ranking import top_examples
from npeff.collect.session import Prepared, answer_texts, collect_texts, prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.store.examples import shown_texts
from npeff.store.layout import choose_decomposition
from npeff.store.rows import ArrayRows
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.text import shorten

_WIDTH = 100
"""Characters of a top example that are printed."""


class ProbedComponent(NamedTuple):
    """A component of a text."""

    component: int
    """Its number."""
    coefficient: float
    """How much of it is in the text."""
    share: float | None
    """How much of the text it explains; the shares of all components add up to 1 less the residual. None for methods
    that do not add up components (clusters, sae)."""


@dataclass(frozen=True)
class Probe:
    """Which components explain how much of one text."""

    text: str
    """The text."""
    prediction: int
    """The model's answer: number of the label, or id of the token where answers are from the vocabulary."""
    prediction_text: str
    """The same as text: name of the label, or the token."""
    probability: float
    """What the model gives to this answer."""
    residual: float
    """Share of the text that the components do not explain."""
    components: list[ProbedComponent]
    """The strongest components: those that explain most; for methods without shares, with the largest coefficients."""
    set_aside: bool = False
    """Whether a value was not finite, so that nothing can be said."""


@dataclass(frozen=True)
class Explained:
    """New texts in terms of a decomposition's components."""

    coefficients: torch.Tensor
    """[n, C]"""
    residuals: torch.Tensor
    """[n]"""
    shares: torch.Tensor | None
    """How much of each text each component explains, [n, C]; None for methods that do not add up components."""
    collected: dict[str, torch.Tensor]
    """What else was collected: prediction, probability, set_aside, probabilities, ..."""


def explain_texts(
    run: Run,
    decomposition: Decomposition,
    texts: Sequence[str],
    prepared: Prepared | None = None,
    fields: Sequence[Mapping[str, str]] = (),
) -> Explained:
    """Collect texts with a run's model and fit them, components fixed.

    All texts have the same random directions, if there are any: what differs between them is then due to the texts.

    Args:
        run: The run.
        decomposition: One of its decompositions, into C components.
        texts: n texts.
        prepared: From `prepare_run`, if it was called already.
        fields: For each text the other columns that the task's prompt names, if it names any.

    Returns:
        Coefficients, residuals and shares of the texts; zeros for a text that was set aside.

    Raises:
        UserError: The run has no rows of the kind that the method is made of.
    """
    rows, collected = collect_texts(run, texts, prepared, fields, [0] * len(texts))
    kind = decomposition.kind
    if kind not in ("fisher", *collected):
        raise UserError(f"The run has no {kind} rows. Collect a run with --{kind}.")
    if kind != "fisher":
        usable = ~collected["set_aside"].bool()
        rows = ArrayRows(collected[kind][usable].float(), usable.long().numpy())
    coefficients, residuals = decomposition.explain(rows)
    coefficients = torch.nan_to_num(coefficients)
    return Explained(coefficients, torch.nan_to_num(residuals), decomposition.shares(coefficients), collected)


def probe(config: ProbeConfig) -> list[Probe]:
    """Print and return the components of texts.

    Args:
        config: The run, the texts, and how much to print.

    Returns:
        One for each text.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    decomposition = open_decomposition(run, name)
    probes = probe_texts(run, decomposition, config.texts, config.components)
    print(f"Components of {name}")
    for result in probes:
        print(f"\n{result.text!r}: {result.prediction_text.strip()} ({result.probability:.1%})")
        if result.set_aside:
            print("  set aside: a value was not finite")
            continue
        print("\n".join(_lines(result, run, decomposition, config.examples)))
    return probes


def _lines(result: Probe, run: Run, decomposition: Decomposition, examples: int) -> list[str]:
    """The components of a text as lines of a table."""
    has_shares = all(item.share is not None for item in result.components)
    scores, texts = decomposition.coefficients.abs().numpy(), shown_texts(run.table)
    lines = [f"  {'component':>11}  {'share':>6}  {'coefficient':>11}  top example{'s' if examples > 1 else ''}"]
    for item in result.components:
        best = top_examples(scores[:, item.component], run.usable, examples).tolist()
        shown = " | ".join(shorten(texts[k].as_py(), _WIDTH) for k in best)
        share = "" if item.share is None else f"{item.share:.1%}"
        lines.append(f"  {item.component:11d}  {share:>6}  {item.coefficient:11.4f}  {shown}")
    if has_shares:
        rest = 1 - result.residual - sum(item.share or 0 for item in result.components)
        lines.append(f"  {'others':>11}  {max(0.0, rest):6.1%}")
    return [*lines, f"  {'unexplained':>11}  {result.residual:6.1%}"]


def probe_texts(run: Run, decomposition: Decomposition, texts: Sequence[str], top: int = 8) -> list[Probe]:
    """Collect texts as the run was, and explain them by its components.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        texts: The texts.
        top: How many components to give for each at most.

    Returns:
        One for each text.
    """
    prepared = prepare_run(run)
    explained = explain_texts(run, decomposition, texts, prepared)
    predictions = explained.collected["prediction"].tolist()
    weights = explained.coefficients.abs() if explained.shares is None else explained.shares
    probes = []
    for i, (text, answer) in enumerate(zip(texts, answer_texts(prepared, predictions), strict=True)):
        order = weights[i].argsort(descending=True, stable=True)[:top].tolist()
        coefficients = explained.coefficients[i].tolist()
        shares = [None] * len(coefficients) if explained.shares is None else explained.shares[i].tolist()
        strongest = [ProbedComponent(j, coefficients[j], shares[j]) for j in order if coefficients[j] != 0]
        probability, aside = explained.collected["probability"][i], explained.collected["set_aside"][i]
        residual = float(explained.residuals[i])
        probes.append(Probe(text, predictions[i], answer, float(probability), residual, strongest, bool(aside)))
    return probes
