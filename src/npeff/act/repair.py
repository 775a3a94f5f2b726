"""`npeff repair`: a combination of a few components that mends the model's answers and moves little else.

To first order, the stored rows say how the answers of every example change along a direction. So sizes and signs are a
logistic regression in the sketch on the examples that the components were fitted to. How many components and how long
the change may be is chosen in the model on the tune part, under a limit of the damage to running text; what it is worth
is measured once on the test part, on other text, beside other ways to spend the same labels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npeff.act.config import RepairConfig
from npeff.analyse.run import read_analysis
from npeff.collect.config import CollectConfig
from npeff.collect.session import prepare_to_edit, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.answers import can_read, change_of_answers
from npeff.models.adapter import apply_adapter, find_adapter
from npeff.models.select import CapturedModule
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import Damage, Elsewhere, background_rows, read_passages
from npeff.perturb.evaluate import Divergence, find_magnitude
from npeff.perturb.lift import (
    LIFTABLE_METHODS,
    Lifter,
    Parameters,
    RowSums,
    check_component,
    group_sum,
    norm,
    scale_to_unit,
)
from npeff.perturb.protocol import Plan, make_plan
from npeff.perturb.records import identity
from npeff.perturb.statistics import Interval, mean_and_interval
from npeff.perturb.weights import EditedWeights, Saved, check_saving, save_change
from npeff.perturb.where import find_places
from npeff.perturb.whitening import read_background, whiten_within
from npeff.store.examples import label_texts, whole_texts
from npeff.store.layout import REPAIRS, choose_decomposition
from npeff.store.run import Run
from npeff.tasks.data import load_dataset
from npeff.tasks.task import asked_task
from npeff.utils.configs import from_dict, read_record, to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, write_text
from npeff.utils.progress import progress
from npeff.utils.report import Column, Table, write_report
from npeff.utils.types import Array

COUNTS = (1, 4, 16)
"""Numbers of components that are tried."""
SHARES = (0.5, 0.75, 1.0)
"""Lengths that are tried, as shares of the longest within the limit."""
TOLERANCE = 0.05
"""Share by which the damage may miss the limit, on its lower side."""
RIDGE = 1e-2
"""What is added to the Fisher of running text, as a share of its largest eigenvalue."""
PENALTY = 10.0
"""Cross-entropy of an example that is worth the same as a divergence of one token of running text."""
BINS = 10
"""Of the calibration error."""


@dataclass(frozen=True)
class Targets:
    """What the answers should be."""

    labels: Array
    """Right answer of each example, -1 where it is not known, [m]."""
    mend: Array
    """Which examples are to be mended, bool [m]."""
    Q: torch.Tensor
    """Probabilities that the answers should have, float64 [m, r]: those of now where nothing is to be mended."""


@dataclass(frozen=True)
class Trial:
    """A change at the length that did best on the tune part."""

    components: int
    """Components that it is made of; of adapters, which one."""
    length: float
    """Its Euclidean length."""
    loss: float
    """Mean cross-entropy of the tune part."""
    damage: float
    """KL divergence a token on the text that the length was chosen with."""


@dataclass(frozen=True)
class Outcome:
    """What one way to spend the labels is worth on the test part."""

    way: str
    """model: as it is. repair: components. random groups: examples at random in place of a component's top ones. bias:
    offsets of the answers. adapter: the best of those that were given."""
    predictions: list[int]
    """Answer to each test example."""
    accuracy: float
    """Share of right answers among labelled test examples."""
    interval: Interval
    """95% interval of it, by bootstrap over examples, as all intervals here."""
    loss: float
    """Mean negative log-probability of the right answer."""
    calibration: float
    """Expected calibration error, in ten bins of the answer's probability."""
    damage: list[Damage] = field(default_factory=list)
    """KL divergence a token on text that nothing was chosen with; none where no weight changes."""
    components: list[int] = field(default_factory=list)
    """repair: the components, in the order in which they were taken."""
    sizes: list[float] = field(default_factory=list)
    """repair: how far the change goes along the unit vector of each."""
    length: float = 0.0
    """Euclidean length of the change."""
    relative: float = 0.0
    """That length ÷ the length of the parameters that may change."""
    ranks: dict[str, float] = field(default_factory=dict)
    """repair: rank → mean share of a matrix's squared change that so many singular vectors keep."""
    tried: list[Trial] = field(default_factory=list)
    """What was tried on the tune part."""
    saved: Saved | None = None
    """repair: the change that was written, if that was asked for."""
    key: str = ""
    """Which settings of which run and decomposition this belongs to."""


@dataclass(frozen=True)
class Beside:
    """The repair beside another way, on the same test examples."""

    way: str
    """The other way."""
    points: float
    """Accuracy of the repair minus that of the other, in points."""
    interval: Interval
    """95% interval of the difference."""
    better: int
    """Examples that only the repair gets right."""
    worse: int
    """Examples that only the other gets right."""


@dataclass(frozen=True)
class Repair:
    """Everything about a repair: repair.json."""

    parts: dict[str, int]
    """Examples of the fit, tune and test parts."""
    mended: int
    """Examples of fit and tune whose labels were asked for; the answers of others should stay."""
    outcomes: list[Outcome]
    """Every way, the model as it is first."""
    beside: list[Beside]
    """The repair beside each other way."""
    verdict: str
    """In a sentence."""


# --- numbers ------------------------------------------------------------------------------------------------------


def regress(log_p: torch.Tensor, D: torch.Tensor, Q: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Sizes s of J directions with the least mean cross-entropy H(Q, softmax(log p + Σ s_j D_j)) + ½ sᵀ penalty s.

    By Newton's method; a step that does not help is halved.

    Args:
        log_p: Log-probabilities of the answers, float64 [n, r].
        D: What a step along each direction adds to them, float64 [n, J, r].
        Q: What they should be, as probabilities, float64 [n, r].
        penalty: Positive definite, float64 [J, J].

    Returns:
        The sizes, float64 [J].
    """
    s = torch.zeros(D.shape[1], dtype=torch.float64)

    def loss(at: torch.Tensor) -> float:
        z = log_p + torch.einsum("njr,j->nr", D, at)
        return float(-(Q * z.log_softmax(1)).sum() / len(z) + at @ penalty @ at / 2)

    for _ in range(50):
        gradient, curvature = slopes(log_p, D, Q, s)
        step = torch.linalg.solve(curvature + penalty, gradient + penalty @ s)
        while loss(s - step) > loss(s) and float(step.norm()) > 1e-12:
            step = step / 2
        s = s - step
        if float(step.norm()) <= 1e-9 * float(s.norm()):
            break
    return s


def slopes(log_p: torch.Tensor, D: torch.Tensor, Q: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [J] and Hessian [J, J] of the mean cross-entropy at sizes s; shapes as for `regress`."""
    p = (log_p + torch.einsum("njr,j->nr", D, s)).softmax(1)
    centred = D - torch.einsum("njr,nr->nj", D, p)[:, :, None]
    gradient = torch.einsum("njr,nr->j", D, p - Q) / len(p)
    return gradient, torch.einsum("njr,nr,nkr->jk", centred, p, centred) / len(p)


def take_in_turn(
    log_p: torch.Tensor, D: torch.Tensor, Q: torch.Tensor, penalty: torch.Tensor, count: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Take one direction after another, always the one that promises to lower the objective most.

    Args:
        log_p: As for `regress`.
        D: As for `regress`.
        Q: As for `regress`.
        penalty: As for `regress`.
        count: Most directions to take.

    Yields:
        The directions so far, and their sizes.
    """
    chosen: list[int] = []
    s = torch.zeros(D.shape[1], dtype=torch.float64)
    while len(chosen) < min(count, D.shape[1]):
        gradient, curvature = slopes(log_p, D, Q, s)
        promise = (gradient + penalty @ s).square() / (curvature + penalty).diagonal()
        promise[chosen] = -1
        chosen.append(int(promise.argmax()))
        s = torch.zeros_like(s)
        s[chosen] = regress(log_p, D[:, chosen], Q, penalty[chosen][:, chosen])
        yield list(chosen), s[chosen]


def calibration_error(p: torch.Tensor, labels: Array) -> float:
    """Expected calibration error of probabilities p [n, r]: mean |accuracy − confidence| over bins of confidence."""
    confidence, answers = (part.numpy() for part in p.max(1))
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, (answers == labels) - confidence, BINS)
    return float(np.abs(gaps).sum() / len(labels))


# --- the command --------------------------------------------------------------------------------------------------


def repair(config: RepairConfig) -> Repair:
    """Repair a run's model; files are in RUN/repairs/NAME.

    Args:
        config: Which examples to mend, with which components, and what to measure beside it.

    Returns:
        What the repair and the other ways are worth on held-out examples.

    Raises:
        UserError: The run or its decomposition does not have what this needs.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    decomposition, targets = open_decomposition(run, name), read_targets(run, config.fix)
    if not can_read(run, decomposition):
        raise UserError(f"A repair needs Fisher rows, and components of {', '.join(LIFTABLE_METHODS)}.")
    if not decomposition.notes.held_out:
        raise UserError(f"No example of {run.path} is held out to measure on. Decompose with --holdout 0.5.")
    defaults = PerturbConfig(config.run)
    plan = make_plan(run, decomposition, [], 1, defaults.top, defaults.random, config.seed)
    folder = run.path / REPAIRS / (config.repair or name)
    wanted = {"model": True, "repair": True, "random groups": config.null, "bias": True, "adapter": bool(config.beside)}
    session, outcomes = None, []
    with only_one(folder):
        for way in progress([way for way, asked in wanted.items() if asked], desc="Repairing", unit="way"):
            beside = config.beside if way == "adapter" else ()  # the other ways do not depend on it
            settings = to_dict(replace(config, repair=None, null=True, beside=beside))
            path, key = folder / "ways" / f"{way.replace(' ', '-')}.json", identity(run, decomposition, settings)
            outcome = _read(path, key, config.save)
            if outcome is None:
                session = session or _Session(run, decomposition, plan, config, targets, folder)
                outcome = replace(session.measure(way), key=key)
                write_record(path, outcome, sealed=True)
            outcomes.append(outcome)
        parts = {"fit": plan.fit, "tune": plan.tune.examples, "test": plan.test.examples}
        compared = compare_outcomes(outcomes, targets.labels[parts["test"]])
        mended = int(targets.mend[np.concatenate([parts["fit"], parts["tune"]])].sum())
        sizes = {name: len(examples) for name, examples in parts.items()}
        found = Repair(sizes, mended, outcomes, compared, _verdict(compared))
        _write(folder, found, config)
    return found


def read_targets(run: Run, fix: Sequence[str]) -> Targets:
    """Which examples are to be mended, and to which answers.

    Args:
        run: The run.
        fix: A file of texts with labels, or conditions as label=Negative, or nothing.

    Returns:
        The targets.

    Raises:
        UserError: There is no such column or file, or no labelled example is left.
    """
    names, table = list(run.manifest.task.labels), run.table
    labels = table["label"].fill_null(-1).to_numpy()
    columns = {"label": label_texts(table, names), "prediction": table["prediction_text"].to_pylist()}
    mend = run.usable.copy()
    for each in fix:
        column, equals, value = each.partition("=")
        if equals and column in columns:
            mend &= np.array([text == value for text in columns[column]])
            continue
        config = from_dict(CollectConfig, run.manifest.config)
        given = load_dataset(asked_task(config.data), replace(config.data, data=each, limit=None)).table
        wanted = dict(zip(whole_texts(given).to_pylist(), given["label"].fill_null(-1).to_pylist(), strict=True))
        found = np.array([wanted.get(text, -1) for text in whole_texts(table).to_pylist()])
        labels, mend = np.where(found >= 0, found, labels), mend & (found >= 0)
    if not names or not (mend & (labels >= 0)).any():
        raise UserError("No labelled example of the run is to be mended: a repair needs some, and a task with labels.")
    Q = run.tensor("probabilities").double()
    mend &= labels >= 0
    Q[mend] = torch.nn.functional.one_hot(torch.from_numpy(labels[mend]).long(), len(names)).double()
    return Targets(labels, mend, Q)


class _Session:
    """The model at work. Its weights are those of before whenever a method returns."""

    def __init__(
        self, run: Run, decomposition: Decomposition, plan: Plan, config: RepairConfig, targets: Targets, folder: Path
    ) -> None:
        self.run, self.decomposition, self.plan, self.config, self.folder = run, decomposition, plan, config, folder
        self.targets, self.candidates = targets, _candidates(run, decomposition, config)
        passages = read_passages(config.elsewhere)
        if len(passages) < 2:
            raise UserError("--elsewhere needs two paragraphs: one to choose with, and one to measure on.")
        self.prepared = prepare_to_edit(run, config.device)
        if self.prepared.model.classifies:
            raise UserError("A classifier predicts no text, so nobody can tell what a repair damages.")
        check_saving(config.save, self.prepared)
        self.prompts = read_prompts(run, self.prepared)
        self.tune, self.test = (
            Divergence(self.prepared, self.prompts, part.examples.tolist()) for part in (self.plan.tune, self.plan.test)
        )
        self.chosen_with, self.measured_on = (Elsewhere(self.prepared, passages[start::2]) for start in (0, 1))

    def measure(self, way: str) -> Outcome:
        """What one way is worth on the test part."""
        before = self.test.probabilities.log()
        if way in ("model", "bias"):
            return self._outcome(way, before if way == "model" else before + self._offsets())
        best: tuple[Trial, Parameters, dict[str, Any]] | None = None
        tried = []
        for count, vector, about in self._adapted() if way == "adapter" else self._combined(way):
            trial = self._choose(vector, count)
            tried.append(trial)
            if best is None or trial.loss < best[0].loss:
                best = trial, vector, about
        assert best is not None
        trial, vector, about = best
        whole = norm(_matrices(self.prepared.selection.modules))
        with EditedWeights(self.prepared.selection.modules) as weights:
            weights.add(vector, trial.length)
            log_p, damage = self.test.log_probabilities(), self.measured_on.measure()
        about |= {"damage": damage, "length": trial.length, "relative": trial.length / whole, "tried": tried}
        if way == "repair":
            about["sizes"] = [size * trial.length for size in about["sizes"]]
            about["ranks"] = _ranks(vector)
            asked, share = self.config.save, self.config.adapter_share
            about["saved"] = save_change(self.folder, 0, asked, self.prepared, vector, trial.length, share)
        return self._outcome(way, log_p, **about)

    def _outcome(self, way: str, log_p: torch.Tensor, **about: Any) -> Outcome:
        labels = self.targets.labels[self.test.examples]
        known, answers = labels >= 0, log_p.argmax(1).numpy()
        if not known.any():
            raise UserError("No held-out example has a label to measure a repair with.")
        loss = float(-log_p.log_softmax(1)[known, labels[known]].mean())
        error = calibration_error(log_p.softmax(1)[known], labels[known])
        right = (answers == labels)[known]
        interval = mean_and_interval(right)[1]
        assert interval is not None
        return Outcome(way, answers.tolist(), float(right.mean()), interval, loss, error, **about)

    def _offsets(self) -> torch.Tensor:
        """Offsets of the answers [r] that the labels of fit and tune ask for."""
        examples = np.concatenate([self.plan.fit, self.plan.tune.examples])
        p = self.run.tensor("probabilities")[examples].double().clamp_min(1e-30)
        each = torch.eye(p.shape[1], dtype=torch.float64)
        return regress(p.log(), each.expand(len(p), -1, -1), self.targets.Q[examples], 1e-6 * each)

    @functools.cached_property
    def _text(self) -> torch.Tensor:
        """Fisher rows of running text that directions avoid; other text than what is measured."""
        return background_rows(self.prepared, self.config.seed)

    def _vectors(self, way: str) -> torch.Tensor:
        """Components, or the directions of as many random groups of fitted examples, [J, p]."""
        if way == "repair":
            return self.decomposition.components[self.candidates].float()
        source, nulls = self.run.source("fisher"), (self.plan.null(j, self.config.seed) for j in self.candidates)
        return torch.stack([group_sum(source, null.group)[0] for null in nulls if null.group is not None])

    def _combined(self, way: str) -> Iterator[tuple[int, Parameters, dict[str, Any]]]:
        """Combinations of more and more directions: how many, the unit vector, and what it is made of."""
        text, rows = self._text, read_background(self.run, self.plan.fit, self.config.seed)
        ridge = RIDGE * float(torch.linalg.eigvalsh((text @ text.T).double())[-1])
        carried = whiten_within(rows.rows, text, self._vectors(way).T, 1, ridge).float()
        carried /= (rows.rows.T @ carried).norm(dim=0)
        unit = carried.T @ rows.rows
        on_text = (text @ unit.T).double()
        penalty = PENALTY * (on_text.T @ on_text + ridge * (unit @ unit.T).double())
        p = self.run.tensor("probabilities")[rows.examples].double().clamp_min(1e-30)
        D = change_of_answers(self.run, rows.examples.tolist(), unit, p)
        lifter = Lifter(self.run, self.prepared, self.prompts)
        for chosen, sizes in take_in_turn(p.log(), D, self.targets.Q[rows.examples], penalty, COUNTS[-1]):
            if len(chosen) in COUNTS:
                weights = torch.zeros(1, int(self.run.source("fisher").ranks.sum()))
                weights[0, rows.places] = (carried[:, chosen].double() @ sizes * rows.scales).float()
                (vector,) = lifter.lift(RowSums(sizes.float()[None] @ unit[chosen], {"fisher": weights}))
                shares = (sizes / norm(vector)).tolist()
                yield len(chosen), vector, {"components": [self.candidates[j] for j in chosen], "sizes": shares}

    def _choose(self, vector: Parameters, components: int) -> Trial:
        """Make the vector a unit one, and find the length that does best on the tune part within the limit."""
        Q, trials = self.targets.Q[self.tune.examples], []
        with EditedWeights(self.prepared.selection.modules) as weights:

            def damage(length: float) -> float:
                weights.add(vector, length)
                return self.chosen_with.measure()[0].kl

            aim = self.config.limit / (1 + TOLERANCE)
            longest, most = find_magnitude(damage, aim, scale_to_unit(vector), TOLERANCE)
            for share in SHARES:
                weights.add(vector, share * longest)
                loss = float(-(Q * self.tune.log_probabilities()).sum(1).mean())
                trials.append(Trial(components, share * longest, loss, most * share**2))
        return min(trials, key=lambda trial: trial.loss)

    def _adapted(self) -> Iterator[tuple[int, Parameters, dict[str, Any]]]:
        """What each adapter changes."""
        modules, model = self.prepared.selection.modules, self.prepared.model
        for number, adapter in enumerate(self.config.beside, 1):
            with EditedWeights(modules):
                before = _matrices(modules)
                apply_adapter(model.network, find_adapter(replace(model.config, adapter=adapter, include=())))
                vector = {name: matrix - before[name] for name, matrix in _matrices(modules).items()}
            yield number, vector, {}


def _matrices(modules: Sequence[CapturedModule]) -> Parameters:
    """The parameters that may change, as a vector of them."""
    tensors = [{name: getattr(m.module, a).detach() for name, a in m.parameters.items()} for m in modules]
    return {m.name: m.pack(own).float() for m, own in zip(modules, tensors, strict=True)}


def _ranks(vector: Parameters) -> dict[str, float]:
    """Rank → mean share of a matrix's squared change that so many singular vectors keep."""
    places = [place.ranks for place in find_places(vector, ranks=True) if place.share]
    return {rank: float(np.mean([place[rank] for place in places])) for rank in places[0]}


def _candidates(run: Run, decomposition: Decomposition, config: RepairConfig) -> list[int]:
    """Components to choose from."""
    for number in config.among:
        check_component(decomposition, number)
    chosen = list(config.among) or (decomposition.used > 0).nonzero().view(-1).tolist()
    if config.lnp:
        analysis = read_analysis(run, choose_decomposition(run.path, config.decomposition))
        chosen = [j for j in chosen if analysis.component[j].lnp_tuned]
        if not chosen:
            raise UserError("No component is LnP-tuned. Leave out --lnp.")
    return chosen


def _read(path: Path, key: str, save: str) -> Outcome | None:
    """What was measured before with the same settings, if it has what is asked for."""
    old = read_record(Outcome, path) if path.is_file() else None
    saved = "nothing" if old is None or old.saved is None else old.saved.path.split("/")[0]
    return old if old is not None and old.key == key and (old.way != "repair" or save in ("nothing", saved)) else None


# --- what it is worth ---------------------------------------------------------------------------------------------


def compare_outcomes(outcomes: Sequence[Outcome], labels: Array) -> list[Beside]:
    """The repair beside every other way.

    Args:
        outcomes: What each way is worth; one is the repair.
        labels: Right answers of the test examples, -1 where they are not known, [n].

    Returns:
        One for each other way.
    """
    known = labels >= 0
    right = {each.way: (np.array(each.predictions) == labels)[known].astype(int) for each in outcomes}
    found = []
    for way, other in right.items():
        difference = 100 * (right["repair"] - other)
        interval = mean_and_interval(difference)[1]
        if way != "repair" and interval is not None:
            counts = int((difference > 0).sum()), int((difference < 0).sum())
            found.append(Beside(way, float(difference.mean()), interval, *counts))
    return found


def _verdict(beside: Sequence[Beside]) -> str:
    by_way = {each.way: each for each in beside}
    gain, bias = by_way["model"], by_way["bias"]
    if gain.interval[0] <= 0:
        return "The repair does not make the model better on held-out examples."
    words = f"The repair gains {gain.points:.1f} points [{gain.interval[0]:.1f}, {gain.interval[1]:.1f}]"
    if bias.interval[0] > 0:
        return f"{words}, {bias.points:.1f} more than offsets of the answers."
    return f"{words}: no more than offsets of the answers do, as far as these examples tell."


def _write(folder: Path, found: Repair, config: RepairConfig) -> None:
    """Write repair.json, .md, .csv and .tex; the report goes with a model or an adapter as its card."""
    names = ("accuracy", ".1%"), ("low", ".1%"), ("high", ".1%"), ("loss", ".3f"), ("calibration", ".3f")
    columns = [Column("way"), *(Column(*each) for each in names), Column("text", ".2e", "KL a token elsewhere")]
    table = Table(f"{found.parts['test']} held-out examples", [*columns, Column("length", ".3g")])
    for each in found.outcomes:
        damage = each.damage[0].kl if each.damage else 0.0
        figures = (each.accuracy, *each.interval, each.loss, each.calibration, damage, each.length)
        table.rows.append((each.way, *figures))
    ahead = [Column("beside"), Column("points", ".1f"), Column("low", ".1f"), Column("high", ".1f")]
    differences = Table("The repair beside other ways", [*ahead, Column("better"), Column("worse")])
    differences.rows += [(each.way, each.points, *each.interval, each.better, each.worse) for each in found.beside]
    mended = next(each for each in found.outcomes if each.way == "repair")
    parts = ", ".join(f"{j} ({size:+.3g})" for j, size in zip(mended.components, mended.sizes, strict=True))
    about = f"Components, and how far along each: {parts}. {found.mended} labels, limit {config.limit:g}."
    text = write_report(folder / "repair", [found.verdict, table, differences, about], csv=table)
    if mended.saved is not None and (folder / mended.saved.path).is_dir():
        write_text(folder / mended.saved.path / "README.md", text)
    write_record(folder / "repair.json", found)
    print(f"{text}in {folder}")
