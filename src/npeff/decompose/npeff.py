"""Non-negative per-example Fisher factorization, of Fishers or of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import numpy as np
import torch

from npeff.decompose.als import Als, gram
from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Blocks
from npeff.decompose.checks import check_dim, check_examples
from npeff.decompose.coefficients import example_losses, fit_coefficients
from npeff.decompose.initial import start_components
from npeff.decompose.paper import Paper, start
from npeff.decompose.rotate import Rotation
from npeff.store.rows import RowSource
from npeff.utils.device import choose_device

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

    def fit(self, source: RowSource) -> Self:
        with _flushed_denormals():
            return self._fit(source)

    def _fit(self, source: RowSource) -> Self:
        config, device = self.config, choose_device(self.config.device, double=True)
        memory = config.memory_gb * 1e9
        rotation = None
        if config.solver == "als" and Rotation.pays(source, memory):
            rotation = Rotation(source, config.chunk, device)
        H, W, blocks = self._solve(rotation.source if rotation else source, device, memory)
        if rotation:
            H = rotation.lift(H)
            del rotation
            blocks = Blocks(source, config.chunk, device)  # the same examples in each
        norms = H.norm(dim=1)
        self.components = (H / torch.where(norms > 0, norms, 1.0)[:, None]).cpu()
        # `paper` keeps the coefficients that its algorithm ends with
        sweeps = FINAL_SWEEPS if config.solver == "als" else 0
        for part in W:
            part.mul_(norms.square())
        self.coefficients, self.residuals = self._explain(blocks, W, sweeps)
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero, stage=self.history.steps[-1].stage)
        return self

    def _solve(
        self, source: RowSource, device: torch.device, memory: float
    ) -> tuple[torch.Tensor, list[torch.Tensor], Blocks]:
        """H [C, p] and W [n, C] of each block as the solver leaves them, and the blocks that it used."""
        config, C = self.config, self.config.components
        products = 12.0 * float(np.sum(source.ranks)) * C
        keep_products = config.solver == "als" and products <= memory
        blocks = Blocks(source, config.chunk, device, memory - products * keep_products)
        check_examples(blocks, C)
        solver: Als | Paper
        if config.solver == "als":
            H = start_components(source, C, config.init, config.seed)
            solver = Als(blocks, H, config, keep_products)
        else:
            solver = Paper(blocks, *start(blocks, C, config.seed), config)
        solver.run(self.checkpoint, self.quiet)
        self.history = solver.history
        return solver.H, solver.coefficient_parts(), blocks

    def explain(self, source: RowSource) -> tuple[torch.Tensor, torch.Tensor]:
        check_dim(source, self.components)
        return self._explain(Blocks(source, self.config.chunk, choose_device(self.config.device, double=True)))

    def _explain(
        self, blocks: Blocks, warm: list[torch.Tensor] | None = None, sweeps: int = FINAL_SWEEPS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients [m, C] and residuals [m], from coefficients `warm` [n, C] of each block (used up) if given."""
        H = self.components.to(blocks.device)
        Q = gram(H).square().float()
        coefficients, residuals = [], []
        for block, rows in blocks:
            N = block.sum_rows(block.scaled(H @ rows.T).square())
            W = warm.pop(0).T.contiguous() if warm else torch.zeros_like(N)
            fit_coefficients(W, N, Q, sweeps, FINAL_TOLERANCE)
            coefficients.append(W.T)
            residuals.append(example_losses(W, N, Q, block.norms).clamp_(min=0))
        return blocks.gather(coefficients), blocks.gather(residuals)


class GradientNpeff(Npeff):
    """The same decomposition of rank-1 PEFs ggᵀ, g the gradient of the predicted answer's log-probability."""

    kind = "gradient"
