"""NPEFF without learning rates: exact line search for the components, exact coordinate descent for the coefficients.

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
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch

from npeff.decompose.blocks import Block, Blocks, replacements
from npeff.decompose.checkpoint import Checkpoint, History
from npeff.decompose.coefficients import example_losses, fit_coefficients
from npeff.decompose.config import FitConfig
from npeff.utils import distributed

SWEEPS = 3
"""Sweeps over the coefficients in a pass."""
RIDGE = 1e-7
"""Added to M's diagonal, as a share of it: equal components would make it singular."""
DEAD = 1e-10
"""A component with less than this share of the mean energy is dead."""
RESEEDS = 5
"""How often dead components are started again."""


@dataclass
class AlsState:
    """What a checkpoint holds besides H and W."""

    history: History = field(default_factory=History)
    beta: tuple[float, float] = (0.5, 1.0)
    """Length of the extrapolation, and the most that it may be."""
    reseeds: tuple[int, int] = (0, 0)
    """How often dead components were started again, and the pass after which they were last."""


@dataclass
class _Part:
    """A block's share of the state, all float32 [C, n] or [C, rows]."""

    block: Block
    W: torch.Tensor
    trial: torch.Tensor
    """Coefficients that may replace W."""
    products: list[torch.Tensor]
    """B at H, at the last point without extrapolation, and room for B_Δ; empty if they are computed when needed."""


class Als:
    """The solver at work. Memory: 8mC for W, 12·rows·C for products if they may be kept, 16Cp, and the rows' own.

    Args:
        blocks: The rows.
        H: Components to start from, [C, p].
        config: Options of the fit.
        keep: Whether products of rows and components are kept between passes.
    """

    def __init__(self, blocks: Blocks, H: torch.Tensor, config: FitConfig, keep: bool) -> None:
        self.blocks, self.config, self.keep = blocks, config, keep
        device, (C, p) = blocks.device, H.shape
        self.H = H.to(device, torch.float32).contiguous()
        self.T, *room = (torch.empty(C, p, device=device) for _ in range(3))
        self.points = [self.H, *room]
        """H, the last point without extrapolation (once there is one), and room for a step."""
        examples, rows = [block.examples for block in blocks.blocks], [block.rows for block in blocks.blocks]
        W, trial = matrices(C, examples, device), matrices(C, examples, device)
        products = [matrices(C, rows, device) for _ in range(3 if keep else 0)]
        self.parts = [
            _Part(block, W[i], trial[i], [kind[i] for kind in products]) for i, block in enumerate(blocks.blocks)
        ]
        self.S, self.K = (torch.zeros(C, C, dtype=torch.float64, device=device) for _ in range(2))
        self.loss = float("inf")
        """Summed loss at H with the coefficients on trial, of which S = WᵀW; K = HHᵀ."""
        self.have_previous = False
        self.state = AlsState()

    def run(self, checkpoint: Checkpoint | None = None, quiet: bool = False) -> None:
        """Iterate until the loss settles or the passes are used up.

        Args:
            checkpoint: Where to keep checkpoints; continued from if there is one.
            quiet: Show no progress bar.
        """
        if not self._resume(checkpoint):
            self.start_round(sweeps=10 * SWEEPS)
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
        alpha = loss_along(self.S, self.K, cross, square, slope, curvature).best_step()
        (beta, limit), extrapolated = self.state.beta, self.have_previous
        self._move(alpha, beta if extrapolated else 0.0)
        before = self.loss
        self._fit(SWEEPS)
        if extrapolated and self.loss < before:
            limit = min(1.0, 1.02 * limit)
            self.state.beta = min(1.05 * beta, limit), limit
        elif extrapolated:
            self.state.beta = beta / 1.5, beta
            self._step_back()
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

    def _project(self, direction: torch.Tensor) -> float:
        """B_Δ = GΔᵀ; returns Σᵢⱼ Wᵢⱼ ‖GᵢΔⱼ‖²."""
        total = torch.zeros(1, dtype=torch.float64)
        for part, rows in self._with_rows():
            product = torch.mm(direction, rows.T, out=part.products[2] if self.keep else None)
            squares = part.block.sum_rows(part.block.scaled(product).square())
            total += inner(part.W, squares)
        return float(distributed.sum_over_ranks(total))

    def _add_weighted(self, part: _Part, product: torch.Tensor, W: torch.Tensor, rows: torch.Tensor) -> None:
        room = part.products[2] if self.keep else None
        weighted = torch.mul(part.block.spread(W), product, out=room)
        self.T.addmm_(part.block.scaled(weighted), rows)

    def _with_rows(self) -> Iterator[tuple[_Part, torch.Tensor]]:
        for part, (_, rows) in zip(self.parts, self.blocks, strict=True):
            yield part, rows

    def _with_products(self) -> Iterator[tuple[_Part, torch.Tensor, torch.Tensor | None]]:
        """Every part with its B at H, [C, rows], and with the rows if they were read for it."""
        if self.keep:
            yield from ((part, part.products[0], None) for part in self.parts)
        else:
            for part, rows in self._with_rows():
                yield part, part.block.scaled(self.H @ rows.T), rows

    # Coefficients.

    def _fit(self, sweeps: int) -> None:
        """Fit coefficients at H, starting from W, into `trial`; sets K, the loss and S = WᵀW of the trial.

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
            fit_coefficients(part.trial.copy_(part.W), N, Q.to(N), sweeps)
            sums[:-1] += (part.trial @ part.trial.T).double().view(-1)
            sums[-1] += inner(part.trial, N)
            if rows is not None:
                self._add_weighted(part, product, part.trial, rows)
        distributed.sum_over_ranks(sums)
        self.S = sums[:-1].view(C, C)
        self.loss = self.blocks.nonzero - 2 * float(sums[-1]) + inner(self.S, Q)

    def _accept(self) -> None:
        """The coefficients on trial become the coefficients."""
        for part in self.parts:
            part.W, part.trial = part.trial, part.W

    # Points: H, H + αΔ and the one before it, together with their products with the rows.

    def _triples(self) -> Iterator[list[torch.Tensor]]:
        """[point, previous point, step] for the components and for every block's products with them."""
        yield self.points
        if self.keep:
            yield from (part.products for part in self.parts)

    def _move(self, alpha: float, beta: float) -> None:
        """The step becomes H + αΔ, and H goes beyond it by β times the way from the previous such point."""
        for point, previous, step in self._triples():
            step.mul_(alpha).add_(point)
            if beta:
                torch.lerp(previous, step, 1.0 + beta, out=point)
            else:
                point.copy_(step)

    def _step_back(self) -> None:
        """H becomes H + αΔ, without extrapolation."""
        for point, _, step in self._triples():
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
            values, which = losses.topk(min(4 * len(dead), len(losses)))
            worst += zip(values.tolist(), (which + part.block.start).tolist(), strict=True)
        everyone = [pair for pairs in distributed.everyone_has(worst) for pair in pairs]
        everyone = sorted(everyone, reverse=True)[: 4 * len(dead)]
        directions = replacements(self.blocks.source, everyone, len(dead)).to(self.H)
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

    def _resume(self, checkpoint: Checkpoint | None) -> bool:
        saved = checkpoint.load(AlsState) if checkpoint else None
        if saved is None:
            return False
        W, shared, self.state = saved
        self.H.copy_(shared["H"])
        for part in self.parts:
            part.W.copy_(W[part.block.start : part.block.stop].T)
        self.start_round(SWEEPS)
        return True

    def coefficient_parts(self) -> list[torch.Tensor]:
        """W of each block, [n, C]."""
        return [part.W.T for part in self.parts]


@dataclass(frozen=True)
class Quartic:
    """loss(H + αΔ) − loss(H) = c1·α + c2·α² + c3·α³ + c4·α⁴ for fixed coefficients W."""

    c1: float
    c2: float
    c3: float
    c4: float

    def __call__(self, step: float) -> float:
        return step * (self.c1 + step * (self.c2 + step * (self.c3 + step * self.c4)))

    def best_step(self) -> float:
        """The α ≥ 0 with the lowest loss.

        Returns:
            The step length; 0 if no step lowers the loss.
        """
        cubic = np.array([4 * self.c4, 3 * self.c3, 2 * self.c2, self.c1])
        if not np.isfinite(cubic).all() or not cubic.any():
            return 0.0
        roots = np.roots(cubic)
        candidates = [0.0, *(float(root.real) for root in roots if root.real > 0)]
        # a double root may come out with a small imaginary part; comparing values is safe for any candidate
        return min(candidates, key=self)


def loss_along(
    S: torch.Tensor, K: torch.Tensor, K_cross: torch.Tensor, K_step: torch.Tensor, slope: float, curvature: float
) -> Quartic:
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
        The quartic.
    """
    K1 = K_cross + K_cross.T
    return Quartic(
        c1=-4.0 * slope,
        c2=float((S * (K1 * K1 + 2 * K * K_step)).sum()) - 2.0 * curvature,
        c3=2.0 * float((S * K1 * K_step).sum()),
        c4=float((S * K_step * K_step).sum()),
    )


def matrices(rows: int, columns: list[int], device: torch.device) -> list[torch.Tensor]:
    """Zero matrices [rows, n], one for each n of `columns`.

    They share one allocation: the system gets it back whole, which it would not with thousands of small ones.
    """
    flat = torch.zeros(rows * sum(columns), device=device)
    ends = [0, *accumulate(rows * n for n in columns)]
    return [flat[start:end].view(rows, n) for (start, end), n in zip(pairwise(ends), columns, strict=True)]


def gram(H: torch.Tensor) -> torch.Tensor:
    """HHᵀ, float64 [C, C]."""
    return (H @ H.T).double()


def inner(first: torch.Tensor, second: torch.Tensor) -> float:
    """Σ first∘second; products in the tensors' type, their sum in float64."""
    return float((first * second).sum(dtype=torch.float64))


def inverse(M: torch.Tensor) -> torch.Tensor:
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
    scaled.diagonal().fill_(1.0 + RIDGE)
    return torch.cholesky_inverse(_cholesky(scaled)) * size[:, None] * size


def _cholesky(M: torch.Tensor) -> torch.Tensor:
    """Cholesky factor of M with unit diagonal; rounding may need a larger ridge."""
    for power in range(8):
        factor, failed = torch.linalg.cholesky_ex(M)
        if not int(failed):
            return factor
        M = M + RIDGE * 10 ** (power + 1) * torch.eye(len(M), dtype=M.dtype, device=M.device)
    raise ArithmeticError("the system of the components is not finite")
