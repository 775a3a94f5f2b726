"""What a perturbation does: to the component's top examples, to related ones, and to random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from npeff.collect.session import Prepared
from npeff.perturb.lift import Parameters
from npeff.perturb.protocol import Plan, Tops
from npeff.perturb.weights import EditedWeights, moving
from npeff.store.run import Run

SMALLEST = 1e-12
"""Divergences are not told apart below this; it keeps ratios finite."""
TOLERANCE = 0.02
"""Share by which the KL that `find_magnitude` reaches may differ from the one asked for."""
SEARCH = 24
"""Most evaluations of a search."""


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
        self.predictions = self._predictions(self._before)

    def measure(self) -> tuple[np.ndarray, np.ndarray]:
        """KL divergence [n] of every example from before, and the predictions now [n]."""
        after = self._log_probabilities()
        found = np.empty(len(self.examples))
        for batch, old, new in zip(self._batches, self._before, after, strict=True):
            found[batch] = (old.exp() * (old - new)).sum(1).clamp_min(0).numpy()
        return found, self._predictions(after)

    def second_order(self, vector: Parameters) -> np.ndarray:
        """KL per squared magnitude [n] of an infinitesimal change along `vector`: half the variance of Jv under p."""
        found = np.empty(len(self.examples))
        with moving(self._modules, vector) as derivative:  # once for all batches: it may have to copy the vector
            for batch, before in zip(self._batches, self._before, strict=True):
                dz = derivative(self._model.logits([self._prompts[i] for i in batch])[0]).double().cpu()
                p = before.exp()
                mean = (p * dz).sum(1, keepdim=True)
                found[batch] = 0.5 * (p * (dz - mean).square()).sum(1).numpy()
        return found

    def _log_probabilities(self) -> list[torch.Tensor]:
        """Log p of all answers, float64 [B, r] for every batch; a small divergence would drown in float32."""
        with torch.inference_mode():
            logits = [self._model.logits([self._prompts[i] for i in batch])[0] for batch in self._batches]
            return [z.double().log_softmax(1).cpu() for z in logits]

    def _predictions(self, log_probabilities: list[torch.Tensor]) -> np.ndarray:
        found = np.empty(len(self.examples), dtype=np.int64)
        for batch, values in zip(self._batches, log_probabilities, strict=True):
            found[batch] = values.argmax(1).numpy()
        return found


def find_magnitude(kl: Callable[[float], float], target: float, start: float) -> tuple[float, float]:
    """A magnitude at which `kl` reaches `target` up to `TOLERANCE`, and the value there.

    KL grows with the square of a small magnitude, so the next guess is the last one times √(target / kl); between a
    magnitude that is too small and one that is too large, and where that guess leaves the two, the geometric mean of
    both is taken. Where a divergence never reaches the target (answers saturate), the nearest value found is returned.
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
class Outcome:
    """One component, perturbed along one sign of its direction."""

    order: str
    sign: int
    magnitude: float
    """Euclidean length of the change of the parameters."""
    top_kl: float
    related_kl: float | None
    random_kl: float
    ratio: float
    """Mean KL of top examples ÷ mean KL of random ones."""
    norm_ratio: float
    """The same of the norms of their Fishers: how much more sensitive top examples are to anything."""
    flipped: dict[str, int]
    """Predictions that changed among top, related and random examples."""
    accuracy: dict[str, tuple[float, float] | None]
    """Accuracy before and after on each of them; None without labels."""


class Evaluator:
    """Measures perturbations of a run's model. The model's weights are those of before whenever a method returns."""

    def __init__(self, run: Run, prepared: Prepared, prompts: Sequence[Sequence[int]], plan: Plan) -> None:
        self.run, self.prepared, self.prompts, self.plan = run, prepared, prompts, plan
        self._random = Divergence(prepared, prompts, plan.random.tolist())
        table = run.table
        self._norms = table["pef_norm"].to_numpy() if "pef_norm" in table.column_names else np.ones(len(table))
        self._labels = table["label"].fill_null(-1).to_numpy()
        self.bar: tqdm[Any] | None = None
        """Counts the examples that are passed through the model, if somebody wants to see it."""

    def _count(self, group: Divergence) -> Divergence:
        """The group, which is about to be measured."""
        if self.bar is not None:
            self.bar.update(len(group.examples))
        return group

    def evaluate(
        self, tops: Tops, vector: Parameters, magnitude: float | None, target_kl: float, start: float = 1.0
    ) -> list[Outcome]:
        """Both signs of a unit vector, at a fixed magnitude or at the one that gives top examples `target_kl`."""
        groups = self._groups(tops)
        outcomes = []
        with EditedWeights(self.prepared.selection.modules) as weights:
            for sign in (1, -1):

                def top_kl(size: float, sign: int = sign) -> float:
                    weights.add(vector, sign * size)
                    return float(self._count(groups["top"]).measure()[0].mean())

                size = magnitude if magnitude is not None else find_magnitude(top_kl, target_kl, start)[0]
                start = size
                weights.add(vector, sign * size)
                outcomes.append(self._outcome(tops, sign, size, groups))
        return outcomes

    def curve(
        self, tops: Tops, vector: Parameters, outcome: Outcome, factors: Sequence[float]
    ) -> list[dict[str, float]]:
        """Divergences and ratio at multiples of an outcome's magnitude."""
        top, points = self._groups(tops)["top"], []
        with EditedWeights(self.prepared.selection.modules) as weights:
            for factor in factors:
                weights.add(vector, outcome.sign * outcome.magnitude * factor)
                on_top, on_random = (float(self._count(group).measure()[0].mean()) for group in (top, self._random))
                points.append(
                    {
                        "magnitude": outcome.magnitude * factor,
                        "top_kl": on_top,
                        "random_kl": on_random,
                        "ratio": ratio(on_top, on_random),
                    }
                )
        return points

    def predict(
        self, orders: Sequence[Tops], vector: Parameters, random_too: bool = True
    ) -> list[tuple[float, float | None]]:
        """Second-order KL of top and of random examples for a change of length 1 along a unit vector, for each order.

        From exact derivatives: the sketch of a whitened vector underrates what it does to examples that it was not
        whitened against. They cost more than three measurements, so random examples may be left out.
        """
        random = float(self._count(self._random).second_order(vector).mean()) if random_too else None
        tops = [Divergence(self.prepared, self.prompts, tops.top.tolist()) for tops in orders]
        return [(float(self._count(top).second_order(vector).mean()), random) for top in tops]

    def _groups(self, tops: Tops) -> dict[str, Divergence]:
        groups = {"top": Divergence(self.prepared, self.prompts, tops.top.tolist()), "random": self._random}
        if len(tops.related):
            groups["related"] = Divergence(self.prepared, self.prompts, tops.related.tolist())
        return groups

    def _outcome(self, tops: Tops, sign: int, magnitude: float, groups: dict[str, Divergence]) -> Outcome:
        means: dict[str, float] = {}
        flipped: dict[str, int] = {}
        accuracy: dict[str, tuple[float, float] | None] = {}
        for name, group in groups.items():
            kl, predictions = self._count(group).measure()
            means[name] = float(kl.mean())
            flipped[name] = int((predictions != group.predictions).sum())
            labels = self._labels[group.examples]
            known = labels >= 0
            accuracy[name] = (
                (
                    float((group.predictions == labels)[known].mean()),
                    float((predictions == labels)[known].mean()),
                )
                if known.any()
                else None
            )
        norms = [float(self._norms[examples].mean()) for examples in (tops.top, self.plan.random)]
        return Outcome(
            order=tops.order,
            sign=sign,
            magnitude=magnitude,
            top_kl=means["top"],
            related_kl=means.get("related"),
            random_kl=means["random"],
            ratio=ratio(means["top"], means["random"]),
            norm_ratio=ratio(*norms),
            flipped=flipped,
            accuracy=accuracy,
        )


def ratio(above: float, below: float) -> float:
    """Above / below, finite also where nothing happens."""
    return max(above, SMALLEST) / max(below, SMALLEST)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over components, each by its best sign and order, as in the paper's table."""
    best = [record["best"] for record in records]
    predicted = [outcome["predicted_ratio"] for outcome in best if outcome["predicted_ratio"] is not None]
    return {
        "components": len(records),
        "kl_ratio": geometric_mean(outcome["ratio"] for outcome in best),
        "norm_ratio": geometric_mean(outcome["norm_ratio"] for outcome in best),
        "predicted_ratio": geometric_mean(predicted) if predicted else None,
        "fidelity": min((record["fidelity"] for record in records), default=math.nan),
    }
