"""What a perturbation does: KL(p_θ ‖ p_θ+δ) of a component's top examples, of related ones, and of random ones.

Sign, order and length of a change are chosen on the examples of the plan's `tune` part; then those of its `test` part
are measured, once.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from npeff.collect.session import Prepared
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import Damage, Elsewhere
from npeff.perturb.lift import Parameters
from npeff.perturb.protocol import Plan, Ranked, Subject
from npeff.perturb.statistics import Interval, Permuted, mean_interval, permute, ratio
from npeff.perturb.weights import EditedWeights, moving
from npeff.perturb.whitening import read_fishers
from npeff.utils import Array, Record

TOLERANCE = 0.1
"""Share by which the KL of the tune part may differ from the one asked for: that of other examples differs by more."""
SAME_TOLERANCE = 0.02
"""The same in the paper's protocol, where these very examples are measured."""
SEARCH = 40
"""Most evaluations of a search."""
WRITTEN = 3
"""Top examples of which is shown what the model writes, where it does."""
FARTHEST = 8
"""How many times as long as second order predicts a change may become: beyond, answers saturate or the model breaks."""
REACHED = 0.5
"""Share of the KL asked for from which a sign counts as one that reaches it."""
USUAL_SEARCH = 2
"""Evaluations that a search usually takes, for estimates."""
DERIVATIVE_COST = 3
"""Forward passes that take as long as one with derivatives."""


Change = Callable[[float], None]
"""Moves the model's weights by a length along a direction."""


class Divergence:
    """Answers of some examples under the weights at hand when this is made, to compare others with.

    Batches are the same every time, so that unchanged weights give a divergence of exactly zero.
    """

    def __init__(self, prepared: Prepared, prompts: Sequence[Sequence[int]], examples: Sequence[int]) -> None:
        self.examples = list(examples)
        self._model = prepared.collector.answer_model
        self._modules = prepared.selection.modules
        self._prompts = [prompts[i] for i in self.examples]
        self._batches = list(prepared.collector.batches(self._prompts, prepared.config.batch_tokens))
        self._before = self.log_probabilities()
        self.predictions: Array = self._before.argmax(1).numpy()

    def measure(self) -> tuple[Array, Array]:
        """KL divergence [n] of every example from before (infinite where it is no number), and predictions now [n]."""
        after = self.log_probabilities()
        kl = (self._before.exp() * (self._before - after)).sum(1).clamp_min(0)
        return kl.nan_to_num(nan=math.inf, posinf=math.inf).numpy(), after.argmax(1).numpy()

    @property
    def probabilities(self) -> torch.Tensor:
        """Those of before, float64 [n, r]."""
        return self._before.exp()

    def derivatives(self, vector: Parameters) -> torch.Tensor:
        """Derivatives Jv of the answer logits along a vector.

        Args:
            vector: Module name → [d_out, columns].

        Returns:
            float64 [n, r].
        """
        with moving(self._modules, vector) as derivative:  # once for all batches: it may have to copy the vector
            return self._outputs(lambda z: derivative(z).double())

    def effects(self, dz: torch.Tensor) -> Array:
        """KL per squared magnitude of an infinitesimal change of the logits: half the variance of dz under p.

        Args:
            dz: Derivatives of the answer logits, [n, r].

        Returns:
            One value for each example, [n].
        """
        mean = (self.probabilities * dz).sum(1, keepdim=True)
        variance: Array = (self.probabilities * (dz - mean).square()).sum(1).numpy()
        return variance / 2

    def log_probabilities(self) -> torch.Tensor:
        """Log p of all answers, float64 [n, r]; a small divergence would drown in float32."""
        with torch.inference_mode():
            return self._outputs(lambda z: z.double().log_softmax(1))

    def _outputs(self, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What `read` makes of the answer logits [B, r] of every batch, in the order of the examples."""
        parts = [read(self._model.logits([self._prompts[i] for i in batch])[0]).cpu() for batch in self._batches]
        order = torch.tensor([i for batch in self._batches for i in batch])
        return torch.cat(parts)[order.argsort()]


def find_magnitude(
    kl: Callable[[float], float], target: float, start: float, tolerance: float = SAME_TOLERANCE, most: float = math.inf
) -> tuple[float, float]:
    """A magnitude at which `kl` reaches `target` up to `tolerance`, a share of it.

    KL grows with the square of a small magnitude, so the next guess is the last one times √(target / kl); between a
    magnitude that is too small and one that is too large, and where that guess leaves the two, the geometric mean of
    both is taken. A magnitude is at most doubled at a time: where answers saturate, there may be a second one, far out,
    at which the model is merely broken.

    Args:
        kl: Mean divergence at a magnitude.
        target: The divergence to reach.
        start: Magnitude to begin with.
        tolerance: Share by which it may miss the target.
        most: Where to give up.

    Returns:
        The magnitude and the value there. Where a divergence never reaches the target (answers saturate), the nearest
        that was tried.
    """
    low, high = 0.0, math.inf
    magnitude, best = start, (start, math.nan)
    for _ in range(SEARCH):
        value = kl(magnitude)
        if not math.isfinite(value):
            high, magnitude = magnitude, magnitude / 4
            continue
        if math.isnan(best[1]) or _distance(value, target) < _distance(best[1], target):
            best = (magnitude, value)
        if abs(value / target - 1) <= tolerance:
            break
        if value < target:
            low = magnitude
        else:
            high = magnitude
        guess = magnitude * math.sqrt(target / value) if value > 0 else math.inf
        guess = min(max(guess, magnitude / 10), magnitude * 2)
        if not low < guess < high:
            guess = math.sqrt(low * high) if low > 0 else high / 4
        if guess > most or (low > 0 and high / low < 1 + tolerance / 4):
            break
        magnitude = guess
    return best


def _distance(value: float, target: float) -> float:
    return abs(math.log(value / target)) if value > 0 else math.inf


class CurvePoint(Record):
    """Divergences at one length of a change along a component."""

    magnitude: float
    """Euclidean length of the change of the parameters."""
    top_kl: float
    """Mean KL divergence of top examples."""
    random_kl: float
    """The same of random examples, without the component's top ones."""
    ratio: float
    """Mean KL of top examples ÷ mean KL of random ones."""


class Trial(CurvePoint):
    """A sign and an order that were tried on the examples that choices are made on."""

    order: str
    """How the component's examples are ranked: by positive, negative or absolute coefficients."""
    sign: int
    """1 or -1."""


class Written(Record):
    """What the model writes behind a prompt, with the same random numbers."""

    example: int
    """Number of the example."""
    before: str
    """With the model's own parameters."""
    after: str
    """With the changed ones."""


class Outcome(Trial):
    """What a change along one component does to the examples that are measured."""

    related_kl: float | None
    """Mean KL divergence of related examples, the next in rank; None if there are none."""
    norm_ratio: float
    """Mean norm of the Fishers of top examples ÷ that of random ones."""
    flipped: dict[str, int]
    """Predictions that changed among top, related and random examples."""
    accuracy: dict[str, tuple[float, float] | None]
    """Accuracy before and after on each of them; None without labels."""
    predicted_ratio: float | None
    """Ratio for a small change, from derivatives; None if it was not asked for."""
    top: list[int]
    """The top examples, best first."""
    interval: Interval | None = None
    """95% interval of the ratio, by bootstrap over the examples."""
    permuted: Permuted | None = None
    """The ratio when the component's coefficients are permuted over the measured examples."""
    elsewhere: list[Damage] = field(default_factory=list)
    """What the same change does to text that has nothing to do with the task."""
    top_kls: list[float] = field(default_factory=list)
    """KL divergence of each top example."""
    random_kls: list[float | None] = field(default_factory=list)
    """KL divergence of each random example; None for one that is a top example of this component."""
    written: list[Written] = field(default_factory=list)
    """Generated answers only: what the model writes for the first top examples, before and after the change."""


class Measured(Record):
    """Everything that was measured along one direction."""

    best: Outcome
    """On the test part, for the order and sign that did best on the tune part."""
    tried: list[Trial]
    """Orders and signs on the tune part."""
    curve: list[CurvePoint]
    """At other lengths, on the test part, if that was asked for."""


class Evaluator:
    """Measures perturbations of a run's model. The model's weights are those of before whenever a method returns."""

    def __init__(
        self, plan: Plan, prepared: Prepared, prompts: Sequence[Sequence[int]], elsewhere: Elsewhere | None = None
    ) -> None:
        self._plan, self._prepared, self._prompts, self._elsewhere = plan, prepared, prompts, elsewhere
        self._bar: tqdm[Any] = tqdm(disable=True)
        begin = time.perf_counter()
        self._tune_random, self._test_random = map(self._divergence, (plan.tune.random, plan.test.random))
        self.seconds_per_example = (time.perf_counter() - begin) / (len(plan.tune.random) + len(plan.test.random))
        """Time of a forward pass."""
        table = plan.run.table
        self._norms = table["pef_norm"].to_numpy() if "pef_norm" in table.column_names else np.ones(len(table))
        self._labels = table["label"].fill_null(-1).to_numpy()

    def passes(self, subject: Subject, config: PerturbConfig) -> int:
        """Examples that measuring a component usually passes through the model.

        Args:
            subject: The component or null.
            config: What is measured.

        Returns:
            The number, in which a pass with derivatives counts `DERIVATIVE_COST` times.
        """
        search = 1 if config.magnitude else USUAL_SEARCH
        tries = sum((1 + 2 * search) * len(each.top) + 2 * len(self._plan.tune.random) for each in subject.tune)
        ranked, random = subject.test[0], len(self._plan.test.random)
        measured = 2 * (len(ranked.top) + len(ranked.related)) + random
        besides = (len(ranked.top) + random) * (DERIVATIVE_COST * config.predict + len(config.curve))
        return tries + measured + besides

    def measure(self, subject: Subject, vector: Parameters, sketched: torch.Tensor, config: PerturbConfig) -> Measured:
        """Perturb along both signs of a vector, and measure the one that does better on the tune part.

        Args:
            subject: The component or null, with its examples.
            vector: Direction of unit length: module name → [d_out, columns].
            sketched: Its sketch, [p], from which a first guess of the length is made.
            config: At which magnitude to measure, and what besides.

        Returns:
            What was measured.
        """
        about, total = f"Measuring {subject.name}", self.passes(subject, config)
        with tqdm(total=total, desc=about, unit="ex", leave=False, disable=None) as self._bar:
            before = [self._divergence(ranked.top) for ranked in subject.tune]
            with EditedWeights(self._prepared.selection.modules) as weights:

                def change(length: float) -> None:
                    weights.add(vector, length)

                tried = [
                    (trial, place)
                    for place, (ranked, top) in enumerate(zip(subject.tune, before, strict=True))
                    for trial in self._try(change, ranked, top, sketched, config)
                ]
                reached = [pair for pair in tried if config.magnitude or pair[0].top_kl >= REACHED * config.aim]
                chosen, place = max(reached or tried, key=lambda pair: pair[0].ratio)
                weights.restore()
                ranked = subject.test[place]
                groups = {"top": self._divergence(ranked.top), "random": self._test_random}
                if len(ranked.related):
                    groups["related"] = self._divergence(ranked.related)
                predicted = self._predict(ranked, groups, vector) if config.predict else None
                shown = ranked.top[:WRITTEN].tolist() if subject.kind == "component" else []
                wrote = self._write(shown)
                change(chosen.sign * chosen.magnitude)
                best = self._outcome(chosen, ranked, groups, predicted, subject.kind == "component")
                best = replace(best, written=list(map(Written, shown, wrote, self._write(shown))))
                curve = []
                for factor in sorted(config.curve):
                    change(chosen.sign * chosen.magnitude * factor)
                    kls = float(self._kls(groups["top"]).mean()), self._mean_random(self._test_random, ranked)
                    curve.append(CurvePoint(chosen.magnitude * factor, *kls, ratio(*kls)))
        return Measured(best, [trial for trial, _ in tried], curve)

    def _write(self, examples: Sequence[int]) -> list[str]:
        """What the model writes for examples under the weights of now; nothing where answers are not generated."""
        model, decode = self._prepared.collector.answer_model, self._prepared.model.tokenizer.decode
        prompts = [self._prompts[i] for i in examples] if self._prepared.task.answers == "generated" else []
        return [decode(list(model.sample(prompt)[0])) for prompt in prompts]

    def _divergence(self, examples: Array) -> Divergence:
        """Examples with their answers under the weights of now."""
        self._bar.update(len(examples))
        return Divergence(self._prepared, self._prompts, examples.tolist())

    def _kls(self, group: Divergence) -> Array:
        self._bar.update(len(group.examples))
        return group.measure()[0]

    def _mean_random(self, group: Divergence, ranked: Ranked) -> float:
        """Mean divergence of random examples, without those that are top examples of the component."""
        return float(self._kls(group)[_others(group, ranked)].mean())

    def _try(
        self, change: Change, ranked: Ranked, top: Divergence, sketched: torch.Tensor, config: PerturbConfig
    ) -> Iterator[Trial]:
        """Both signs on the tune part, at the length that gives its top examples the KL that is asked for."""
        size = config.magnitude or self._guess(ranked.top, sketched, config.aim)
        for sign in (1, -1):
            length = size or 1.0

            def top_kl(at: float, sign: int = sign) -> float:
                change(sign * at)
                return float(self._kls(top).mean())

            tolerance = SAME_TOLERANCE if self._plan.protocol == "paper" else TOLERANCE
            if config.magnitude is None:
                farthest = FARTHEST * size if size else math.inf
                length, value = find_magnitude(top_kl, config.aim, length, tolerance, farthest)
                change(sign * length)
            else:
                value = top_kl(length)
            random = self._mean_random(self._tune_random, ranked)
            yield Trial(length, value, random, ratio(value, random), ranked.order, sign)

    def _guess(self, top: Array, sketched: torch.Tensor, target: float) -> float | None:
        """The length at which top examples reach a KL, to second order and from the sketch; None if nobody knows."""
        if "fisher" not in self._plan.run.manifest.collected:
            return None
        effect = float((read_fishers(self._plan.run, top).rows @ sketched).double().square().sum()) / (2 * len(top))
        return math.sqrt(target / effect) if effect > 0 else None

    def _predict(self, ranked: Ranked, groups: Mapping[str, Divergence], vector: Parameters) -> float:
        """The ratio for a small change.

        From exact derivatives: the sketch of a whitened vector underestimates its effect on examples that it was not
        whitened against.
        """
        effects = {name: groups[name].effects(groups[name].derivatives(vector)) for name in ("top", "random")}
        self._bar.update(DERIVATIVE_COST * sum(map(len, effects.values())))
        return ratio(float(effects["top"].mean()), float(effects["random"][_others(groups["random"], ranked)].mean()))

    def _outcome(
        self, chosen: Trial, ranked: Ranked, groups: Mapping[str, Divergence], predicted: float | None, elsewhere: bool
    ) -> Outcome:
        """What the weights at hand do to all groups of examples."""
        kls: dict[str, Array] = {}
        flipped: dict[str, int] = {}
        accuracy: dict[str, tuple[float, float] | None] = {}
        for name, group in groups.items():
            counted = _others(group, ranked) if name == "random" else np.ones(len(group.examples), dtype=bool)
            values, predictions = group.measure()
            self._bar.update(len(values))
            kls[name] = np.where(counted, values, np.nan)
            flipped[name] = int((predictions != group.predictions)[counted].sum())
            labels = self._labels[group.examples]
            known = (labels >= 0) & counted
            before, after = ((answers == labels)[known].tolist() for answers in (group.predictions, predictions))
            accuracy[name] = (fmean(before), fmean(after)) if before else None
        means = {name: float(np.nanmean(values)) for name, values in kls.items()}
        random = np.array(groups["random"].examples)[_others(groups["random"], ranked)]
        return Outcome(
            *(chosen.magnitude, means["top"], means["random"], ratio(means["top"], means["random"])),
            order=ranked.order,
            sign=chosen.sign,
            related_kl=means.get("related"),
            norm_ratio=ratio(float(self._norms[ranked.top].mean()), float(self._norms[random].mean())),
            flipped=flipped,
            accuracy=accuracy,
            predicted_ratio=predicted,
            top=ranked.top.tolist(),
            interval=mean_interval([kls["top"]], [kls["random"]], components=False),
            permuted=permute(kls["top"], kls["random"]),
            elsewhere=self._elsewhere.measure() if elsewhere and self._elsewhere is not None else [],
            top_kls=kls["top"].tolist(),
            random_kls=[None if math.isnan(value) else value for value in kls["random"].tolist()],
        )


def _others(group: Divergence, ranked: Ranked) -> Array:
    """Which examples of a group are no top examples of a component, bool [n]."""
    return ~np.isin(group.examples, ranked.top)
