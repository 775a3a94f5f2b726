"""Non-negative per-example Fisher factorization (NPEFF), of Fishers or of gradients, and its solver `als`.

`als` has no learning rates: exact line search for the components, exact coordinate descent for the coefficients.

The loss is Σᵢ ‖GᵢᵀGᵢ − Σⱼ Wᵢⱼ hⱼhⱼᵀ‖² with W ≥ 0. For fixed W its gradient in H is 4(MH − T) with M = (WᵀW)∘(HHᵀ) and
T = Σᵢ diag(wᵢ) B_iᵀ G_i, B = GHᵀ. One pass is

1. T: the first product with the rows, summed over ranks;
2. Δ = M⁻¹T − H and B_Δ = GΔᵀ: the second product. The loss along H + αΔ is a quartic in α, minimised exactly;
3. extrapolation H + αΔ + β(H + αΔ − previous): B follows without the rows. The coefficients are fitted there; if that
   does not lower the loss, they are fitted at H + αΔ instead, so the loss never rises. β adapts as in Ang & Gillis,
   "Accelerating nonnegative matrix factorization algorithms using extrapolation" (2019).

Where components start decides which mechanisms are found: two that share one do not part again while another has none.
So more of them than wanted are fitted for a few passes, and of these the ones are dropped that others can stand in for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import SHORTER, Blocks, ShortRows, replacements, start_components, worst_examples
from npeff.decompose.checkpoint import WINDOW, Checkpoint, State
from npeff.decompose.config import FitConfig
from npeff.decompose.solver import Paper, Part, Solver, example_losses, fit_coefficients, gram, inner, inverse, start
from npeff.store.rows import RowSource, SubsetRows
from npeff.utils import distributed

SWEEPS = 3
"""Sweeps over the coefficients in a pass."""
DEAD = 1e-10
"""A component with less than this share of the mean energy is dead."""
RESEEDS = 5
"""How often dead components are started again."""
START_ROUNDS, START_PASSES = (2.0, 1.5), 5
"""How many times the components are fitted before they are thinned out, in each round, and for how many passes."""
START_EXAMPLES = 64
"""Examples for each component that the start looks at, at most: it finds directions, the fit itself refines them."""
FEW_PASSES = 3
"""Passes over which progress is judged after a fit of shorter rows."""
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
        title: What the progress bar is called.
        stage: What passes are marked with in the history.
    """

    def __init__(
        self, blocks: Blocks, H: Tensor, config: FitConfig, keep: bool, title: str = "npeff", stage: str = ""
    ) -> None:
        super().__init__(blocks, H, config, keep, AlsState())
        self.title, self.stage = title, stage
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
            checkpoint: Where to keep checkpoints.
            quiet: Show no progress bar.
        """
        config, history = self.config, self.state.history
        done = history.count(self.stage) - 1
        self.start_round(SWEEPS if done >= 0 else 10 * SWEEPS)
        if done < 0:
            history.add(self.loss / self.blocks.nonzero, stage=self.stage)
            done = 0
        # after passes over shorter rows there is little left to do, and each pass is dear
        window = FEW_PASSES if history.count("short") and not self.stage else WINDOW
        with history.shown(self.title, config.max_passes, done, quiet):
            while done < config.max_passes:
                history.add(*self.iterate(), stage=self.stage)
                done += 1
                if history.settled(config.tolerance, self.state.reseeds[1], window):
                    if not self._reseed():
                        history.ending = "converged"
                        return
                    self.start_round(SWEEPS)
                elif done % config.checkpoint_passes == 0:
                    self._reseed()
                    self._normalize()
                    if checkpoint:
                        checkpoint.save(len(history.steps) - 1, self.coefficient_parts(), {"H": self.H}, self.state)
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

    def take_over(self, short: Als) -> None:
        """Begin with the components of these rows that belong to a fit of shorter ones.

        At its end H = M⁻¹T, and T is a sum of the rows: so is this H, with the same weights.

        Args:
            short: The fit of shorter rows of the same examples.
        """
        self.T.zero_()
        for (part, rows), (other, product, _) in zip(self._with_rows(), short._with_products(), strict=True):
            self._add_weighted(part, product, part.W.copy_(other.W), rows)
        distributed.sum_over_ranks(self.T)
        torch.mm(inverse(short.S * short.K).to(self.T), self.T, out=self.H)
        self.state = replace(short.state, reseeds=(short.state.reseeds[0], len(short.state.history.steps)))

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
        directions = self.badly_explained(len(dead))
        for j, direction in zip(dead.tolist(), directions, strict=False):
            self.H[j] = direction
            for part in self.parts:
                part.W[j] = 0
        history = self.state.history
        history.reseeded += len(directions)
        self.state.reseeds = self.state.reseeds[0] + 1, len(history.steps) - 1
        return len(directions) > 0

    def badly_explained(self, count: int) -> Tensor:
        """Directions of the examples that are explained least.

        Args:
            count: How many to give, at most.

        Returns:
            Unit vectors that differ from each other, [n, p].
        """
        worst: list[tuple[float, int]] = []
        Q = self.K.square()
        for part, product, _ in self._with_products():
            N = part.block.sum_rows(product.square())
            losses = example_losses(part.W, N, Q.to(N), part.block.norms)
            worst += worst_examples(losses, part.block.start, 4 * count)
        return replacements(self.blocks.source, worst, 4 * count, count).to(self.H)

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


def thinned_start(blocks: Blocks, config: FitConfig, keep: bool, quiet: bool = True) -> Tensor:
    """Components to start from: more than wanted are fitted for a few passes and thinned out, in two rounds.

    The second round adds directions of examples that the first explains least: rare mechanisms that it has missed.

    Args:
        blocks: The rows.
        config: Options of the fit, into C components.
        keep: Whether products of rows with twice the components may be kept between passes.
        quiet: Show no progress bar.

    Returns:
        Vectors, float32 [C, p]; every rank finds the same ones.
    """
    C = config.components
    if len(blocks.source.ranks) > START_EXAMPLES * C:
        filled = np.flatnonzero(np.asarray(blocks.source.ranks) > 0)
        some = np.sort(np.random.default_rng(config.seed).permutation(filled)[: START_EXAMPLES * C])
        blocks, keep = Blocks(SubsetRows(blocks.source, some), config.chunk, blocks.device), False
    few = replace(config, max_passes=START_PASSES, checkpoint_passes=START_PASSES, tolerance=0.0)
    H = start_components(blocks.source, min(round(START_ROUNDS[0] * C), blocks.nonzero), config.init, config.seed)
    for number, following in enumerate((*START_ROUNDS[1:], 1.0), start=1):
        solver = Als(blocks, H, few, keep, f"npeff, start {number}")
        solver.run(quiet=quiet)  # ends where checkpoints are made: every rank has the same H
        H = solver.H[distributed.everyone_has(least_replaceable(solver.S, solver.K, C))[0]]
        wanted = round(following * C) - C
        H = torch.cat([H, solver.badly_explained(wanted)]) if wanted else H
        del solver  # before the next one needs as much memory
    return H


def least_replaceable(S: Tensor, K: Tensor, count: int) -> list[int]:
    """The components that are left when those go, one by one, that another can stand in for at the least loss.

    Without component j, a twin l that takes over its coefficients leaves energy_j · (1 − cos²(hⱼ, hₗ)) unexplained.

    Args:
        S: WᵀW, float64 [D, D].
        K: HHᵀ, float64 [D, D].
        count: How many are left.

    Returns:
        Their numbers, ascending.
    """
    sizes = K.diagonal()
    energy = S.diagonal() * sizes.square()
    alike = (K.square() / torch.outer(sizes, sizes).clamp(min=1e-300)).fill_diagonal_(0.0)
    left = torch.ones(len(K), dtype=torch.bool, device=K.device)
    for _ in range(len(K) - count):
        best, twin = alike.max(dim=1)
        gone = int(torch.where(left, energy * (1 - best), torch.inf).argmin())
        energy[twin[gone]] += energy[gone] * best[gone]
        left[gone] = False
        alike[gone], alike[:, gone] = 0.0, 0.0
    return left.nonzero().view(-1).tolist()


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
        config = self.config
        solver: Als | Paper
        if config.solver == "paper":
            blocks = self._blocks(source, self._memory)
            self._check_examples(blocks, source.dim)
            solver = Paper(blocks, *start(blocks, config.components, config.seed), config)
        else:
            solver = self._als(source)
        solver.run(self.checkpoint, self.quiet)
        self.history = solver.state.history
        return solver.H, solver.coefficient_parts(), solver.blocks

    def _als(self, source: RowSource, stage: str = "") -> Als:
        """The solver before its first pass, or where a checkpoint left it; after a fit of short rows where it pays."""
        config, C = self.config, self.config.components
        rows = float(np.sum(source.ranks))
        products = 12.0 * rows * C
        keep = products <= self._memory
        keep_start = START_ROUNDS[0] * products + 4.0 * rows * source.dim <= self._memory  # never in place of the rows
        coarse = not stage and ShortRows.pays(source, self._memory - 2 * products * keep)
        spare = self._memory - products * keep - coarse * (products * keep + 4.0 * rows * source.dim / SHORTER)
        blocks = self._blocks(source, spare)
        self._check_examples(blocks, source.dim)
        saved = self.checkpoint.load(AlsState) if self.checkpoint else None
        saved = saved if saved and saved[1]["H"].shape[1] == source.dim else None  # else it is about shorter rows
        short = None
        if coarse and not saved:
            short = self._als(ShortRows(source, config.chunk), "short")
            short.run(self.checkpoint, self.quiet)
        given = saved or short
        H = torch.empty(C, source.dim) if given else thinned_start(blocks, config, keep_start, self.quiet)
        solver = Als(blocks, H, config, keep, f"npeff, {stage} rows" if stage else "npeff", stage)
        if saved:
            solver.take_up(saved)
        elif short:
            solver.take_over(short)
        return solver

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
