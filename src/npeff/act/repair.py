"""`npeff repair`: a combination of a few components that mends the model's answers and moves little else.

To first order, the stored rows say how the answers of every example change along a direction. So sizes and signs are a
logistic regression in the sketch on the examples that the components were fitted to. How many components and how long
the change may be is chosen in the model on the tune part, under a limit of the damage to running text; what it is worth
is measured once on the test part, on other text, beside other ways to spend the same labels.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.func import grad, hessian

from npeff.act.config import RepairConfig
from npeff.collect.session import prepare_to_edit, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.answers import can_read, change_of_answers
from npeff.models.adapter import apply_adapter, find_adapter
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import Elsewhere, background_rows, read_passages
from npeff.perturb.evaluate import Divergence, find_magnitude
from npeff.perturb.lift import Lifter, Parameters, RowSums, norm, scale_to_unit
from npeff.perturb.protocol import make_plan
from npeff.perturb.statistics import mean_and_interval
from npeff.perturb.weights import EditedWeights, Saved, check_saving, save_change
from npeff.perturb.whitening import read_background, whiten_within
from npeff.store.examples import label_texts
from npeff.store.layout import REPAIRS, choose_decomposition
from npeff.store.run import Run
from npeff.utils import Record, UserError, only_one, replace, write_record, write_text
from npeff.utils.progress import progress
from npeff.utils.report import record_table, write_report
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
FORMATS = {"way": "", "accuracy": ".1%", "low": ".1%", "high": ".1%", "loss": ".3f", "damage": ".2e", "ahead": ".1f"}
FORMATS |= {"ahead_low": ".1f", "ahead_high": ".1f", "better": "", "worse": ""}
TRIAL_FORMATS = {"made_of": "", "length": ".3g", "loss": ".3f", "damage": ".2e"}
"""Columns of the report, and how their numbers are read."""


class Trial(Record):
    """A change at the length that did best on the tune part."""

    made_of: str
    """Its components in the order in which they were taken, each with how far a change of length 1
    goes along it; or the adapter."""
    length: float
    """Its Euclidean length."""
    loss: float
    """Mean cross-entropy of the tune part."""
    damage: float
    """KL divergence a token at the longest length that was tried, on the text that lengths are chosen with."""


class Outcome(Record):
    """What one way to spend the labels is worth on the test part, and the repair beside it."""

    way: str
    """model: as it is. bias: offsets of the answers. repair: components. adapter: the best of those that were given."""
    accuracy: float
    """Share of right answers among labelled test examples."""
    low: float
    """Lower end of its 95% interval, by bootstrap over examples as all intervals here."""
    high: float
    """Upper end of it."""
    loss: float
    """Mean negative log-probability of the right answer: also what tells of calibration."""
    ahead: float
    """Accuracy of the repair minus this one, in points."""
    ahead_low: float
    """Lower end of the 95% interval of the difference on the same examples."""
    ahead_high: float
    """Upper end of it."""
    better: int
    """Examples that only the repair gets right."""
    worse: int
    """Examples that only this way gets right."""
    damage: float
    """KL divergence a token on running text that nothing was chosen with; 0 where no weight changes."""
    predictions: list[int]
    """Answer to each test example."""
    tried: list[Trial]
    """What was tried on the tune part, the best first: it is what is measured."""


class Repair(Record):
    """Everything about a repair: repair.json."""

    mended: int
    """Examples of fit and tune whose labels were asked for; the answers of others should stay."""
    outcomes: list[Outcome]
    """Every way."""
    saved: Saved | None
    """The change that was written, if that was asked for."""
    verdict: str
    """In a sentence."""


# --- numbers ------------------------------------------------------------------------------------------------------


def objective(s: torch.Tensor, log_p: torch.Tensor, D: torch.Tensor, Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy H(Q, softmax(log p + Σ s_j D_j)) of n examples + ½ sᵀ P s, for sizes s [J] of J directions.

    Args:
        s: The sizes, float64 [J].
        log_p: Log-probabilities of the answers, float64 [n, r].
        D: What a step along each direction adds to them, float64 [n, J, r].
        Q: What they should be, as probabilities, float64 [n, r].
        P: Penalty, positive definite, float64 [J, J].

    Returns:
        The objective.
    """
    z = log_p + torch.einsum("njr,j->nr", D, s)
    return -(Q * z.log_softmax(1)).sum() / len(z) + s @ P @ s / 2


def regress(*problem: torch.Tensor) -> torch.Tensor:
    """Sizes with the least `objective`, by Newton's method; a step that does not help is halved.

    Args:
        *problem: All that `objective` takes but the sizes.

    Returns:
        The sizes, float64 [J].
    """
    s = torch.zeros(problem[1].shape[1], dtype=torch.float64)
    for _ in range(50):
        step = torch.linalg.solve(hessian(objective)(s, *problem), grad(objective)(s, *problem))
        while objective(s - step, *problem) > objective(s, *problem) and float(step.norm()) > 1e-12:
            step = step / 2
        s = s - step
        if float(step.norm()) <= 1e-9 * float(s.norm()):
            break
    return s


def take_in_turn(count: int, *problem: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Take one direction after another, always the one that promises to lower the objective most.

    Args:
        count: Most directions to take.
        *problem: All that `objective` takes but the sizes.

    Yields:
        The directions so far, and their sizes.
    """
    log_p, D, Q, P = problem
    chosen: list[int] = []
    s = torch.zeros(len(P), dtype=torch.float64)
    while len(chosen) < min(count, len(P)):
        promise = grad(objective)(s, *problem).square() / hessian(objective)(s, *problem).diagonal()
        promise[chosen] = -1
        chosen.append(int(promise.argmax()))
        s = torch.zeros_like(s)
        s[chosen] = regress(log_p, D[:, chosen], Q, P[chosen][:, chosen])
        yield list(chosen), s[chosen]


# --- the command --------------------------------------------------------------------------------------------------


def repair(config: RepairConfig) -> Repair:
    """Repair a run's model; files are in RUN/repairs/NAME.

    Args:
        config: Which examples to mend, and what to measure beside it.

    Returns:
        What the repair and the other ways are worth on held-out examples.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    folder = run.path / REPAIRS / (config.repair or name)
    with only_one(folder):
        session = _Session(run, open_decomposition(run, name), config)
        before = session.test.probabilities.log()
        ways: dict[str, Measured] = {"model": (before, 0.0, []), "bias": (before + session.offsets(), 0.0, [])}
        ways["repair"], vector = session.measure(session.combinations())
        length = ways["repair"][2][0].length
        saved = save_change(folder, 0, config.save, session.prepared, vector, length, config.adapter_share)
        if config.beside:
            ways["adapter"], _ = session.measure(session.adapters())
        outcomes = compare_ways(ways, session.labels[session.test.examples])
        found = Repair(session.mended, outcomes, saved, _verdict(outcomes))
        title = f"{len(session.test.examples)} held-out examples; {found.mended} labels to fit and to choose"
        table = record_table(title, outcomes, FORMATS)
        best = record_table("What the repair was chosen from, the best first", ways["repair"][2], TRIAL_FORMATS)
        text = write_report(folder / "repair", [found.verdict, table, best], csv=table)
        if saved is not None and (folder / saved.path).is_dir():
            write_text(folder / saved.path / "README.md", text)  # the report is the card
        write_record(folder / "repair.json", found)
    print(f"{text}in {folder}")
    return found


def read_targets(run: Run, fix: Sequence[str]) -> tuple[Array, Array, torch.Tensor]:
    """Which examples are to be mended, and to which answers.

    Args:
        run: The run.
        fix: Conditions as label=Negative that all hold, or nothing.

    Returns:
        The right answer of each example, -1 where it is not known, [m]; which are to be mended, bool [m]; and the
        probabilities that the answers should have, float64 [m, r]: those of now where nothing is to be mended.

    Raises:
        UserError: There is no such column, or no labelled example is left.
    """
    names, table = list(run.manifest.task.labels), run.table
    labels = table["label"].fill_null(-1).to_numpy()
    columns = {"label": label_texts(table, names), "prediction": table["prediction_text"].to_pylist()}
    mend = run.usable & (labels >= 0)
    for each in fix:
        column, _, value = each.partition("=")
        if column not in columns:
            raise UserError(f"--fix takes conditions as label=NAME or prediction=NAME, not {each!r}.")
        mend &= np.array([text == value for text in columns[column]])
    if not names or not mend.any():
        raise UserError("No labelled example of the run is to be mended: a repair needs some, and a task with labels.")
    Q = run.tensor("probabilities").double()
    Q[mend] = torch.nn.functional.one_hot(torch.from_numpy(labels[mend]).long(), len(names)).double()
    return labels, mend, Q


Measured = tuple[torch.Tensor, float, list[Trial]]
"""Log-probabilities of the test examples [n, r], damage, and what was tried before, the best first."""
Candidate = tuple[str, Parameters]
"""What a change is made of, and the change, of any length."""


class _Session:
    """The model at work. Its weights are those of before whenever a method returns."""

    def __init__(self, run: Run, decomposition: Decomposition, config: RepairConfig) -> None:
        self.run, self.decomposition, self.config = run, decomposition, config
        if not can_read(run, decomposition) or not decomposition.notes.held_out:
            raise UserError("A repair needs Fisher rows and held-out examples: npeff decompose --holdout 0.5")
        defaults = PerturbConfig(config.run)
        plan = make_plan(run, decomposition, [], 1, defaults.top, defaults.random, config.seed)
        self.fit, self.labelled = plan.fit, np.concatenate([plan.fit, plan.tune.examples])
        self.labels, mend, self.Q = read_targets(run, config.fix)
        self.mended = int(mend[self.labelled].sum())
        passages, self.prepared = read_passages(config.elsewhere), prepare_to_edit(run, config.device)
        if len(passages) < 2 or self.prepared.model.classifies or not (self.labels[plan.test.examples] >= 0).any():
            raise UserError("A repair needs a language model, held-out labels, and two paragraphs of --elsewhere.")
        check_saving(config.save, self.prepared)
        self.modules, self.prompts = self.prepared.selection.modules, read_prompts(run, self.prepared)
        parts = (plan.tune.examples.tolist(), plan.test.examples.tolist())
        self.tune, self.test = (Divergence(self.prepared, self.prompts, part) for part in parts)
        self.chosen_with, self.measured_on = (Elsewhere(self.prepared, passages[start::2]) for start in (0, 1))

    def measure(self, candidates: Iterable[Candidate]) -> tuple[Measured, Parameters]:
        """Choose among changes on the tune part, and measure the best one on the test part."""
        tried: list[Trial] = []
        best: Parameters = {}
        for made_of, vector in progress(candidates, desc="Repairing", unit="change"):
            tried.append(self._choose(made_of, vector))
            best = vector if tried[-1] is min(tried, key=_loss) else best
        tried.sort(key=_loss)
        with EditedWeights(self.modules) as weights:
            weights.add(best, tried[0].length)
            return (self.test.log_probabilities(), self.measured_on.measure()[0].kl, tried), best

    def _choose(self, made_of: str, vector: Parameters) -> Trial:
        """Make the vector a unit one, and find the length that does best on the tune part within the limit."""
        trials = []
        with EditedWeights(self.modules) as weights:

            def damage(length: float) -> float:
                weights.add(vector, length)
                return self.chosen_with.measure()[0].kl

            aim = self.config.limit / (1 + TOLERANCE)
            longest, most = find_magnitude(damage, aim, scale_to_unit(vector), TOLERANCE)
            for length in (share * longest for share in SHARES):
                weights.add(vector, length)
                loss = float(-(self.Q[self.tune.examples] * self.tune.log_probabilities()).sum(1).mean())
                trials.append(Trial(made_of, length, loss, most))
        return min(trials, key=_loss)

    def offsets(self) -> torch.Tensor:
        """Offsets of the answers [r] that the labels of fit and tune ask for."""
        p = self.run.tensor("probabilities")[self.labelled].double().clamp_min(1e-30)
        each = torch.eye(p.shape[1], dtype=torch.float64)
        return regress(p.log(), each.expand(len(p), -1, -1), self.Q[self.labelled], 1e-6 * each)

    def combinations(self) -> Iterator[Candidate]:
        """Combinations of more and more components."""
        numbers = (self.decomposition.used > 0).nonzero().view(-1).tolist()
        text = background_rows(self.prepared, self.config.seed)  # other text than what is measured
        rows = read_background(self.run, self.fit, self.config.seed)
        ridge = RIDGE * float(torch.linalg.eigvalsh((text @ text.T).double())[-1])
        components = self.decomposition.components[numbers].float()
        carried = whiten_within(rows.rows, text, components.T, 1, ridge).float()
        carried /= (rows.rows.T @ carried).norm(dim=0)
        unit = carried.T @ rows.rows
        on_text = (text @ unit.T).double()
        penalty = PENALTY * (on_text.T @ on_text + ridge * (unit @ unit.T).double())
        p = self.run.tensor("probabilities")[rows.examples].double().clamp_min(1e-30)
        D = change_of_answers(self.run, rows.examples.tolist(), unit, p)
        lifter = Lifter(self.run, self.prepared, self.prompts)
        for chosen, sizes in take_in_turn(COUNTS[-1], p.log(), D, self.Q[rows.examples], penalty):
            if len(chosen) in COUNTS:
                weights = torch.zeros(1, int(self.run.source("fisher").ranks.sum()))
                weights[0, rows.places] = (carried[:, chosen].double() @ sizes * rows.scales).float()
                (vector,) = lifter.lift(RowSums(sizes.float()[None] @ unit[chosen], {"fisher": weights}))
                shares = (sizes / norm(vector)).tolist()
                yield ", ".join(f"{numbers[j]} ({share:+.2g})" for j, share in zip(chosen, shares, strict=True)), vector

    def adapters(self) -> Iterator[Candidate]:
        """What each adapter changes."""
        model = self.prepared.model
        for adapter in self.config.beside:
            with EditedWeights(self.modules):
                before = self._matrices()
                apply_adapter(model.network, find_adapter(replace(model.config, adapter=adapter, include=())))
                change = {name: matrix - before[name] for name, matrix in self._matrices().items()}
            yield adapter, change

    def _matrices(self) -> Parameters:
        """The parameters that may change, as a vector of them."""
        tensors = [{name: getattr(m.module, a).detach() for name, a in m.parameters.items()} for m in self.modules]
        return {m.name: m.pack(own).float() for m, own in zip(self.modules, tensors, strict=True)}


def _loss(trial: Trial) -> float:
    return trial.loss


# --- what it is worth ---------------------------------------------------------------------------------------------


def compare_ways(ways: dict[str, Measured], labels: Array) -> list[Outcome]:
    """What each way is worth, and the repair beside it.

    Args:
        ways: What was measured; one is the repair.
        labels: Right answers of the test examples, -1 where they are not known, [n].

    Returns:
        One for each way.
    """
    known = labels >= 0
    right = {way: (log_p.argmax(1).numpy() == labels)[known].astype(int) for way, (log_p, *_) in ways.items()}
    found = []
    for way, (log_p, damage, tried) in ways.items():
        ahead = 100 * (right["repair"] - right[way])
        intervals = [mean_and_interval(values)[1] or (0.0, 0.0) for values in (right[way], ahead)]
        loss = float(-log_p.log_softmax(1)[known, labels[known]].mean())
        worth = float(right[way].mean()), *intervals[0], loss, float(ahead.mean()), *intervals[1]
        counts = int((ahead > 0).sum()), int((ahead < 0).sum())
        found.append(Outcome(way, *worth, *counts, damage, log_p.argmax(1).tolist(), tried))
    return found


def _verdict(outcomes: Sequence[Outcome]) -> str:
    model, bias, *_ = outcomes
    gain = f"The repair gains {model.ahead:.1f} points [{model.ahead_low:.1f}, {model.ahead_high:.1f}]"
    if bias.ahead_low <= 0:
        return f"{gain}; it does no more than offsets of the answers, as far as these examples tell."
    return f"{gain}, {bias.ahead:.1f} more than offsets of the answers."
