"""What the solvers of NPEFF share, and the one that the paper prints.

The exact coefficient step is non-negative least squares for many examples that share one C × C system.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from npeff.decompose.blocks import Block, Blocks, cholesky
from npeff.decompose.checkpoint import WINDOW, Checkpoint, Kind, State
from npeff.decompose.config import FitConfig
from npeff.utils import UserError, distributed

RIDGE = 1e-7
"""Added to M's diagonal, as a share of it: equal components would make it singular."""
GROUP = 8
"""Coefficients that are updated one by one after a matrix product has brought in all the others."""
SMALL = 2**27
"""Multiplications below which a second thread costs more than it brings."""


@dataclass
class Part:
    """A block's share of the state, all float32 [C, n] or [C, rows]."""

    block: Block
    W: Tensor
    trial: Tensor
    """Coefficients that may replace W."""
    products: list[Tensor]
    """B at H, at the last point without extrapolation, and room for B_Δ; empty if they are computed when needed."""


class Solver(ABC, Generic[Kind]):
    """Components and coefficients on their way, and what both solvers do with them.

    Args:
        blocks: The rows.
        H: Components to start from, [C, p].
        config: Options of the fit.
        keep: Whether products of rows and components are kept between passes.
        state: What checkpoints hold besides H and W.
    """

    def __init__(self, blocks: Blocks, H: Tensor, config: FitConfig, keep: bool, state: Kind) -> None:
        self.blocks, self.config, self.keep, self.state = blocks, config, keep, state
        self.parts: list[Part] = []
        self.H = H.to(blocks.device, torch.float32).contiguous()
        self.T, C = torch.empty_like(self.H), len(H)
        self.S, self.K = (torch.zeros(C, C, dtype=torch.float64, device=blocks.device) for _ in range(2))
        self.loss = float("inf")
        """Summed loss at H with the coefficients on trial, of which S = WᵀW; K = HHᵀ."""

    @abstractmethod
    def _update(self, part: Part, N: Tensor, Q: Tensor, sweeps: int) -> None:
        """Set `part.trial` to better coefficients than `part.W`, in `sweeps` sweeps; N and Q as for the exact fit."""

    def _add_weighted(self, part: Part, product: Tensor, W: Tensor, rows: Tensor) -> None:
        room = part.products[2] if self.keep else None
        weighted = torch.mul(part.block.spread(W), product, out=room)
        self.T.addmm_(part.block.scaled(weighted), rows)

    def _with_rows(self) -> Iterator[tuple[Part, Tensor]]:
        for part, (_, rows) in zip(self.parts, self.blocks, strict=True):
            yield part, rows

    def _with_products(self) -> Iterator[tuple[Part, Tensor, Tensor | None]]:
        """Every part with its B at H, [C, rows], and with the rows if they were read for it."""
        if self.keep:
            yield from ((part, part.products[0], None) for part in self.parts)
        else:
            for part, rows in self._with_rows():
                yield part, part.block.scaled(self.H @ rows.T), rows

    def _fit(self, sweeps: int) -> None:
        """Update coefficients at H, from W into `trial`; sets K, the loss and S = WᵀW of the trial.

        Without kept products this reads the rows, and T is added up on the way.
        """
        self.K = gram(self.H)
        Q = self.K.square()
        C = len(Q)
        sums = torch.zeros(C * C + 1, dtype=torch.float64, device=self.H.device)
        if not self.keep:
            self.T.zero_()
        for part, product, rows in self._with_products():
            N = part.block.sum_rows(product.square())
            self._update(part, N, Q.to(N), sweeps)
            sums[:-1] += (part.trial @ part.trial.T).double().view(-1)
            sums[-1] += inner(part.trial, N)
            if rows is not None:
                self._add_weighted(part, product, part.trial, rows)
        distributed.sum_over_ranks(sums)
        self.S = sums[:-1].view(C, C)
        self.loss = self.blocks.nonzero - 2 * float(sums[-1]) + inner(self.S, Q)

    def take_up(self, saved: tuple[Tensor, dict[str, Tensor], Kind]) -> None:
        """Continue from what a checkpoint holds."""
        W, shared, self.state = saved
        self.H.copy_(shared["H"])
        for part in self.parts:
            part.W.copy_(W[part.block.start : part.block.stop].T)

    def coefficient_parts(self) -> list[Tensor]:
        """W of each block, [n, C]."""
        return [part.W.T for part in self.parts]


def start(blocks: Blocks, components: int, seed: int) -> tuple[Tensor, Tensor]:
    """H normally distributed with deviation √2/√(Cp), [C, p], and W uniform on [0, 1], [m, C] of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(components, blocks.dim, generator=generator) * math.sqrt(2 / (components * blocks.dim))
    return H, torch.rand(blocks.total_examples, components, generator=generator)


@dataclass
class PaperState(State):
    """What a checkpoint holds besides H and W."""

    stage_start: int = 0
    """Step that the present stage began with."""
    joint: bool = False
    """Whether coefficients move too: the second stage."""


class Paper(Solver[PaperState]):
    """Algorithm 1: multiplicative updates for coefficients, gradient descent for components.

    Memory: 4mC for W (twice that at the start), 12Cp, and the rows' own.

    Args:
        blocks: The rows.
        H: Components to start from, [C, p].
        W: Coefficients to start from, of all examples, [m, C].
        config: Options of the fit.
    """

    def __init__(self, blocks: Blocks, H: Tensor, W: Tensor, config: FitConfig) -> None:
        super().__init__(blocks, H.clone(), config, False, PaperState())
        own = (W[block.start : block.stop].T.to(blocks.device) for block in blocks.blocks)
        copies = [part.clone(memory_format=torch.contiguous_format) for part in own]
        self.parts = [Part(block, W, W, []) for block, W in zip(blocks.blocks, copies, strict=True)]

    def run(self, checkpoint: Checkpoint | None = None, quiet: bool = False) -> None:
        """Take all steps of both stages, or fewer with τ.

        Args:
            checkpoint: Where to keep checkpoints; continued from if there is one.
            quiet: Show no progress bar.

        Raises:
            UserError: The learning rate is too high for these rows.
        """
        options = self.config.paper
        saved = checkpoint.load(PaperState) if checkpoint else None
        if saved:
            self.take_up(saved)
        state, history = self.state, self.state.history
        total = options.frozen_steps + options.joint_steps
        with history.shown("npeff, as in the paper", total, len(history.steps), quiet):
            while not (state.joint and self._stage_over()):
                # printed: coefficients move from step N1 on, counted from 1
                if not state.joint and self._stage_over():
                    state.joint, state.stage_start = True, len(history.steps)
                loss = self.step()
                if not math.isfinite(loss):
                    raise UserError(
                        f"The loss is not finite any more after {len(history.steps)} steps: the learning rate is "
                        "too high for these rows. Lower frozen_rate and joint_rate (they are for sums over "
                        "all examples), or use the solver als, which has none."
                    )
                history.add(loss / self.blocks.nonzero, self._rate, "joint" if state.joint else "frozen")
                if checkpoint and len(history.steps) % (10 * self.config.checkpoint_passes) == 0:
                    checkpoint.save(len(history.steps), self.coefficient_parts(), {"H": self.H}, state)
        taken = len(history.steps) - state.stage_start
        history.ending = "all steps taken" if taken > options.joint_steps else "converged"

    def step(self) -> float:
        """Take one step.

        Returns:
            The summed loss at its start, after the coefficients have moved.
        """
        self._fit(sweeps=int(self.state.joint))
        distributed.sum_over_ranks(self.T)
        # T1 + T2 of the paper are 4(MH − T)
        gradient = self.T.addmm_((self.S * self.K).to(self.T), self.H, beta=-4, alpha=4)
        self.H.add_(gradient, alpha=-self._rate)
        return self.loss

    def _update(self, part: Part, N: Tensor, Q: Tensor, sweeps: int) -> None:
        for _ in range(sweeps):
            D = Q @ part.W
            # 0/0 where a coefficient has vanished: it stays at zero
            part.trial.mul_(torch.where(D > 0, N / D, 0.0))

    @property
    def _rate(self) -> float:
        return self.config.paper.joint_rate if self.state.joint else self.config.paper.frozen_rate

    def _stage_over(self) -> bool:
        options, every = self.config.paper, self.state.history.steps
        steps = every[self.state.stage_start :]
        if len(steps) >= (options.joint_steps + 1 if self.state.joint else options.frozen_steps - 1):
            return True
        if not options.tau or not steps or len(steps) % WINDOW:
            return False
        before = every[max(len(every) - 1 - WINDOW, 0)].loss
        return (before - steps[-1].loss) * self.blocks.nonzero < options.tau


def fit_coefficients(W: Tensor, N: Tensor, Q: Tensor, max_sweeps: int, tolerance: float = 0.0) -> Tensor:
    """Lower Σᵢ wᵢᵀQwᵢ − 2 wᵢᵀnᵢ over W ≥ 0 by exact minimisation over one coefficient after another.

    This is hierarchical alternating least squares (HALS). A coefficient at zero may leave it again.

    Args:
        W: Coefficients to start from, [C, n]; changed in place.
        N: N_ji = ‖Gᵢhⱼ‖², [C, n].
        Q: (HHᵀ)∘(HHᵀ), [C, C].
        max_sweeps: Most sweeps over all coefficients.
        tolerance: Stop when a sweep changes less than this share of what the first one did.

    Returns:
        W.
    """
    first = 0.0
    diagonal = Q.diagonal().tolist()
    change, zero = torch.zeros_like(W[:GROUP]), torch.zeros_like(W[0])
    with _threads(1 if len(W) * N.numel() < SMALL else torch.get_num_threads()):
        for sweep in range(max_sweeps):
            moved = 0.0
            for start in range(0, len(W), GROUP):
                group = slice(start, start + GROUP)
                slopes = torch.addmm(N[group], Q[group], W, alpha=-1)
                _update_group(W[group], slopes, Q[group, group], diagonal[group], change, zero)
                moved += float(change.square().sum()) if tolerance else 0.0
            if sweep == 0:
                first = moved
            elif moved < tolerance**2 * first:
                break
    return W


def _update_group(W: Tensor, slopes: Tensor, Q: Tensor, diagonal: list[float], change: Tensor, zero: Tensor) -> None:
    """Update the rows of `W` [g, n] in turn, with `slopes` [g, n] = N − QW before; writes the change to `change`."""
    # On the CPU these are NumPy views: its call overhead is a third of torch's, and most of what this costs.
    on_cpu = W.device.type == "cpu"
    xp: Any = np if on_cpu else torch
    arrays: Any = (W, slopes, Q, change, zero)
    w, r, q, d, none = (array.numpy() for array in arrays) if on_cpu else arrays
    for j, size in enumerate(diagonal):
        if size <= 0.0:  # a zero component: any coefficient is as good, zero says so
            w[j] = 0.0
            d[j] = 0.0
            continue
        new = r[j]
        if j:
            new -= q[j, :j] @ d[:j]
        new *= 1.0 / size
        new += w[j]
        xp.maximum(new, none, out=new)
        xp.subtract(new, w[j], out=d[j])
        w[j] = new


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def example_losses(W: Tensor, N: Tensor, Q: Tensor, norms: Tensor) -> Tensor:
    """‖GᵢᵀGᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² of each example, [n]; `norms` [n] are ‖GᵢᵀGᵢ‖²."""
    return norms + (W * (Q @ W - 2 * N)).sum(dim=0)


def gram(H: Tensor) -> Tensor:
    """HHᵀ, float64 [C, C]."""
    return (H @ H.T).double()


def inner(first: Tensor, second: Tensor) -> float:
    """Σ first∘second; products in the tensors' type, their sum in float64."""
    return float((first * second).sum(dtype=torch.float64))


def inverse(M: Tensor) -> Tensor:
    """Inverse of the system of the components, with a small ridge.

    Args:
        M: Symmetric matrix, float64 [C, C].

    Returns:
        The inverse, float64 [C, C]; rows and columns of components without weight are zero.
    """
    diagonal = M.diagonal()
    alive = diagonal > 1e-20 * diagonal.max()
    size = torch.where(alive, diagonal, 1.0).rsqrt() * alive
    scaled = M * size[:, None] * size  # unit diagonal: the ridge means the same for every component
    scaled.diagonal().fill_(1.0)
    return torch.cholesky_inverse(cholesky(scaled, RIDGE)) * size[:, None] * size
