"""`npeff check`: does collection fit this model and task? Compares it with plain autograd, one example at a time."""

import copy
import dataclasses

import torch

from npeff.collect.asked import ask, spread
from npeff.collect.capture import Capture
from npeff.collect.config import CheckConfig, CollectConfig
from npeff.collect.directions import make_directions, split_length
from npeff.collect.estimate import estimate
from npeff.collect.session import Prepared, fitting_prompts, open_examples, prepare
from npeff.collect.sketch.base import random_signs
from npeff.models.answers import AnswerModel
from npeff.models.load import with_classes
from npeff.models.quantised import dequantise
from npeff.models.select import select_parameters
from npeff.tasks.data import Dataset
from npeff.tasks.task import asked_task
from npeff.utils import Record, UserError, amount, replace
from npeff.utils.progress import progress

SUFFIXES = 8
"""Suffixes of an example that are compared with autograd."""
QUANTISED = 0.1
"""Of rows of a quantised model, which may compute in half precision, or round its inputs too."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


class CheckReport(Record):
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
    data, model = replace(config.data, task=config.task), replace(config.options, model=config.model)
    task, most = with_classes(asked_task(data), model), max(config.asked, config.examples)
    data = replace(data, limit=most) if task.positions else data
    dataset = open_examples(task, data)
    if isinstance(dataset, Dataset):
        dataset = replace(dataset, table=dataset.table.take(spread(len(dataset.table), most)))
    prepared = prepare(CollectConfig("", data, model, config.directions, config.sketch), task)
    dataset, prompts = fitting_prompts(prepared, dataset)
    asked = ask(prepared, dataset, prompts, config.asked)
    print(*dataset.notes, *asked.lines, sep="\n", flush=True)
    cost, each = estimate(prepared, prompts), len(prompts)
    prompts = prompts[: config.examples]
    here = _in_place(prepared)
    report = compare_with_autograd(here, prompts)
    elsewhere = len(prepared.selection.modules) - len(here.selection.modules)
    print(
        f"{prepared.selection.describe()}, {len(prepared.selection.modules)} modules",
        f"collecting takes about {cost.seconds_per_example:.2g} s and {amount(cost.disk / each)} an example",
        f"rows against plain autograd   relative error {report.autograd_error:.1e} ({len(prompts)} examples)",
        f"rows alone against in a batch relative error {report.batch_error:.1e}",
        *([f"  both without {elsewhere} modules whose weights lie in memory or on disk"] if elsewhere else []),
        f"directions {config.directions.directions} keep {report.kept:.1%} of the Fisher's trace at the outputs",
        *(f"  spectral:{count:<4} {kept:.1%}" for count, kept in report.spectral_kept.items()),
        sep="\n",
    )
    if not report.fits:
        raise UserError(
            f"Rows of {config.model} differ from autograd by more than {report.tolerance:g}. Try --dtype float32, "
            f"or leave modules out with --exclude; if that does not help, please report the model."
        )
    print(*(asked.warnings or ["This model and task fit."]), sep="\n")
    return report


def _in_place(prepared: Prepared) -> Prepared:
    """The same without modules whose weights are only there while they run: autograd has no gradient for those."""
    selection = prepared.selection
    modules = [m for m in selection.modules if not any(getattr(m.module, own).is_meta for own in m.parameters.values())]
    if not modules:
        hint = "Leave a layer where it runs: --device-map names a device for each part."
        raise UserError(f"No selected weight can be compared with autograd: all lie elsewhere until they run. {hint}")
    return dataclasses.replace(prepared, selection=replace(selection, modules=tuple(modules)))


def _mixes(rows: int) -> torch.Tensor:
    """Which combinations of the rows to compare, [n, rows].

    Each row, or where there are more than two, the first one and a sum of all with random signs. A wrong row spoils the
    sum too, and two backward passes are enough: with weight gradients, and with every suffix in a sequence of its own,
    a pass is slow.
    """
    if rows <= 2:
        return torch.eye(rows)
    return torch.stack([torch.eye(rows)[0], random_signs(rows, "check").float()])


def _plain_rows(prepared: Prepared, prompt: list[int], answers: list[int], V: torch.Tensor) -> torch.Tensor:
    """Rows of one example by autograd with weight gradients, [k, p].

    Args:
        prepared: Model, task and sketch.
        prompt: Token ids.
        answers: Numbers of the answers that the directions are about.
        V: Directions, [k, r].

    Returns:
        The rows, [k, p].
    """
    plain = AnswerModel(prepared.model, prepared.answers.only(answers), share_prompt=False)
    modules, sketch = prepared.selection.modules, prepared.collector.sketch
    weights = {name: getattr(m.module, attribute) for m in modules for name, attribute in m.parameters.items()}
    prepared.model.network.requires_grad_(True)
    try:
        z, _ = plain.logits([prompt])
        rows = []
        directions, lengths = split_length(V[:, answers])
        for direction, length in zip(directions.to(z), lengths, strict=True):
            parts = torch.autograd.grad(z, list(weights.values()), direction[None], retain_graph=True)
            found = dict(zip(weights, parts, strict=True))
            matrices = {m.name: m.pack(found) for m in modules}
            rows.append(sketch.matvec(matrices) * length)
        return torch.stack(rows)
    finally:
        prepared.model.network.requires_grad_(False)


def compare_with_autograd(prepared: Prepared, prompts: list[list[int]]) -> CheckReport:
    """Collect all prompts in one padded batch, each alone, and by autograd with weight gradients.

    Args:
        prepared: Model, task and sketch.
        prompts: Token ids of the examples to compare.

    Returns:
        The largest relative errors; of a quantised model, against a copy with the plain numbers that its weights
        stand for.
    """
    reference = prepared
    if prepared.model.quantised:
        model = dataclasses.replace(prepared.model, network=copy.deepcopy(prepared.model.network))
        dequantise(model.network)
        patterns = prepared.config.model
        selection = select_parameters(model.network, patterns.include, patterns.exclude)
        reference = dataclasses.replace(prepared, model=model, selection=selection)
    collector, sketch = prepared.collector, prepared.collector.sketch

    def rows_of(batch: list[list[int]], V: torch.Tensor) -> torch.Tensor:
        if collector.answer_model.alone and len(batch) > 1:
            return torch.cat([rows_of([prompt], V[i : i + 1]) for i, prompt in enumerate(batch)])
        with Capture(prepared.selection.modules, sketch.fold_input) as capture:
            capture.start(len(batch), *collector.answer_model.sequences(batch))
            z, _ = collector.answer_model.logits(batch)
            return capture.rows(z, V, sketch)

    with torch.no_grad():
        p = collector.answer_model.logits(prompts)[0].double().softmax(1)
    directions, numbers = prepared.config.directions, list(range(len(prompts)))
    V, kept = make_directions(directions, p, numbers)
    # all answers, but of many suffixes the most probable ones: each is a run of its own
    compared = min(SUFFIXES, p.shape[1]) if prepared.answers.kind == "suffixes" else p.shape[1]
    answers = p.topk(compared, dim=1).indices.sort(dim=1).values
    V = V * torch.zeros_like(p).scatter_(1, answers, 1.0)[:, None]
    mixes = _mixes(V.shape[1]).to(V)
    together = mixes.float() @ rows_of(prompts, V)
    V = mixes @ V
    errors = torch.zeros(2)
    for i, prompt in enumerate(progress(prompts, desc="Checking", unit="ex")):
        alone, plain = rows_of([prompt], V[i : i + 1])[0], _plain_rows(reference, prompt, answers[i].tolist(), V[i])
        scale = plain.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        found = [((together[i] - other).norm(dim=1) / scale).max().cpu() for other in (plain, alone)]
        errors = torch.maximum(errors, torch.stack(found))
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count < p.shape[1]]
    spectral = {c: make_directions(replace(directions, directions=f"spectral:{c}"), p, numbers)[1] for c in counts}
    shares = {count: float(share.mean()) for count, share in spectral.items()}
    autograd_error, batch_error = errors.tolist()
    tolerance = QUANTISED if prepared.model.quantised else TOLERANCE[prepared.config.model.dtype]
    return CheckReport(autograd_error, batch_error, float(kept.mean()), shares, tolerance)
