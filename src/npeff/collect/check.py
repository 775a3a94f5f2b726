"""`npeff check`: does collection fit this model and task? Compares it with plain autograd, one example at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from npeff.collect.capture import Capture
from npeff.collect.config import CheckConfig, CollectConfig
from npeff.collect.directions import make_directions, spectral
from npeff.collect.session import Prepared, prepare_with_prompts
from npeff.collect.sketch.base import random_signs
from npeff.models.answers import AnswerModel, AnswerSet
from npeff.utils.configs import replace
from npeff.utils.errors import UserError
from npeff.utils.progress import progress

SUFFIXES = 8
"""Suffixes of an example that are compared with autograd."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


@dataclass(frozen=True)
class CheckReport:
    """Largest relative errors over the examples, and what the directions keep."""

    autograd_error: float
    """Of rows against plain autograd."""
    batch_error: float
    """Of rows in a batch against rows alone."""
    kept: float
    """Share of the Fisher's trace at the outputs that the directions keep, mean over examples."""
    spectral_kept: dict[int, float]
    """The same for so many spectral rows."""
    tolerance: float
    """Largest error that is rounding in this precision."""

    @property
    def fits(self) -> bool:
        """Whether all differences are rounding."""
        return max(self.autograd_error, self.batch_error) <= self.tolerance


def check(config: CheckConfig) -> CheckReport:
    """Print how well collection fits a model and a task.

    Args:
        config: Which model and task.

    Returns:
        What was measured.

    Raises:
        UserError: Rows differ from those of plain autograd by more than rounding.
    """
    data = replace(config.data, task=config.task, limit=config.examples)
    collect_config = CollectConfig(
        run=str(Path()),
        data=data,
        model=replace(config.options, model=config.model),
        directions=config.directions,
        sketch=config.sketch,
    )
    prepared, dataset, prompts = prepare_with_prompts(collect_config)
    for note in dataset.notes:
        print(note)
    report = compare_with_autograd(prepared, prompts)
    print(
        f"{prepared.selection.size:,} parameters, {len(prepared.selection.modules)} modules, {len(prompts)} examples\n"
        f"rows against plain autograd   relative error {report.autograd_error:.1e}\n"
        f"rows alone against in a batch relative error {report.batch_error:.1e}\n"
        f"directions {config.directions.directions} keep {report.kept:.1%} of the Fisher's trace at the outputs"
    )
    for count, kept in report.spectral_kept.items():
        print(f"  spectral:{count:<4} {kept:.1%}")
    if not report.fits:
        raise UserError(
            f"Rows of {config.model} differ from autograd by more than {report.tolerance:g}. Try --dtype float32, "
            f"or leave modules out with --exclude; if that does not help, please report the model."
        )
    print("This model and task fit.")
    return report


def _mixes(rows: int) -> torch.Tensor:
    """Which combinations of the rows to compare, [n, rows].

    Each row, or where there are more than two, the first one and a sum of all with random signs. A wrong row spoils the
    sum too, and two backward passes are enough: with weight gradients, and with every suffix in a sequence of its own,
    a pass is slow.
    """
    if rows <= 2:
        return torch.eye(rows)
    return torch.stack([torch.eye(rows)[0], random_signs(rows, "check").float()])


def _weightiest(answers: AnswerSet, p: torch.Tensor) -> torch.Tensor:
    """The answers to compare, [B, n]: all, but of many suffixes the most probable ones, which are a run each."""
    if answers.kind == "suffixes" and p.shape[1] > SUFFIXES:
        return p.topk(SUFFIXES, dim=1).indices
    return torch.arange(p.shape[1], device=p.device).expand(len(p), -1)


def _only(V: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Directions V [B, k, r] without what they say about other answers."""
    kept = torch.zeros_like(V[:, 0]).scatter_(1, answers, 1.0)
    return V * kept[:, None]


def compare_with_autograd(prepared: Prepared, prompts: list[list[int]]) -> CheckReport:
    """Collect all prompts in one padded batch, each alone, and by autograd with weight gradients.

    Args:
        prepared: Model, task and sketch.
        prompts: Token ids of the examples to compare.

    Returns:
        The largest relative errors.
    """
    collector, model = prepared.collector, prepared.model
    sketch, modules = collector.sketch, prepared.selection.modules

    def rows_of(batch: list[list[int]], V: torch.Tensor) -> torch.Tensor:
        with Capture(modules, sketch.fold_input) as capture:
            capture.start(len(batch), *collector.answer_model.sequences(batch))
            z, _ = collector.answer_model.logits(batch)
            return capture.rows(z, V, sketch)

    with torch.no_grad():
        p = collector.answer_model.logits(prompts)[0].double().softmax(1)
    V, kept = make_directions(prepared.config.directions, p, list(range(len(prompts))))
    answers = _weightiest(prepared.answers, p)
    V = _only(V, answers)
    mixes = _mixes(V.shape[1]).to(V)
    together = mixes.float() @ rows_of(prompts, V)
    V = mixes @ V
    weights = {name: w for m in modules for name, w in m.module.named_parameters(prefix=m.name, recurse=False)}
    autograd_error = batch_error = 0.0
    for i, prompt in enumerate(progress(prompts, desc="Checking", unit="ex")):
        alone = rows_of([prompt], V[i : i + 1])
        plain = AnswerModel(model, prepared.answers.only(answers[i].tolist()), share_prompt=False)
        for weight in weights.values():
            weight.requires_grad_(True)
        try:
            z, _ = plain.logits([prompt])
            for turn, direction in enumerate(V[i]):
                last = turn + 1 == V.shape[1]
                parts = torch.autograd.grad(
                    z, list(weights.values()), direction[None, answers[i]].to(z), retain_graph=not last
                )
                gradients = dict(zip(weights, parts, strict=True))
                reference = sketch.matvec(
                    {m.name: m.matrix(gradients[f"{m.name}.weight"], gradients.get(f"{m.name}.bias")) for m in modules}
                )
                scale = reference.norm().clamp_min(torch.finfo(torch.float32).tiny)
                autograd_error = max(autograd_error, float((together[i, turn] - reference).norm() / scale))
                batch_error = max(batch_error, float((together[i, turn] - alone[0, turn]).norm() / scale))
        finally:
            for weight in weights.values():
                weight.requires_grad_(False)
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count < p.shape[1]]
    trace = 1 - p.square().sum(1)
    shares = {c: float((spectral(p, c).square().sum((1, 2)) / trace).mean()) for c in counts}
    tolerance = TOLERANCE[prepared.config.model.dtype]
    return CheckReport(autograd_error, batch_error, float(kept.mean()), shares, tolerance)
