"""Singular value decomposition of gradients or activations of unit length, without centring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import torch

from npeff.decompose.base import Decomposition, Order
from npeff.decompose.blocks import Blocks
from npeff.store.rows import RowSource
from npeff.utils import distributed

EXACT = 4096
"""Up to this size the smaller Gram matrix is formed and its eigenvectors computed; beyond, subspace iteration."""
OVERSAMPLING = 16
"""Directions that the iteration carries besides the wanted ones; the last wanted ones converge sooner for it."""


class GradientSvd(Decomposition):
    """`components` are the leading right singular vectors, `coefficients` the left ones times the singular values.

    Coefficients have signs, so examples rank in three ways. Memory besides the rows' own: the smaller Gram matrix up to
    4096², else 8(C + 16)p.
    """

    kind = "gradient"
    parts = "vectors"
    orders: ClassVar[tuple[Order, ...]] = ("positive", "negative", "absolute")

    def fit(self, source: RowSource) -> Self:
        rotation = self._rotation(source)
        blocks = self._blocks(rotation.source if rotation else source, self._memory)
        self._check_examples(blocks, source.dim)
        exact = blocks.dim <= EXACT
        vectors = self._exact(blocks) if exact else self._iterate(blocks)
        if rotation:
            vectors = torch.nn.functional.normalize(rotation.lift(vectors), dim=1)
        # a singular vector is free in its sign: its largest entry is positive
        largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
        self.components = (vectors * largest.sign()).cpu()
        self.coefficients, self.residuals = self.explain(source)
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero)
        if exact:
            self.history.ending = "exact"
        return self

    def _exact(self, blocks: Blocks) -> torch.Tensor:
        """Leading eigenvectors of GᵀG, [C, p]."""
        gram = torch.zeros(blocks.dim, blocks.dim, dtype=torch.float64, device=blocks.device)
        for block, rows in blocks:
            scaled = block.scaled_rows(rows)
            gram += (scaled.T @ scaled).double()
        distributed.sum_over_ranks(gram)
        return torch.linalg.eigh(gram)[1].flip(1)[:, : self.config.components].T.float()

    def _iterate(self, blocks: Blocks) -> torch.Tensor:
        """Leading right singular vectors [C, p] by subspace iteration: GᵀG times a basis in each pass."""
        config = self.config
        size = min(config.components + OVERSAMPLING, blocks.dim)
        generator = torch.Generator().manual_seed(config.seed)
        basis = torch.randn(size, blocks.dim, generator=generator).to(blocks.device)
        basis = torch.linalg.qr(basis.T)[0].T.contiguous()
        with self.history.shown(config.method, config.max_passes, 0, self.quiet):
            for _ in range(config.max_passes):
                product, inner = torch.zeros_like(basis), torch.zeros(size, size, dtype=torch.float64)
                for block, rows in blocks:
                    B = block.scaled(basis @ rows.T)
                    inner += (B @ B.T).double().cpu()
                    product.addmm_(block.scaled(B), rows)
                distributed.sum_over_ranks(product)
                distributed.sum_over_ranks(inner)
                values, turn = torch.linalg.eigh(inner)  # Rayleigh-Ritz: the best vectors inside the basis
                kept = values[-config.components :].sum()
                self.history.add(1 - float(kept) / blocks.nonzero)
                turn = turn.flip(1).T.to(basis)
                if self.history.settled(config.tolerance):
                    self.history.ending = "converged"
                    return (turn @ basis)[: config.components]
                basis = torch.linalg.qr((turn @ product).T)[0].T.contiguous()
        self.history.ending = "out of passes"
        return (turn @ basis)[: config.components] if config.max_passes == 1 else basis[: config.components]

    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        vectors = self.components.to(blocks.device)
        for block, rows in blocks:
            part = block.sum_rows(block.scaled(vectors @ rows.T))
            yield part.T, (block.norms - part.square().sum(dim=0)).clamp_(min=0)


class ActivationSvd(GradientSvd):
    """The same of the last token's activations."""

    kind = "activation"
