"""What a perturbation does: KL(p_θ ‖ p_θ+δ) of a component's top examples, of related ones, and of random ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from npeff.collect.session import Prepared
from npeff.perturb.config import PerturbConfig
from npeff.perturb.lift import Parameters
from npeff.perturb.protocol import Plan, Tops
from npeff.perturb.weights import EditedWeights, moving
from npeff.store.run import Run
from npeff.utils.types import Array

SMALLEST = 1e-12
"""Smaller divergences count as this; it keeps ratios finite."""
TOLERANCE = 0.02
"""Share by which the KL that `find_magnitude` reaches may differ from the one asked for."""
SEARCH = 24
"""Most evaluations of a search."""
USUAL_SEARCH = 4
"""Evaluations that a search usually takes, for estimates."""
DERIVATIVE_COST = 3
"""Forward passes that take as long as one with derivatives."""


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
        self._before = self._log_probabilities()
        self.predictions: Array = self._before.argmax(1).numpy()

    def measure(self) -> tuple[Array, Array]:
        """KL divergence [n] of every example from before (infinite where it is no number), and predictions now [n]."""
        after = self._log_probabilities()
        kl = (self._before.exp() * (self._before - after)).sum(1).clamp_min(0)
        return kl.nan_to_num(nan=math.inf, posinf=math.inf).numpy(), after.argmax(1).numpy()

    def second_order(self, vector: Parameters) -> Array:
        """KL per squared magnitude of an infinitesimal change along a vector: half the variance of Jv under p.

        Args:
            vector: Module name → [d_out, columns].

        Returns:
            One value for each example, [n].
        """
        with moving(self._modules, vector) as derivative:  # once for all batches: it may have to copy the vector
            dz = self._outputs(lambda z: derivative(z).double())
        p = self._before.exp()
        mean = (p * dz).sum(1, keepdim=True)
        variance: Array = (p * (dz - mean).square()).sum(1).numpy()
        return variance / 2

    def _log_probabilities(self) -> torch.Tensor:
        """Log p of all answers, float64 [n, r]; a small divergence would drown in float32."""
        with torch.inference_mode():
            return self._outputs(lambda z: z.double().log_softmax(1))

    def _outputs(self, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What `read` makes of the answer logits [B, r] of every batch, in the order of the examples."""
        parts = [read(self._model.logits([self._prompts[i] for i in batch])[0]).cpu() for batch in self._batches]
        order = torch.tensor([i for batch in self._batches for i in batch])
        return torch.cat(parts)[order.argsort()]


def find_magnitude(kl: Callable[[float], float], target: float, start: float) -> tuple[float, float]:
    """A magnitude at which `kl` reaches `target` up to `TOLERANCE`.

    KL grows with the square of a small magnitude, so the next guess is the last one times √(target / kl); between a
    magnitude that is too small and one that is too large, and where that guess leaves the two, the geometric mean of
    both is taken.

    Args:
        kl: Mean divergence at a magnitude.
        target: The divergence to reach.
        start: Magnitude to begin with.

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
        if abs(value / target - 1) <= TOLERANCE:
            break
        if value < target:
            low = magnitude
        else:
            high = magnitude
        guess = magnitude * math.sqrt(target / value) if value > 0 else magnitude * 10
        guess = min(max(guess, magnitude / 10), magnitude * 10)
        if not low < guess < high:
            guess = math.sqrt(low * high) if low > 0 else high / 4
        if low > 0 and high / low < 1 + TOLERANCE / 4:
            break
        magnitude = guess
    return best


def _distance(value: float, target: float) -> float:
    return abs(math.log(value / target)) if value > 0 else math.inf


@dataclass(frozen=True)
class CurvePoint:
    """Divergences at one length of a change along a component."""

    magnitude: float
    """Euclidean length of the change of the parameters."""
    top_kl: float
    """Mean KL divergence of top examples."""
    random_kl: float
    """The same of random examples."""
    ratio: float
    """Mean KL of top examples ÷ mean KL of random ones."""


@dataclass(frozen=True)
class Outcome(CurvePoint):
    """One component, perturbed along one sign of its direction."""

    order: str
    """How the component's examples are ranked: by positive, negative or absolute coefficients."""
    sign: int
    """1 or -1."""
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


Groups = dict[str, Divergence]
"""top, random and, if there are any, related examples."""


class Evaluator:
    """Measures perturbations of a run's model. The model's weights are those of before whenever a method returns."""

    def __init__(self, run: Run, prepared: Prepared, prompts: Sequence[Sequence[int]], plan: Plan) -> None:
        self._prepared, self._prompts = prepared, prompts
        begin = time.perf_counter()
        self._random = Divergence(prepared, prompts, plan.random.tolist())
        self.seconds_per_example = (time.perf_counter() - begin) / len(plan.random)
        """Time of a forward pass."""
        table = run.table
        self._norms = table["pef_norm"].to_numpy() if "pef_norm" in table.column_names else np.ones(len(table))
        self._labels = table["label"].fill_null(-1).to_numpy()
        self._bar: tqdm[Any] = tqdm(disable=True)

    def passes(self, orders: Sequence[Tops], config: PerturbConfig) -> int:
        """Examples that measuring a component usually passes through the model.

        Args:
            orders: The component's examples under every order.
            config: What is measured.

        Returns:
            The number, in which a pass with derivatives counts `DERIVATIVE_COST` times.
        """
        random, passes = len(self._random.examples), 0
        for tops in orders:
            search = USUAL_SEARCH * len(tops.top) if config.magnitude is None else 0
            passes += 2 * (search + len(tops.top) + len(tops.related) + random)
            passes += DERIVATIVE_COST * len(tops.top) if config.predict or search else 0
        return passes + config.predict * DERIVATIVE_COST * random + len(config.curve) * (len(orders[0].top) + random)

    def measure(
        self, orders: Sequence[Tops], vector: Parameters, config: PerturbConfig
    ) -> tuple[list[Outcome], Outcome, list[CurvePoint]]:
        """Perturb along both signs of a vector.

        Args:
            orders: The component's examples under every order.
            vector: Direction of unit length: module name → [d_out, columns].
            config: At which magnitude to measure, and what besides.

        Returns:
            The outcomes of every order and sign, the one with the highest ratio, and the curve of that one.
        """
        about, total = f"Measuring component {orders[0].component}", self.passes(orders, config)
        outcomes: list[tuple[Outcome, Groups]] = []
        with tqdm(total=total, desc=about, unit="ex", leave=False, disable=None) as self._bar:
            on_random = self._second_order(self._random, vector) if config.predict else None
            before = [(tops, self._groups(tops)) for tops in orders]
            needed = config.predict or config.magnitude is None
            on_top = [self._second_order(groups["top"], vector) if needed else 0.0 for _, groups in before]
            with EditedWeights(self._prepared.selection.modules) as weights:
                for (tops, groups), effect in zip(before, on_top, strict=True):
                    predicted = None if on_random is None else ratio(effect, on_random)
                    size = (config.target_kl / effect) ** 0.5 if effect > 0 else 1.0
                    for sign in (1, -1):
                        size = config.magnitude or self._search(weights, vector, sign, groups, config.target_kl, size)
                        weights.add(vector, sign * size)
                        outcomes.append((self._outcome(tops, sign, size, groups, predicted), groups))
                best, groups = max(outcomes, key=lambda pair: pair[0].ratio)
                curve = []
                for factor in sorted(config.curve):
                    weights.add(vector, best.sign * best.magnitude * factor)
                    top, random = (self._kl(groups[name])[0] for name in ("top", "random"))
                    curve.append(CurvePoint(best.magnitude * factor, top, random, ratio(top, random)))
        return [outcome for outcome, _ in outcomes], best, curve

    def _groups(self, tops: Tops) -> Groups:
        """The examples with their answers before, which are computed once for all measurements."""
        ranked = {"top": tops.top.tolist(), "related": tops.related.tolist()}
        groups = {name: Divergence(self._prepared, self._prompts, group) for name, group in ranked.items() if group}
        return groups | {"random": self._random}

    def _second_order(self, group: Divergence, vector: Parameters) -> float:
        """Mean second-order KL for a change of length 1.

        From exact derivatives: the sketch of a whitened vector underestimates its effect on examples that it was not
        whitened against.
        """
        value = float(group.second_order(vector).mean())
        self._bar.update(DERIVATIVE_COST * len(group.examples))
        return value

    def _kl(self, group: Divergence) -> tuple[float, Array]:
        """Mean divergence, and predictions."""
        kl, predictions = group.measure()
        self._bar.update(len(group.examples))
        return float(kl.mean()), predictions

    def _search(
        self, weights: EditedWeights, vector: Parameters, sign: int, groups: Groups, target: float, start: float
    ) -> float:
        """The magnitude that gives top examples the KL that is asked for."""

        def top_kl(size: float) -> float:
            weights.add(vector, sign * size)
            return float(groups["top"].measure()[0].mean())

        magnitude, _ = find_magnitude(top_kl, target, start)
        self._bar.update(USUAL_SEARCH * len(groups["top"].examples))
        return magnitude

    def _outcome(self, tops: Tops, sign: int, magnitude: float, groups: Groups, predicted: float | None) -> Outcome:
        """What the weights at hand do to all groups of examples."""
        means: dict[str, float] = {}
        flipped: dict[str, int] = {}
        accuracy: dict[str, tuple[float, float] | None] = {}
        for name, group in groups.items():
            means[name], predictions = self._kl(group)
            flipped[name] = int((predictions != group.predictions).sum())
            labels = self._labels[group.examples]
            known = labels >= 0
            before, after = ((answers == labels)[known].tolist() for answers in (group.predictions, predictions))
            accuracy[name] = (fmean(before), fmean(after)) if before else None
        norms = [float(self._norms[groups[name].examples].mean()) for name in ("top", "random")]
        return Outcome(
            *(magnitude, means["top"], means["random"], ratio(means["top"], means["random"])),
            order=tops.order,
            sign=sign,
            related_kl=means.get("related"),
            norm_ratio=ratio(*norms),
            flipped=flipped,
            accuracy=accuracy,
            predicted_ratio=predicted,
            top=tops.top.tolist(),
        )


def ratio(above: float, below: float) -> float:
    """Above / below, positive also where nothing happens or one of them is infinite."""
    return 1.0 if above == below else max(SMALLEST, max(above, SMALLEST) / max(below, SMALLEST))


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
