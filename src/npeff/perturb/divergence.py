"""How much a change of the weights changes predictions: KL(p_θ ‖ p_θ+δ) of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from npeff.collect.session import Prepared
from npeff.perturb.lift import Parameters
from npeff.perturb.tangent import moving

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
