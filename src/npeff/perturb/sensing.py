"""Compressed sensing: a sparse vector of parameter space from its sketch alone.

Fixed-point continuation (Hale, Yin and Zhang, "A fixed-point continuation method for l1-regularized minimization with
applications to compressed sensing", 2007) for min_u ‖u‖₁ + ‖Au − h‖² / 2μ. An iteration is

    v = u − τ Aᵀ(Au − h),        u = sign(v) max(|v| − τμ, 0)

and μ falls from γ‖Aᵀh‖_∞, where u is zero, by a factor β at a time to the μ that is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from tqdm import tqdm

from npeff.collect.sketch.base import Sketch
from npeff.perturb.config import SensingConfig
from npeff.perturb.lift import Parameters, norm, scale_to_unit
from npeff.utils.errors import UserError

GAMMA = 0.99
"""Continuation starts where the vector leaves zero, times this."""
BETA = 4.0
"""Factor by which mu falls between steps of the continuation."""
INNER_TOLERANCE = 1e-3
"""An inner loop ends when the vector changes by less than this share of its length."""
MARGIN = 1.05
"""A power iteration comes to the largest singular value from below; the step must not be too long for it."""
POWER_ITERATIONS = 12
PLANTED = 32
"""Entries of the vector that a sketch is tried with."""
RECOVERED = 0.9
"""Cosine with which they have to be found again."""
THOROUGH = SensingConfig(inner_iterations=20, long_steps=True)
"""Finds sparse vectors exactly where the sketch allows it."""


@dataclass(frozen=True)
class Sensed:
    """A vector found by compressed sensing, and how it was."""

    vector: Parameters
    """Of unit length: module name → [d_out, columns]."""
    entries: int
    """How many entries are not zero."""
    residual: float
    """‖Au - h‖ / ‖h‖ at the best length of u."""
    iterations: int
    """Iterations that it took."""


class Scaled:
    """A sketch divided by its largest singular value, as the solver's step length wants it."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        self.size = sum(module.size for module in sketch.modules.values())

    @cached_property
    def norm(self) -> float:
        """The divisor, found when it is first needed: it takes passes over all parameters."""
        return largest_singular_value(self.sketch) * MARGIN

    @property
    def step(self) -> float:
        """τ by equation (73) of Hale, Yin and Zhang."""
        return min(1 + 1.665 * (1 - self.sketch.dim / self.size), 1.999)

    def matvec(self, vector: Parameters) -> torch.Tensor:
        """Au, [p]."""
        return self.sketch.matvec(vector) / self.norm

    def rmatvec(self, y: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Aᵀy for y [p], one module at a time: its name and [d_out, columns]."""
        for module, part in self.sketch.rmatvec(y):
            yield module.name, part.div_(self.norm)


def largest_singular_value(sketch: Sketch) -> float:
    """‖A‖ by power iteration on AAᵀ, from matvec and rmatvec alone.

    Args:
        sketch: A.

    Returns:
        The norm, slightly too small.
    """
    y = torch.randn(sketch.dim, generator=torch.Generator().manual_seed(0)).to(sketch.device)
    length = 0.0
    for _ in range(POWER_ITERATIONS):
        y /= y.norm()
        y = gram_product(sketch, y)
        before, length = length, float(y.norm())
        if abs(length - before) < 1e-3 * length:
            break
    return math.sqrt(length)


def gram_product(sketch: Sketch, y: torch.Tensor) -> torch.Tensor:
    """AAᵀy, one module at a time: no vector of parameter space is held."""
    total = torch.zeros_like(y)
    for module, part in sketch.rmatvec(y):
        total += sketch.matvec({module.name: part})
    return total


def sense(scaled: Scaled, h: torch.Tensor, config: SensingConfig, description: str = "Sensing") -> Sensed:
    """A sparse vector whose sketch is along h.

    Args:
        scaled: The sketch.
        h: What the sketch should be, up to its length, [p].
        config: Options of the solver.
        description: What its bar of progress is called.

    Returns:
        The vector, of unit length; memory 8 · parameters.

    Raises:
        UserError: Every entry is zero.
    """
    h = h.to(scaled.sketch.device, torch.float32)
    h = h / h.norm()
    modules = scaled.sketch.modules.values()
    state = _State({module.name: torch.zeros(module.shape, device=h.device) for module in modules}, h.clone())
    largest = max(float(part.abs().max()) for _, part in scaled.rmatvec(h))
    iterations, step = 0, scaled.step
    larger = itertools.takewhile(lambda mu: mu > config.mu, (GAMMA * largest / BETA**k for k in itertools.count()))
    for mu in tqdm([*larger, config.mu], desc=description, unit="step", leave=False, disable=None):
        for _ in range(config.inner_iterations):
            state, change, step = _iterate(scaled, state, h, mu, step if config.long_steps else scaled.step)
            iterations += 1
            if change < INNER_TOLERANCE:
                break
    u = state.u
    entries = sum(int((part != 0).sum()) for part in u.values())
    if not entries:
        raise UserError("Compressed sensing found no entry: its mu is too large. Lower --mu.")
    scale_to_unit(u)
    sketched = scaled.matvec(u)
    misfit = h - sketched * (h @ sketched) / sketched.square().sum()
    return Sensed(u, entries, float(misfit.norm()), iterations)


@dataclass
class _State:
    u: Parameters
    residual: torch.Tensor
    """h - Au, float32 [p]."""

    def objective(self, mu: float) -> float:
        size = sum(float(part.abs().sum(dtype=torch.float64)) for part in self.u.values())
        return mu * size + float(self.residual.double().square().sum()) / 2


def _iterate(scaled: Scaled, old: _State, h: torch.Tensor, mu: float, step: float) -> tuple[_State, float, float]:
    """One iteration: the new state, ‖change‖ / ‖u‖, and the step that the change suggests for the next one.

    A step beyond τ is only kept if it lowers the objective; τ itself always does.
    """
    while True:
        new, moved, length = {}, 0.0, 0.0
        for name, slope in scaled.rmatvec(old.residual):
            part = torch.nn.functional.softshrink(slope.mul_(step).add_(old.u[name]), step * mu)
            moved += float((part - old.u[name]).double().square().sum())
            length += float(part.double().square().sum())
            new[name] = part
        state = _State(new, h - scaled.matvec(new))
        if step <= scaled.step or state.objective(mu) <= old.objective(mu):
            break
        step = max(step / 4, scaled.step)
    image = float((state.residual - old.residual).double().square().sum())
    suggested = max(moved / image, scaled.step) if image > 0 else scaled.step
    return state, math.sqrt(moved / length) if length else 0.0, suggested


def planted_cosine(scaled: Scaled, entries: int, config: SensingConfig) -> float:
    """Cosine between a planted vector of `entries` random signs and what is found of its sketch."""
    planted = plant(scaled.sketch, entries)
    vector = sense(scaled, scaled.sketch.matvec(planted), config, "Trying the sketch").vector
    return sum(float((planted[name] * part).sum()) for name, part in vector.items()) / norm(planted)


def plant(sketch: Sketch, entries: int) -> Parameters:
    """A vector of unit length with random signs in a few places.

    Args:
        sketch: What it will be sketched with.
        entries: How many entries are not zero.

    Returns:
        Module name → [d_out, columns].
    """
    generator = torch.Generator().manual_seed(0)
    modules = list(sketch.modules.values())
    sizes = torch.tensor([module.size for module in modules])
    places = torch.randperm(int(sizes.sum()), generator=generator)[:entries]
    flat = torch.zeros(int(sizes.sum()))
    flat[places] = (torch.randint(2, (len(places),), generator=generator) * 2.0 - 1) / math.sqrt(len(places))
    parts = torch.tensor_split(flat, sizes.cumsum(0)[:-1])
    return {m.name: part.view(m.shape).to(sketch.device) for m, part in zip(modules, parts, strict=True)}


def smallest_dim(entries: int, size: int, dim: int) -> float:
    """Length that even a Gaussian sketch needs, so that the smallest ‖u‖₁ is the planted vector.

    Donoho and Tanner ("Counting faces of randomly projected polytopes when the projection radically lowers
    dimension", 2009): 2k ln(n/p) for k entries among n, where k is far below p and p far below n.
    """
    return 2 * entries * math.log(max(1.0, size / dim))


def check_sketch(scaled: Scaled) -> float:
    """Refuse a sketch from which a planted sparse vector cannot be found again.

    The trial takes a minute for 100 million parameters; a sketch too short for any method is refused before it.

    Args:
        scaled: The sketch.

    Returns:
        Cosine of the planted vector with the one that is found.

    Raises:
        UserError: The sketch cannot be inverted.
    """
    sketch, options = scaled.sketch, scaled.sketch.config
    needed = smallest_dim(PLANTED, scaled.size, sketch.dim)
    if sketch.dim < needed:
        why = f"{PLANTED} entries among {scaled.size:,} need p = {math.ceil(needed):,} even in theory"
    else:
        cosine = planted_cosine(scaled, PLANTED, THOROUGH)
        if cosine >= RECOVERED:
            return cosine
        why = f"a planted vector of {PLANTED} entries comes back with a cosine of {cosine:.2f}"
    copies = f", copies = {options.copies}" if options.sketch in ("blocks", "kron") else ""
    raise UserError(
        f"Compressed sensing cannot invert this run's sketch ({options.sketch}, p = {options.dim}{copies}): {why}. "
        "What works: --sketch sparse, or blocks with --copies 4, and a larger --dim, as 16384. "
        "Or use --way lift, which works with every sketch."
    )
