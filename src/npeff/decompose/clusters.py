"""Gradient clustering: k-means on gradients of unit length (Michaud et al., "The quantization model", 2023)."""

from __future__ import annotations

from typing import Self

import torch

from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Block, Blocks
from npeff.decompose.checks import check_dim, check_examples
from npeff.decompose.history import History, Progress
from npeff.decompose.initial import replacements, start_components
from npeff.decompose.rotate import Rotation
from npeff.store.rows import RowSource
from npeff.utils import distributed
from npeff.utils.device import choose_device


class Clusters(Decomposition):
    """Lloyd's algorithm from a k-means++ start. `components` are the centroids.

    An example's only coefficient is that of its own cluster, 1 / (1 + distance from the centroid): examples of a
    component rank by proximity. Memory: 12Cp besides the rows' own.
    """

    kind = "gradient"

    def fit(self, source: RowSource) -> Self:
        config, device = self.config, choose_device(self.config.device, double=True)
        memory = config.memory_gb * 1e9
        rotation = Rotation(source, config.chunk, device) if Rotation.pays(source, memory) else None
        short = rotation.source if rotation else source
        blocks = Blocks(short, config.chunk, device, memory)
        check_examples(blocks, config.components)
        centroids = self._lloyd(blocks, short)
        self.components = (rotation.lift(centroids) if rotation else centroids).cpu()
        self.coefficients, self.residuals = self.explain(source)
        return self

    def _lloyd(self, blocks: Blocks, source: RowSource) -> torch.Tensor:
        config = self.config
        found = self.checkpoint.load() if self.checkpoint else None
        if found:
            centroids = found[1]["centroids"].to(blocks.device)
            self.history = History.from_dict(found[2]["history"])
        else:
            centroids = start_components(source, config.components, config.init, config.seed, signed=True)
            centroids = centroids.to(blocks.device)
        with Progress("clusters", config.max_passes, len(self.history.steps), self.quiet) as progress:
            while len(self.history.steps) <= config.max_passes:
                new, loss, worst = self._pass(blocks, centroids)
                progress.show(self.history.add(loss / blocks.nonzero))
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
                    state = {"history": self.history.to_dict()}
                    self.checkpoint.save(done, [], {"centroids": centroids}, state)
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
            factors = block.norms if block.scale is None else block.norms * _per_example(block, block.scale)
            examples = (block.norms > 0).nonzero().view(-1)
            picked = rows if block.owner is None else _one_row_each(block, rows)
            sums[:, :p].index_add_(0, nearest[examples], picked[examples] * factors[examples, None])
            sums[:, p].index_add_(0, nearest[examples], torch.ones_like(factors[examples]))
            total += float(distances.sum(dtype=torch.float64))
            values, which = distances.topk(min(C, len(distances)))
            worst += zip(values.tolist(), (which + block.start).tolist(), strict=True)
        distributed.sum_over_ranks(sums)
        distributed.sum_over_ranks(total)
        worst = [pair for pairs in distributed.everyone_has(sorted(worst)[-C:]) for pair in pairs]
        return sums[:, :p] / sums[:, p:].clamp(min=1), float(total), worst

    def explain(self, source: RowSource) -> tuple[torch.Tensor, torch.Tensor]:
        check_dim(source, self.components)
        blocks = Blocks(source, self.config.chunk, choose_device(self.config.device, double=True))
        centroids = self.components.to(blocks.device)
        coefficients, residuals = [], []
        for block, rows in blocks:
            nearest, distances = _assign(block, rows, centroids)
            part = torch.zeros(block.examples, len(centroids), device=blocks.device)
            part.scatter_(1, nearest[:, None], (block.norms / (1 + distances.sqrt()))[:, None])
            coefficients.append(part)
            residuals.append(distances)
        return blocks.gather(coefficients), blocks.gather(residuals)


def _assign(block: Block, rows: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest centroid of each example, and the squared distance (0 for a zero example), both [n]."""
    products = block.sum_rows(block.scaled(centroids @ rows.T))  # an example has one row or none
    distances = block.norms - 2 * products + centroids.square().sum(dim=1, keepdim=True)
    least, nearest = distances.min(dim=0)
    return nearest, least.clamp_(min=0) * block.norms


def _per_example(block: Block, values: torch.Tensor) -> torch.Tensor:
    """One number per row to one number per example [n]."""
    return block.sum_rows(values[None])[0]


def _one_row_each(block: Block, rows: torch.Tensor) -> torch.Tensor:
    """[n, p] from rows of examples some of which have none."""
    assert block.owner is not None
    return rows.new_zeros(block.examples, rows.shape[1]).index_copy_(0, block.owner, rows)
