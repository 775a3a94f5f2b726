"""NPEFF as the paper prints it: multiplicative updates for coefficients, gradient descent for components."""

from __future__ import annotations

import math

import torch

from npeff.decompose.als import gram, inner
from npeff.decompose.blocks import Blocks
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import FitConfig
from npeff.decompose.history import WINDOW, History, Progress
from npeff.utils import distributed
from npeff.utils.errors import UserError


def start(blocks: Blocks, components: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """H from a normal distribution of deviation √2/√(Cp), [C, p], and W uniform on [0, 1], [m, C] of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.randn(components, blocks.dim, generator=generator) * math.sqrt(2 / (components * blocks.dim))
    return H, torch.rand(blocks.total_examples, components, generator=generator)


class Paper:
    """State of Algorithm 1. Memory: 4mC for W (twice that at the start), 12Cp, and the rows' own."""

    def __init__(self, blocks: Blocks, H: torch.Tensor, W: torch.Tensor, config: FitConfig) -> None:
        self.blocks, self.config = blocks, config
        self.H = H.to(blocks.device, torch.float32).clone()
        self.T = torch.empty_like(self.H)
        self._set_coefficients(W)
        self.norms = float(blocks.nonzero)
        self.history = History()
        self.stage_start = 0

    def run(self, checkpoint: Checkpoint | None = None, quiet: bool = False) -> None:
        """All steps of both stages, or fewer with τ; continue from a checkpoint if there is one."""
        options = self.config.paper
        every = 10 * self.config.checkpoint_passes
        joint = self._resume(checkpoint)
        total = options.frozen_steps + options.joint_steps
        with Progress("npeff, as in the paper", total, len(self.history.steps), quiet) as progress:
            while not (joint and self._stage_over(joint)):
                # printed: coefficients move from step N1 on, counted from 1
                if not joint and self._stage_over(joint):
                    joint, self.stage_start = True, len(self.history.steps)
                loss = self.step(joint)
                if not math.isfinite(loss):
                    raise UserError(
                        f"The loss is not finite any more after {len(self.history.steps)} steps: the learning rate is "
                        "too high for these rows. Lower frozen_rate and joint_rate (they are for sums over "
                        "all examples), or use the solver als, which has none."
                    )
                progress.show(self.history.add(loss / self.norms, self._rate(joint), "joint" if joint else "frozen"))
                if checkpoint and len(self.history.steps) % every == 0:
                    state = {"history": self.history.to_dict(), "stage_start": self.stage_start, "joint": joint}
                    checkpoint.save(len(self.history.steps), self.coefficient_parts(), {"H": self.H}, state)
        taken = len(self.history.steps) - self.stage_start
        self.history.ending = "all steps taken" if taken > options.joint_steps else "converged"

    def step(self, joint: bool) -> float:
        """One step; returns the loss at its start, after the coefficients have moved."""
        K = gram(self.H)
        Q = K.square()
        C = len(Q)
        sums = torch.zeros(C * C + 1, dtype=torch.float64, device=self.H.device)
        self.T.zero_()
        for (block, rows), W in zip(self.blocks, self.W, strict=True):
            B = block.scaled(self.H @ rows.T)
            N = block.sum_rows(B.square())
            if joint:
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
        self.H.add_(gradient, alpha=-self._rate(joint))
        return self.norms - 2 * float(sums[-1]) + inner(S, Q)

    def coefficient_parts(self) -> list[torch.Tensor]:
        """W of each block, [n, C]."""
        return [W.T for W in self.W]

    def _rate(self, joint: bool) -> float:
        return self.config.paper.joint_rate if joint else self.config.paper.frozen_rate

    def _stage_over(self, joint: bool) -> bool:
        options = self.config.paper
        steps = self.history.steps[self.stage_start :]
        if len(steps) >= (options.joint_steps + 1 if joint else options.frozen_steps - 1):
            return True
        if not options.tau or not steps or len(steps) % WINDOW:
            return False
        before = self.history.steps[max(len(self.history.steps) - 1 - WINDOW, 0)].loss
        return (before - steps[-1].loss) * self.norms < options.tau

    def _resume(self, checkpoint: Checkpoint | None) -> bool:
        found = checkpoint.load() if checkpoint else None
        if found is None:
            return False
        W, shared, state = found
        self.H.copy_(shared["H"])
        self._set_coefficients(W)
        self.history = History.from_dict(state["history"])
        self.stage_start = int(state["stage_start"])
        return bool(state["joint"])

    def _set_coefficients(self, W: torch.Tensor) -> None:
        device = self.blocks.device
        self.W = [
            W[block.start : block.stop].T.to(device).clone(memory_format=torch.contiguous_format)
            for block in self.blocks.blocks
        ]
