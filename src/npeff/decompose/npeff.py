"""Non-negative per-example Fisher factorization (NPEFF), of Fishers or of gradients, and its solver `als`.

`als` has no learning rates: exact line search for the components, exact coordinate descent for the coefficients.

The loss is Σᵢ ‖GᵢᵀGᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² with W ≥ 0. For fixed W its gradient in H is 4(MH − T) with M = (WᵀW)∘(HHᵀ) and
T = Σᵢ diag(wᵢ) B_iᵀ G_i, B = GHᵀ. One pass is

1. T: the first product with the rows, summed over ranks;
2. Δ = M⁻¹T − H and B_Δ = GΔᵀ: the second product. The loss along H + αΔ is a quartic in α, minimised exactly;
3. extrapolation H + αΔ + β(H + αΔ − previous): B follows without the rows. The coefficients are fitted there; if that
   does not lower the loss, they are fitted at H + αΔ instead, so the loss never rises. β adapts as in Ang & Gillis,
   "Accelerating nonnegative matrix factorization algorithms using extrapolation" (2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Blocks, replacements, start_components, worst_examples
from npeff.decompose.checkpoint import Checkpoint, State
from npeff.decompose.config import FitConfig
from npeff.decompose.solver import Paper, Part, Solver, example_losses, fit_coefficients, gram, inner, inverse, start
from npeff.store.rows import RowSource
from npeff.utils import distributed

SWEEPS = 3
"""Sweeps over the coefficients in a pass."""
DEAD = 1e-10
"""A component with less than this share of the mean energy is dead."""
RESEEDS = 5
"""How often dead components are started again."""
FINAL_SWEEPS, FINAL_TOLERANCE = 300, 1e-4
"""Sweeps of the final coefficient fit, and the share of the first sweep's change at which it is done."""


@dataclass
class AlsState(State):
    """What a checkpoint holds besides H and W."""

    beta: tuple[float, float] = (0.5, 1.0)
    """Length of the extrapolation, and the most that it may be."""
    reseeds: tuple[int, int] = (0, 0)
    """How often dead components were started again, and the pass after which they were last."""


class Als(Solver[AlsState]):
    """The solver at work. Memory: 8mC for W, 12·rows·C for products if they may be kept, 16Cp, and the rows' own.

    Args:
        blocks: The rows.
        H: Components to start from, [C, p].
        config: Options of the fit.
        keep: Whether products of rows and components are kept between passes.
    """

    def __init__(self, blocks: Blocks, H: Tensor, config: FitConfig, keep: bool) -> None:
        super().__init__(blocks, H, config, keep, AlsState())
        self.points = [self.H, *(torch.empty_like(self.H) for _ in range(2))]
        """H, the last point without extrapolation (once there is one), and room for a step."""
        examples, rows = [block.examples for block in blocks.blocks], [block.rows for block in blocks.blocks]
        rooms = [matrices(len(H), n, blocks.device) for n in [examples] * 2 + [rows] * (3 if keep else 0)]
        of_blocks = zip(blocks.blocks, *rooms, strict=True)
        self.parts = [Part(block, W, trial, products) for block, W, trial, *products in of_blocks]
        self.have_previous = False

    def run(self, checkpoint: Checkpoint | None = None, quiet: bool = False) -> None:
        """Iterate until the loss settles or the passes are used up.

        Args:
            checkpoint: Where to keep checkpoints; continued from if there is one.
            quiet: Show no progress bar.
        """
        resumed = self._resume(checkpoint)
        self.start_round(SWEEPS if resumed else 10 * SWEEPS)
        if not resumed:
            self.state.history.add(self.loss / self.blocks.nonzero)
        config, history = self.config, self.state.history
        done = len(history.steps) - 1
        with history.shown("npeff", config.max_passes, done, quiet):
            while done < config.max_passes:
                history.add(*self.iterate())
                done += 1
                if history.settled(config.tolerance, since=self.state.reseeds[1]):
                    if not self._reseed():
                        history.ending = "converged"
                        return
                    self.start_round(SWEEPS)
                elif done % config.checkpoint_passes == 0:
                    self._reseed()
                    self._normalize()
                    if checkpoint:
                        checkpoint.save(done, self.coefficient_parts(), {"H": self.H}, self.state)
                    self.start_round(SWEEPS)
        history.ending = "out of passes"

    def start_round(self, sweeps: int) -> None:
        """Compute from H and W alone everything that passes update, so that no rounding error outlives a round.

        A resumed run starts at the same place with the same bits.

        Args:
            sweeps: Sweeps over the coefficients.
        """
        if self.keep:
            for part, rows in self._with_rows():
                torch.mm(self.H, rows.T, out=part.products[0])
                part.block.scaled(part.products[0])
        self.have_previous = False
        self._fit(sweeps)
        self._accept()

    def iterate(self) -> tuple[float, float]:
        """Do one pass.

        Returns:
            The loss per example, and the step length.
        """
        self._combine()
        M, (H, _, step) = self.S * self.K, self.points
        direction = torch.addmm(H, inverse(M).to(self.T), self.T, beta=-1, out=step)  # M⁻¹T − H
        curvature = self._project(direction)
        cross, square = (H @ direction.T).double(), gram(direction)
        slope = float(torch.dot(self.T.view(-1), direction.view(-1))) - inner(M, cross)  # ⟨T − MH, Δ⟩
        alpha = best_step(*loss_along(self.S, self.K, cross, square, slope, curvature))
        for point, _, step in self._triples():
            step.mul_(alpha).add_(point)
        (beta, limit), extrapolated = self.state.beta, self.have_previous
        self._move(beta if extrapolated else 0.0)
        before = self.loss
        self._fit(SWEEPS)
        if extrapolated and self.loss < before:
            limit = min(1.0, 1.02 * limit)
            self.state.beta = min(1.05 * beta, limit), limit
        elif extrapolated:
            self.state.beta = beta / 1.5, beta
            self._move(0.0)
            self._fit(SWEEPS)
        self._accept()
        self._remember()
        return self.loss / self.blocks.nonzero, alpha

    # The two products with the rows.

    def _combine(self) -> None:
        """T = Σᵢ diag(wᵢ) B_iᵀ G_i, summed over ranks: the one large all-reduce of a pass."""
        if self.keep:
            self.T.zero_()
            for part, rows in self._with_rows():
                self._add_weighted(part, part.products[0], part.W, rows)
        distributed.sum_over_ranks(self.T)

    def _project(self, direction: Tensor) -> float:
        """B_Δ = GΔᵀ; returns Σᵢⱼ Wᵢⱼ ‖GᵢΔⱼ‖²."""
        total = torch.zeros(1, dtype=torch.float64)
        for part, rows in self._with_rows():
            product = torch.mm(direction, rows.T, out=part.products[2] if self.keep else None)
            squares = part.block.sum_rows(part.block.scaled(product).square())
            total += inner(part.W, squares)
        return float(distributed.sum_over_ranks(total))

    # Coefficients.

    def _update(self, part: Part, N: Tensor, Q: Tensor, sweeps: int) -> None:
        fit_coefficients(part.trial.copy_(part.W), N, Q, sweeps)

    def _accept(self) -> None:
        """The coefficients on trial become the coefficients."""
        for part in self.parts:
            part.W, part.trial = part.trial, part.W

    # Points: H, H + αΔ and the one before it, together with their products with the rows.

    def _triples(self) -> Iterator[list[Tensor]]:
        """[point, previous point, step] for the components and for every block's products with them."""
        yield self.points
        if self.keep:
            yield from (part.products for part in self.parts)

    def _move(self, beta: float) -> None:
        """H becomes H + αΔ, and goes beyond it by β times the way from the previous such point."""
        for point, previous, step in self._triples():
            if beta:
                torch.lerp(previous, step, 1.0 + beta, out=point)
            else:
                point.copy_(step)

    def _remember(self) -> None:
        """H + αΔ becomes the previous point; its old memory is the next step's."""
        for triple in self._triples():
            triple[1], triple[2] = triple[2], triple[1]
        self.have_previous = True

    # Between rounds.

    def _reseed(self) -> bool:
        """Start dead components again from badly explained examples; False if there are none."""
        energy = self.S.diagonal() * self.K.diagonal().square()
        dead = (energy <= DEAD * energy.mean()).nonzero().view(-1)
        if not len(dead) or self.state.reseeds[0] >= RESEEDS:
            return False
        worst: list[tuple[float, int]] = []
        Q = self.K.square()
        for part, product, _ in self._with_products():
            N = part.block.sum_rows(product.square())
            losses = example_losses(part.W, N, Q.to(N), part.block.norms)
            worst += worst_examples(losses, part.block.start, 4 * len(dead))
        directions = replacements(self.blocks.source, worst, 4 * len(dead), len(dead)).to(self.H)
        for j, direction in zip(dead.tolist(), directions, strict=False):
            self.H[j] = direction
            for part in self.parts:
                part.W[j] = 0
        history = self.state.history
        history.reseeded += len(directions)
        self.state.reseeds = self.state.reseeds[0] + 1, len(history.steps) - 1
        return len(directions) > 0

    def _normalize(self) -> None:
        """Components to unit norm, coefficients to match, and the first rank's components to every rank."""
        if distributed.rank() > 0:
            self.H.zero_()
        distributed.sum_over_ranks(self.H)
        norms = self.H.norm(dim=1, keepdim=True)
        norms = torch.where(norms > 0, norms, 1.0)
        self.H.div_(norms)
        for part in self.parts:
            part.W *= norms.square()


def best_step(c1: float, c2: float, c3: float, c4: float) -> float:
    """The α ≥ 0 with the lowest c1·α + c2·α² + c3·α³ + c4·α⁴.

    Args:
        c1: Coefficient of α.
        c2: Coefficient of α².
        c3: Coefficient of α³.
        c4: Coefficient of α⁴.

    Returns:
        The step length; 0 if no step lowers the loss.
    """
    cubic = np.array([4 * c4, 3 * c3, 2 * c2, c1])
    if not np.isfinite(cubic).all() or not cubic.any():
        return 0.0
    candidates = [0.0, *(float(root.real) for root in np.roots(cubic) if root.real > 0)]
    # a double root may come out with a small imaginary part; comparing values is safe for any candidate
    return min(candidates, key=lambda step: step * (c1 + step * (c2 + step * (c3 + step * c4))))


def loss_along(
    S: Tensor, K: Tensor, K_cross: Tensor, K_step: Tensor, slope: float, curvature: float
) -> tuple[float, float, float, float]:
    """The loss from H along Δ, from small matrices only, all float64 [C, C].

    It is a quartic since ‖Gᵢ(h + αδ)‖² and the Gram matrix (H + αΔ)(H + αΔ)ᵀ are quadratic in α.

    Args:
        S: WᵀW.
        K: HHᵀ.
        K_cross: HΔᵀ.
        K_step: ΔΔᵀ.
        slope: ⟨T − MH, Δ⟩; the gradient is 4(MH − T).
        curvature: Σ Wᵢⱼ‖GᵢΔⱼ‖².

    Returns:
        c1 to c4 of loss(H + αΔ) − loss(H) = c1·α + c2·α² + c3·α³ + c4·α⁴ for fixed coefficients W.
    """
    K1 = K_cross + K_cross.T
    c2 = float((S * (K1 * K1 + 2 * K * K_step)).sum()) - 2.0 * curvature
    c3, c4 = 2.0 * float((S * K1 * K_step).sum()), float((S * K_step * K_step).sum())
    return -4.0 * slope, c2, c3, c4


def matrices(rows: int, columns: list[int], device: torch.device) -> list[Tensor]:
    """Zero matrices [rows, n], one for each n of `columns`.

    They share one allocation: the system gets it back whole, which it would not with thousands of small ones.
    """
    parts = torch.split(torch.zeros(rows * sum(columns), device=device), [rows * n for n in columns])
    return [part.view(rows, n) for part, n in zip(parts, columns, strict=True)]


@contextmanager
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
        self.coefficients, self.residuals = blocks.gather(parts, len(H))
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero, stage=self.history.steps[-1].stage)
        return self

    def _solve(self, source: RowSource) -> tuple[Tensor, list[Tensor], Blocks]:
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
        self, blocks: Blocks, warm: list[Tensor] | None = None, sweeps: int = FINAL_SWEEPS
    ) -> Iterator[tuple[Tensor, Tensor]]:
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
