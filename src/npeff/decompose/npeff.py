"""Non-negative per-example Fisher factorization, of Fishers or of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import numpy as np
import torch

from npeff.decompose.als import Als, gram
from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Blocks, start_components
from npeff.decompose.coefficients import example_losses, fit_coefficients
from npeff.decompose.paper import Paper, start
from npeff.store.rows import RowSource

FINAL_SWEEPS, FINAL_TOLERANCE = 300, 1e-4
"""Sweeps of the final coefficient fit, and the share of the first sweep's change at which it is done."""


@contextlib.contextmanager
def _flushed_denormals() -> Iterator[None]:
    """Compute without denormal numbers, which are ten times slower: coefficients shrink towards zero.

    Others in the process may rely on denormals, so the switch is set back.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Npeff(Decomposition):
    """Minimise Σᵢ ‖GᵢᵀGᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² over W ≥ 0 and H, PEFs at unit norm going in, components coming out."""

    kind = "fisher"
    parts = "matrices"

    @_flushed_denormals()
    def fit(self, source: RowSource) -> Self:
        als = self.config.solver == "als"
        rotation = self._rotation(source) if als else None
        H, W, blocks = self._solve(rotation.source if rotation else source)
        if rotation:
            H = rotation.lift(H)
            del rotation
            blocks = self._blocks(source)  # the same examples in each
        norms = H.norm(dim=1)
        self.components = (H / torch.where(norms > 0, norms, 1.0)[:, None]).cpu()
        for part in W:
            part.mul_(norms.square())
        # `paper` keeps the coefficients that its algorithm ends with
        parts = self._explain_blocks(blocks, W, FINAL_SWEEPS if als else 0)
        self.coefficients, self.residuals = blocks.gather(parts)
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero, stage=self.history.steps[-1].stage)
        return self

    def _solve(self, source: RowSource) -> tuple[torch.Tensor, list[torch.Tensor], Blocks]:
        """H [C, p] and W [n, C] of each block as the solver leaves them, and the blocks that it used."""
        config, C = self.config, self.config.components
        products = 12.0 * float(np.sum(source.ranks)) * C
        keep_products = config.solver == "als" and products <= self._memory
        blocks = self._blocks(source, self._memory - products * keep_products)
        self._check_examples(blocks, source.dim)
        solver: Als | Paper
        if config.solver == "als":
            H = start_components(source, C, config.init, config.seed)
            solver = Als(blocks, H, config, keep_products)
        else:
            solver = Paper(blocks, *start(blocks, C, config.seed), config)
        solver.run(self.checkpoint, self.quiet)
        self.history = solver.state.history
        return solver.H, solver.coefficient_parts(), blocks

    def _explain_blocks(
        self, blocks: Blocks, warm: list[torch.Tensor] | None = None, sweeps: int = FINAL_SWEEPS
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """From coefficients `warm` [n, C] of each block (used up) if given."""
        H = self.components.to(blocks.device)
        Q = gram(H).square().float()
        for block, rows in blocks:
            N = block.sum_rows(block.scaled(H @ rows.T).square())
            W = warm.pop(0).T.contiguous() if warm else torch.zeros_like(N)
            fit_coefficients(W, N, Q, sweeps, FINAL_TOLERANCE)
            yield W.T, example_losses(W, N, Q, block.norms).clamp_(min=0)


class GradientNpeff(Npeff):
    """The same decomposition of rank-1 PEFs ggᵀ, g the gradient of the predicted answer's log-probability."""

    kind = "gradient"
