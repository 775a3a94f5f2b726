"""`npeff repair`: a combination of a few components that mends the model's answers and moves little else.

To first order, the stored rows say how answers change along a direction. So signs and sizes are a logistic regression
in the sketch, on the labels of the fit part. Everything else is chosen on the tune part: in the sketch, how strongly
directions avoid running text and how strongly sizes are held back; in the model, how many components there are and how
long the change is, under a limit of the damage to running text. What that is worth is measured once, on the test part
and on other text, beside other ways to spend the same labels.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from npeff.act.config import RepairConfig
from npeff.act.lora import fine_tune
from npeff.act.regression import changed, regress, take_in_turn
from npeff.analyse.answers import can_read, change_of_answers
from npeff.analyse.ranking import top_examples
from npeff.collect.config import CollectConfig
from npeff.collect.session import prepare_to_edit, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import Damage, Elsewhere, background_rows, read_passages
from npeff.perturb.evaluate import Divergence, find_magnitude
from npeff.perturb.lift import Lifter, Parameters, RowSums, group_sum, scale_to_unit
from npeff.perturb.protocol import make_plan
from npeff.perturb.statistics import mean_and_interval
from npeff.perturb.weights import EditedWeights, Saved, check_saving, save_change
from npeff.perturb.where import find_places
from npeff.perturb.whitening import FisherRows, read_background, whiten_within
from npeff.store.examples import label_texts, whole_texts
from npeff.store.layout import REPAIRS, choose_decomposition
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.task import asked_task
from npeff.utils import Array, Record, UserError, from_dict, only_one, replace, write_record, write_text
from npeff.utils.progress import progress
from npeff.utils.report import record_table, write_report

RIDGES = (1e-3, 1e-2, 1e-1)
"""What may be added to the Fisher of running text, as shares of its largest eigenvalue."""
PENALTIES = (3e-3, 1e-2, 3e-2, 1e-1)
"""Mean cross-entropies that may be worth as much as all the damage to running text that is allowed."""
COUNTS = (1, 4, 16)
"""Numbers of components that are tried in the model."""
SHARES = (0.3, 0.6, 1.0)
"""Lengths that are tried, as shares of the longest within the limit."""
TOLERANCE = 0.05
"""Share by which the damage may miss the limit, on its lower side."""
BINS = 10
"""Of probability, for the calibration error."""
MODEL, BIAS, REPAIR, NULL, LORA = "model", "bias", "repair", "random groups", "LoRA"
FORMATS = {"way": "", "accuracy": ".1%", "loss": ".3f", "calibration": ".3f"}
FORMATS |= {"damage": ".2e", "ahead": ".1f", "ahead_low": ".1f", "ahead_high": ".1f", "better": "", "worse": ""}
TRIAL_FORMATS = {"made_of": "", "ridge": "g", "penalty": "g", "length": ".3g", "loss": ".3f", "damage": ".2e"}
"""Columns of the report, and how their numbers are read."""


class Trial(Record):
    """A change at the length that did best on the tune part."""

    made_of: str
    """Its components in the order in which they were taken, each with how far the change goes along it; or the epoch
    of LoRA."""
    ridge: float | None
    """What was added to the Fisher of running text, as a share of its largest eigenvalue."""
    penalty: float | None
    """Of the sizes, as one of `PENALTIES`."""
    length: float
    """Its Euclidean length."""
    loss: float
    """Mean cross-entropy of the tune part."""
    damage: float
    """KL divergence a token at the longest length that was tried, on the text that lengths are chosen with."""


class Outcome(Record):
    """What one way to spend the labels is worth on the test part, and the repair beside it."""

    way: str
    """model: as it is. bias: offsets of the answers. repair: components. random groups: the same with groups of
    examples in their place. LoRA: fine-tuning."""
    accuracy: float
    """Share of right answers among labelled test examples."""
    loss: float
    """Mean negative log-probability of the right answer."""
    calibration: float
    """Expected calibration error: |share of right answers - mean probability of the answer|, mean over ten bins of
    that probability."""
    ahead: float
    """Accuracy of the repair minus this one, in points."""
    ahead_low: float
    """Lower end of the 95% interval of that difference, by bootstrap over the examples."""
    ahead_high: float
    """Upper end of it."""
    better: int
    """Examples that only the repair gets right."""
    worse: int
    """Examples that only this way gets right."""
    damage: float
    """KL divergence a token on running text that nothing was chosen with; 0 where no weight changes."""
    elsewhere: list[Damage]
    """The same with the prompts of built-in tasks."""
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
    ranks: dict[str, float]
    """Rank → share of the repair's squared length that so many singular vectors of each matrix keep."""
    saved: Saved | None
    """The change that was written, if that was asked for."""
    verdict: str
    """In a few sentences."""


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
        ways, vector = session.ways()
        tried = ways[REPAIR][2]
        saved = save_change(folder, 0, config.save, session.prepared, vector, tried[0].length, config.adapter_share)
        places = find_places(vector, ranks=True)
        ranks = {rank: sum(place.share * place.ranks[rank] for place in places) for rank in places[0].ranks}
        outcomes = compare_ways(ways, session.labels[session.test.examples])
        found = Repair(session.mended, outcomes, ranks, saved, verdict(outcomes))
        size = "Of the change " + ", ".join(f"rank {rank} keeps {share:.0%}" for rank, share in ranks.items()) + "."
        title = f"{len(session.test.examples)} held-out examples; {found.mended} labels to fit and to choose"
        table = record_table(title, outcomes, FORMATS)
        best = record_table("What the repair was chosen from, the best first", tried, TRIAL_FORMATS)
        damages = record_table("Damage of the repair", ways[REPAIR][1], {"text": "", "kl": ".2e", "tokens": ""})
        text = write_report(folder / "repair", [found.verdict, table, best, size, damages], csv=table)
        if saved is not None and (folder / saved.path).is_dir():
            write_text(folder / saved.path / "README.md", text)  # the report is the card
        write_record(folder / "repair.json", found)
    print(f"{text}in {folder}")
    return found


# --- what is wanted ---------------------------------------------------------------------------------------------------


def read_wanted(
    run: Run, decomposition: Decomposition, fit: Array, fix: tuple[str, ...]
) -> tuple[Array, Array, torch.Tensor]:
    """Which examples are to be mended, and to which answers.

    Args:
        run: The run.
        decomposition: One of its decompositions, for `lnp`.
        fit: Examples that it was fitted to.
        fix: As in the options.

    Returns:
        The right answer of each example, -1 where it is not known, [m]; which are to be mended, bool [m]; and the
        probabilities that the answers should have, float64 [m, r]: those of now where nothing is to be mended.

    Raises:
        UserError: `fix` cannot be read, or no labelled example is left.
    """
    names, table = list(run.manifest.task.labels), run.table
    labels = table["label"].fill_null(-1).to_numpy().copy()
    mend = run.usable.copy()
    columns = {"label": label_texts(table, names), "prediction": table["prediction_text"].to_pylist()}
    for each in fix:
        column, _, value = each.partition("=")
        if each == "lnp":
            mend &= _uses_tuned(decomposition, fit, labels, table["prediction"].to_numpy())
        elif column in columns:
            mend &= np.array([text == value for text in columns[column]])
        elif Path(each).is_file():
            asked = from_dict(CollectConfig, run.manifest.config).data
            data = DataConfig(data=each, text_column=asked.text_column, label_column=asked.label_column)
            given = load_dataset(asked_task(asked), data).table
            answers = dict(zip(whole_texts(given).to_pylist(), given["label"].fill_null(-1).to_pylist(), strict=True))
            texts = whole_texts(table).to_pylist()
            labels = np.array([answers.get(text, label) for text, label in zip(texts, labels, strict=True)])
            mend &= np.array([text in answers for text in texts])
        else:
            raise UserError(f"--fix takes a file, label=NAME, prediction=NAME or lnp, not {each!r}.")
    mend &= labels >= 0
    if not names or not mend.any():
        raise UserError("No labelled example of the run is to be mended: a repair needs some, and a task with labels.")
    Q = run.tensor("probabilities").double()
    Q[mend] = torch.nn.functional.one_hot(torch.from_numpy(labels[mend]).long(), len(names)).double()
    return labels, mend, Q


def _uses_tuned(decomposition: Decomposition, fit: Array, labels: Array, predictions: Array) -> Array:
    """Examples that most use a component whose top fitted ones have one label and not one prediction, bool [m]."""
    W = decomposition.scores(decomposition.orders[-1]).float().numpy()
    tops = [fit[top_examples(column)][: PerturbConfig("").top] for column in W[fit].T]
    tuned = [len(set(labels[top])) == 1 < len(set(predictions[top])) and labels[top[0]] >= 0 for top in tops]
    return np.array(tuned)[W.argmax(1)]


# --- changes and their worth ------------------------------------------------------------------------------------------


Measured = tuple[torch.Tensor, list[Damage], list[Trial]]
"""Log-probabilities of the test examples [n, r], damage, and what was tried before, the best first."""
Candidate = tuple[Trial, Parameters]
"""A change of any length, with a trial that does not know yet what it does in the model."""


class InSketch(Record):
    """What combinations are chosen with, without the model."""

    run: Run
    """The run."""
    rows: FisherRows
    """Rows of fitted examples: labels of these decide on signs and sizes, and they carry all changes."""
    tune: Array
    """Examples that choices are made on."""
    Q: torch.Tensor
    """Probabilities that the answers should have, [m, r]."""
    text: Sequence[torch.Tensor]
    """Rows of running text that directions avoid, and of other text that their damage is predicted with."""
    limit: float
    """Most damage."""

    def combine(self, vectors: torch.Tensor, numbers: Sequence[int]) -> list[tuple[Trial, torch.Tensor, torch.Tensor]]:
        """For each number of vectors the combination that promises most on the tune part, under the limit.

        Args:
            vectors: Vectors of the sketch, [J, p].
            numbers: What they are called.

        Returns:
            For each of `COUNTS` what it is made of, with predicted loss and damage; the combination [p]; and what it
            takes of each row [R].
        """
        fit, rows, (text, other) = self.rows.examples, self.rows.rows, (part.double() for part in self.text)
        largest = float(torch.linalg.eigvalsh(text @ text.T)[-1])
        best: dict[int, tuple[Trial, torch.Tensor, torch.Tensor]] = {}
        for ridge in RIDGES:
            carried = whiten_within(rows, text.float(), vectors.T, 1, ridge * largest)
            carried /= (rows.T @ carried.float()).norm(dim=0)
            unit = (carried.T.float() @ rows).double()
            cost = (unit @ text.T) @ (text @ unit.T) + ridge * largest * unit @ unit.T
            D, tuned = (change_of_answers(self.run, part.tolist(), unit) for part in (fit, self.tune))
            for penalty in PENALTIES:
                P = penalty / self.limit * cost
                for chosen, s in take_in_turn(COUNTS[-1], _log_p(self.run, fit), D, self.Q[fit], P):
                    damage = float((other @ unit[chosen].T @ s).square().sum()) / 2
                    s = s * min(1.0, math.sqrt(self.limit / max(damage, 1e-30)))
                    loss = _cross_entropy(changed(s, _log_p(self.run, self.tune), tuned[:, chosen]), self.Q[self.tune])
                    count = len(chosen)
                    if count in COUNTS and (count not in best or loss < best[count][0].loss):
                        made_of = ", ".join(f"{numbers[j]} ({size:+.2g})" for j, size in zip(chosen, s, strict=True))
                        trial = Trial(made_of, ridge, penalty, float((s @ unit[chosen]).norm()), loss, damage)
                        best[count] = trial, s @ unit[chosen], carried[:, chosen] @ s
        return list(best.values())


def _log_p(run: Run, examples: Array) -> torch.Tensor:
    """Log-probabilities of the answers as they were collected, [n, r]."""
    return run.tensor("probabilities")[examples].double().clamp_min(1e-30).log()


class _Session:
    """The model at work. Its weights are those of before whenever a method returns."""

    def __init__(self, run: Run, decomposition: Decomposition, config: RepairConfig) -> None:
        self.run, self.decomposition, self.config = run, decomposition, config
        if not can_read(run, decomposition) or not decomposition.notes.held_out:
            raise UserError("A repair needs Fisher rows and held-out examples: npeff decompose --holdout 0.5")
        self.plan = make_plan(run, decomposition, PerturbConfig(config.run, count=1, seed=config.seed))
        self.labels, mend, self.Q = read_wanted(run, decomposition, self.plan.fit, config.fix)
        self.mended = int(mend[np.concatenate([self.plan.fit, self.plan.tune.examples])].sum())
        passages, self.prepared = read_passages(config.elsewhere), prepare_to_edit(run, config.device)
        known = bool((self.labels[self.plan.test.examples] >= 0).any())
        if len(passages) < 2 or self.prepared.model.classifies or not (known and self.mended):
            raise UserError("A repair needs a language model, labels in all parts, and two paragraphs of --elsewhere.")
        check_saving(config.save, self.prepared)
        self.modules, self.prompts = self.prepared.selection.modules, read_prompts(run, self.prepared)
        parts = (self.plan.tune.examples.tolist(), self.plan.test.examples.tolist())
        self.tune, self.test = (Divergence(self.prepared, self.prompts, part) for part in parts)
        self.chosen_with, self.measured_on = (Elsewhere(self.prepared, passages[start::2]) for start in (0, 1))
        rows = read_background(run, self.plan.fit, config.seed)
        text = [background_rows(run, self.prepared, config.seed + draw) for draw in (0, 1)]
        self.sketch = InSketch(run, rows, self.plan.tune.examples, self.Q, text, config.limit)

    def ways(self) -> tuple[dict[str, Measured], Parameters]:
        """What every way does to the test part, and the repair."""
        before = self.test.probabilities.log()
        ways: dict[str, Measured] = {MODEL: (before, [], []), BIAS: (before + self._offsets(), [], [])}
        used = (self.decomposition.used > 0).nonzero().view(-1).tolist()
        components = self.decomposition.components[used].float()
        ways[REPAIR], vector = self._measure(self._combinations(components, used))
        for number in range(self.config.nulls):
            drawn = [self.plan.null(number * len(used) + j, self.config.seed).group for j in range(len(used))]
            source = self.run.source("fisher")
            groups = torch.stack([group_sum(source, group)[0] for group in drawn if group is not None])
            ways[f"{NULL} {number}"], _ = self._measure(self._combinations(groups, used))
        if self.config.lora:
            ways[LORA], _ = self._measure(self._adapters())
        return ways, vector

    def _measure(self, candidates: Iterable[Candidate]) -> tuple[Measured, Parameters]:
        """Choose among changes on the tune part, and measure the best one on the test part."""
        tried: list[Trial] = []
        best: Parameters = {}
        for trial, vector in progress(candidates, desc="Repairing", unit="change"):
            tried.append(self._choose(trial, vector))
            best = vector if tried[-1] is min(tried, key=_loss) else best
        tried.sort(key=_loss)
        with EditedWeights(self.modules) as weights:
            weights.add(best, tried[0].length)
            return (self.test.log_probabilities(), self.measured_on.measure(), tried), best

    def _choose(self, trial: Trial, vector: Parameters) -> Trial:
        """Make the vector a unit one, and find the length that does best on the tune part within the limit."""
        trials = []
        with EditedWeights(self.modules) as weights:

            def damage(length: float) -> float:
                weights.add(vector, length)
                return self.chosen_with.measure(prompts=False)[0].kl

            aim = self.config.limit / (1 + TOLERANCE)
            longest, most = find_magnitude(damage, aim, scale_to_unit(vector), TOLERANCE)
            for length in (share * longest for share in SHARES):
                weights.add(vector, length)
                loss = _cross_entropy(self.tune.log_probabilities(), self.Q[self.tune.examples])
                trials.append(replace(trial, length=length, loss=loss, damage=most))
        return min(trials, key=_loss)

    def _offsets(self) -> torch.Tensor:
        """Offsets of the answers [r] that the labels of fit and tune ask for."""
        labelled = np.concatenate([self.plan.fit, self.plan.tune.examples])
        log_p = _log_p(self.run, labelled)
        each = torch.eye(log_p.shape[1], dtype=torch.float64)
        return regress(log_p, each.expand(len(log_p), -1, -1), self.Q[labelled], 1e-6 * each)

    def _combinations(self, vectors: torch.Tensor, numbers: list[int]) -> Iterator[Candidate]:
        """The promising combinations of vectors of the sketch [J, p] as changes of the model, with what they are."""
        found, rows = self.sketch.combine(vectors, numbers), self.sketch.rows
        weights = torch.zeros(len(found), int(self.run.source("fisher").ranks.sum()))
        weights[:, rows.places] = torch.stack([carriers * rows.scales for *_, carriers in found]).float()
        sums = RowSums(torch.stack([vector for _, vector, _ in found]).float(), {"fisher": weights})
        lifted = Lifter(self.run, self.prepared, self.prompts).lift(sums)
        yield from zip((trial for trial, *_ in found), lifted, strict=True)

    def _adapters(self) -> Iterator[Candidate]:
        """What LoRA changes, after each epoch."""
        changes = fine_tune(self.prepared, self.prompts, self.plan.fit, self.Q, self.config.lora, self.config.seed)
        for epoch, change in enumerate(changes, 1):
            yield Trial(f"epoch {epoch}", None, None, 0.0, 0.0, 0.0), change


def _loss(trial: Trial) -> float:
    return trial.loss


def _cross_entropy(log_p: torch.Tensor, Q: torch.Tensor) -> float:
    return float(-(Q * log_p).sum(1).mean())


def calibration_error(log_p: torch.Tensor, labels: Array) -> float:
    """Expected calibration error of the most probable answers, over `BINS` bins of equal width.

    Args:
        log_p: Log-probabilities of the answers, [n, r].
        labels: The right answers, [n].

    Returns:
        Mean over the examples of |accuracy - mean probability| of their bin.
    """
    probability, answer = (values.numpy() for values in log_p.softmax(1).max(1))
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, (answer == labels) - probability)).sum() / len(labels))


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
        log_p, ahead = log_p.log_softmax(1), 100 * (right[REPAIR] - right[way])
        interval = mean_and_interval(ahead)[1] or (0.0, 0.0)
        sure = float(-log_p[known, labels[known]].mean()), calibration_error(log_p[known], labels[known])
        counts = int((ahead > 0).sum()), int((ahead < 0).sum())
        worth = float(right[way].mean()), *sure, float(ahead.mean()), *interval, *counts
        found.append(Outcome(way, *worth, damage[0].kl if damage else 0.0, damage, log_p.argmax(1).tolist(), tried))
    return found


def verdict(outcomes: list[Outcome]) -> str:
    """What the comparison says.

    Args:
        outcomes: Every way; one is the repair.

    Returns:
        A few sentences, which also name what the repair does not do better than.
    """
    gaps = {each.way: f"{each.ahead:.1f} points [{each.ahead_low:.1f}, {each.ahead_high:.1f}]" for each in outcomes}
    said = f"The repair gains {gaps.pop(MODEL)}."
    del gaps[REPAIR]
    said += "".join(f" Above {way}: {gap}." for way, gap in gaps.items())
    equal = [each.way for each in outcomes if each.way in gaps and each.ahead_low <= 0]
    return said + (f" It does no more than {' and '.join(equal)}, as far as these examples tell." if equal else "")
