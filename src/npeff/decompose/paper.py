"""NPEFF as the paper prints it: multiplicative updates for coefficients, gradient descent for components."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from npeff.decompose.als import gram, inner
from npeff.decompose.blocks import Blocks
from npeff.decompose.checkpoint import WINDOW, Checkpoint, History
from npeff.decompose.config import FitConfig
from npeff.utils import distributed
from npeff.utils.errors import UserError


def start(blocks: Blocks, components: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """H normally distributed with deviation √2/√(Cp), [C, p], and W uniform on [0, 1], [m, C] of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(components, blocks.dim, generator=generator) * math.sqrt(2 / (components * blocks.dim))
    return H, torch.rand(blocks.total_examples, components, generator=generator)


@dataclass
class PaperState:
    """What a checkpoint holds besides H and W."""

    history: History = field(default_factory=History)
    stage_start: int = 0
    """Step that the present stage began with."""
    joint: bool = False
    """Whether coefficients move too: the second stage."""


class Paper:
    """State of Algorithm 1. Memory: 4mC for W (twice that at the start), 12Cp, and the rows' own.

    Args:
        blocks: The rows.
        H: Components to start from, [C, p].
        W: Coefficients to start from, of all examples, [m, C].
        config: Options of the fit.
    """

    def __init__(self, blocks: Blocks, H: torch.Tensor, W: torch.Tensor, config: FitConfig) -> None:
        self.blocks, self.config = blocks, config
        self.H = H.to(blocks.device, torch.float32).clone()
        self.T = torch.empty_like(self.H)
        self.W = self._split(W)
        self.state = PaperState()

    def run(self, checkpoint: Checkpoint | None = None, quiet: bool = False) -> None:
        """Take all steps of both stages, or fewer with τ.

        Args:
            checkpoint: Where to keep checkpoints; continued from if there is one.
            quiet: Show no progress bar.

        Raises:
            UserError: The learning rate is too high for these rows.
        """
        options = self.config.paper
        self._resume(checkpoint)
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
        K = gram(self.H)
        Q = K.square()
        C = len(Q)
        sums = torch.zeros(C * C + 1, dtype=torch.float64, device=self.H.device)
        self.T.zero_()
        for (block, rows), W in zip(self.blocks, self.W, strict=True):
            B = block.scaled(self.H @ rows.T)
            N = block.sum_rows(B.square())
            if self.state.joint:
                D = Q.to(W) @ W
                # 0/0 where a coefficient has vanished: it stays at zero
                W.mul_(torch.where(D > 0, N / D, 0.0))
            sums[:-1] += (W @ W.T).double().view(-1)
            sums[-1] += inner(W, N)
            self.T.addmm_(block.scaled(block.spread(W) * B), rows)
        distributed.sum_over_ranks(self.T)
        distributed.sum_over_ranks(sums)
        S = sums[:-1].view(C, C)
        # T1 + T2 of the paper are 4(MH − T)
        gradient = self.T.addmm_((S * K).to(self.T), self.H, beta=-4, alpha=4)
        self.H.add_(gradient, alpha=-self._rate)
        return self.blocks.nonzero - 2 * float(sums[-1]) + inner(S, Q)

    def coefficient_parts(self) -> list[torch.Tensor]:
        """W of each block, [n, C]."""
        return [W.T for W in self.W]

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

    def _resume(self, checkpoint: Checkpoint | None) -> None:
        saved = checkpoint.load(PaperState) if checkpoint else None
        if saved:
            W, shared, self.state = saved
            self.H.copy_(shared["H"])
            self.W = self._split(W)

    def _split(self, W: torch.Tensor) -> list[torch.Tensor]:
        """Coefficients [C, n] of each block, from those of all examples [m, C]."""
        parts = (W[block.start : block.stop].T.to(self.blocks.device) for block in self.blocks.blocks)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]
