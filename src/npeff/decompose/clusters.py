"""Gradient clustering: k-means on gradients of unit length (Michaud et al., "The quantization model", 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Block, Blocks, replacements, start_components
from npeff.decompose.checkpoint import History
from npeff.store.rows import RowSource
from npeff.utils import distributed


@dataclass
class ClustersState:
    """What a checkpoint holds besides the centroids."""

    history: History


class Clusters(Decomposition):
    """Lloyd's algorithm from a k-means++ start. `components` are the centroids.

    An example's only coefficient is that of its own cluster, 1 / (1 + distance from the centroid): examples of a
    component rank by proximity. Memory: 12Cp besides the rows' own.
    """

    kind = "gradient"

    def fit(self, source: RowSource) -> Self:
        rotation = self._rotation(source)
        blocks = self._blocks(rotation.source if rotation else source, self._memory)
        self._check_examples(blocks, source.dim)
        centroids = self._lloyd(blocks)
        self.components = (rotation.lift(centroids) if rotation else centroids).cpu()
        self.coefficients, self.residuals = self.explain(source)
        return self

    def _lloyd(self, blocks: Blocks) -> torch.Tensor:
        """The centroids [C, p]."""
        config, source = self.config, blocks.source
        saved = self.checkpoint.load(ClustersState) if self.checkpoint else None
        if saved:
            centroids, self.history = saved[1]["centroids"], saved[2].history
        else:
            centroids = start_components(source, config.components, config.init, config.seed, signed=True)
        centroids = centroids.to(blocks.device)
        with self.history.shown("clusters", config.max_passes, len(self.history.steps), self.quiet):
            while len(self.history.steps) <= config.max_passes:
                new, loss, worst = self._pass(blocks, centroids)
                self.history.add(loss / blocks.nonzero)
                if self.history.settled(config.tolerance) or self.history.loss == 0 or torch.equal(new, centroids):
                    self.history.ending = "converged"
                    return centroids
                empty = (new == 0).all(dim=1).nonzero().view(-1)
                if len(empty):
                    fresh = replacements(source, worst, len(empty)).to(new)
                    new[empty[: len(fresh)]] = fresh
                    self.history.reseeded += len(fresh)
                centroids = new
                done = len(self.history.steps)
                if self.checkpoint and done % config.checkpoint_passes == 0:
                    self.checkpoint.save(done, [], {"centroids": centroids}, ClustersState(self.history))
        self.history.ending = "out of passes"
        return centroids

    def _pass(self, blocks: Blocks, centroids: torch.Tensor) -> tuple[torch.Tensor, float, list[tuple[float, int]]]:
        """Means of the clusters [C, p] (zero for an empty one), the loss, and the farthest examples."""
        C, p = centroids.shape
        sums = torch.zeros(C, p + 1, device=centroids.device)
        total = torch.zeros(1, dtype=torch.float64)
        worst: list[tuple[float, int]] = []
        for block, rows in blocks:
            nearest, distances = _assign(block, rows, centroids)
            examples = (block.norms > 0).nonzero().view(-1)
            sums[:, :p].index_add_(0, nearest[examples], block.one_row_each(rows)[examples])
            sums[:, p].index_add_(0, nearest[examples], block.norms[examples])
            total += float(distances.sum(dtype=torch.float64))
            values, which = distances.topk(min(C, len(distances)))
            worst += zip(values.tolist(), (which + block.start).tolist(), strict=True)
        distributed.sum_over_ranks(sums)
        distributed.sum_over_ranks(total)
        worst = [pair for pairs in distributed.everyone_has(sorted(worst)[-C:]) for pair in pairs]
        return sums[:, :p] / sums[:, p:].clamp(min=1), float(total), worst

    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        centroids = self.components.to(blocks.device)
        for block, rows in blocks:
            nearest, distances = _assign(block, rows, centroids)
            part = torch.zeros(block.examples, len(centroids), device=blocks.device)
            part.scatter_(1, nearest[:, None], (block.norms / (1 + distances.sqrt()))[:, None])
            yield part, distances


def _assign(block: Block, rows: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest centroid of each example, and the squared distance (0 for a zero example), both [n]."""
    products = block.sum_rows(block.scaled(centroids @ rows.T))  # an example has one row or none
    distances = block.norms - 2 * products + centroids.square().sum(dim=1, keepdim=True)
    least, nearest = distances.min(dim=0)
    return nearest, least.clamp_(min=0) * block.norms
