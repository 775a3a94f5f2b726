"""The methods that NPEFF is compared with: gradient clustering, a sparse autoencoder, and SVDs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from npeff.decompose.base import Decomposition, Order
from npeff.decompose.blocks import Block, Blocks, replacements, start_components, worst_examples
from npeff.decompose.checkpoint import WINDOW, State
from npeff.decompose.config import SaeConfig
from npeff.store.rows import RowSource
from npeff.utils import distributed

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Decay of Adam's moments, and what is added to its denominator."""
EXACT = 4096
"""Up to this size the smaller Gram matrix is formed and its eigenvectors computed; beyond, subspace iteration."""
OVERSAMPLING = 16
"""Directions that the iteration carries besides the wanted ones; the last wanted ones converge sooner for it."""


class Clusters(Decomposition):
    """Gradient clustering: k-means on gradients of unit length (Michaud et al., "The quantization model", 2023).

    Lloyd's algorithm from a k-means++ start. `components` are the centroids.

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

    def _lloyd(self, blocks: Blocks) -> Tensor:
        """The centroids [C, p]."""
        config, source = self.config, blocks.source
        saved = self.checkpoint.load(State) if self.checkpoint else None
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
                    fresh = replacements(source, worst, len(new), len(empty)).to(new)
                    new[empty[: len(fresh)]] = fresh
                    self.history.reseeded += len(fresh)
                centroids = new
                done = len(self.history.steps)
                if self.checkpoint and done % config.checkpoint_passes == 0:
                    self.checkpoint.save(done, [], {"centroids": centroids}, State(self.history))
        self.history.ending = "out of passes"
        return centroids

    def _pass(self, blocks: Blocks, centroids: Tensor) -> tuple[Tensor, float, list[tuple[float, int]]]:
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
            worst += worst_examples(distances, block.start, C)
        distributed.sum_over_ranks(sums)
        distributed.sum_over_ranks(total)
        return sums[:, :p] / sums[:, p:].clamp(min=1), float(total), worst

    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        centroids = self.components.to(blocks.device)
        for block, rows in blocks:
            nearest, distances = _assign(block, rows, centroids)
            part = torch.zeros(block.examples, len(centroids), device=blocks.device)
            part.scatter_(1, nearest[:, None], (block.norms / (1 + distances.sqrt()))[:, None])
            yield part, distances


def _assign(block: Block, rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each example, and the squared distance (0 for a zero example), both [n]."""
    products = block.sum_rows(block.scaled(centroids @ rows.T))  # an example has one row or none
    distances = block.norms - 2 * products + centroids.square().sum(dim=1, keepdim=True)
    least, nearest = distances.min(dim=0)
    return nearest, least.clamp_(min=0) * block.norms


def steps_per_entry(options: SaeConfig) -> int:
    """Steps of the optimiser between two entries of the history."""
    return max(1, options.sae_patience // WINDOW)


@dataclass
class SaeState(State):
    """What a checkpoint holds besides parameters and moments."""

    done: int = 0
    """Steps of the optimiser."""


class Sae(Decomposition):
    """A TopK autoencoder on activations of unit length (Gao et al., "Scaling and evaluating SAEs", 2024).

    z = TopK(E(x − b)), x̂ = zD + b, with rows of E and D of unit norm; `components` are D's rows.

    E and D start equal; their gradients are projected to the tangent space of the unit spheres before Adam sees them.
    Memory: all activations, 4md, since batches are drawn from all examples; every rank takes its share of each batch.
    """

    kind = "activation"
    tensors = (*Decomposition.tensors, "encoder", "bias")

    encoder: Tensor
    bias: Tensor

    def fit(self, source: RowSource) -> Self:
        blocks = self._blocks(source, keep_bytes=float("inf"), shard=False)
        self._check_examples(blocks, source.dim)
        x = blocks.all_rows()
        self._train(x[(x != 0).any(dim=1)])
        self.coefficients, self.residuals = self.explain(source)
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero)
        return self

    def _train(self, x: Tensor) -> None:
        options, C = self.config.sae, self.config.components
        batch, every = min(options.sae_batch, len(x)), steps_per_entry(options)
        generator = torch.Generator().manual_seed(self.config.seed)
        E = torch.nn.functional.normalize(torch.randn(C, x.shape[1], generator=generator), dim=1).to(x.device)
        tensors = [E, E.clone(), x.mean(dim=0)]
        tensors += [torch.zeros_like(value) for value in tensors for _ in BETAS]
        done, recent = 0, 0.0
        saved = self.checkpoint.load(SaeState) if self.checkpoint else None
        if saved:
            tensors = [saved[1][f"tensor{i}"].to(x.device) for i in range(len(tensors))]
            done, self.history = saved[2].done, saved[2].history
        with self.history.shown("sae", options.sae_steps // every, done // every, self.quiet):
            while done < options.sae_steps:
                recent += self._step(x, tensors, done, batch)
                done += 1
                if done % every:
                    continue
                self.history.add(recent / every)
                recent = 0.0
                if self.history.settled(self.config.tolerance):
                    self.history.ending = "converged"
                    break
                if self.checkpoint and done % (every * self.config.checkpoint_passes) == 0:
                    named = {f"tensor{i}": value.detach() for i, value in enumerate(tensors)}
                    self.checkpoint.save(done, [], named, SaeState(self.history, done))
            else:
                self.history.ending = "out of passes"
        self.encoder, self.components, self.bias = (value.detach().cpu() for value in tensors[:3])

    def _step(self, x: Tensor, tensors: list[Tensor], done: int, batch: int) -> float:
        """One step of Adam on a batch that seed and step number determine; returns the loss per example.

        `tensors` are E, D and b, and the two moments of each.
        """
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + done)
        drawn = torch.randint(len(x), (batch,), generator=generator) if batch < len(x) else torch.arange(len(x))
        mine = x[drawn[distributed.rank() :: distributed.world_size()].to(x.device)]
        E, D, b = parameters = [value.requires_grad_() for value in tensors[:3]]
        _, reconstruction = encode(mine, E, D, b, self.config.sae.active(len(E)))
        loss = (mine - reconstruction).square().sum() / batch
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for value, own, mean, square in zip(parameters, gradients, tensors[3::2], tensors[4::2], strict=True):
                gradient = distributed.sum_over_ranks(own.contiguous())
                if value.ndim == 2:  # along the sphere only
                    gradient = gradient - (gradient * value).sum(dim=1, keepdim=True) * value
                mean.lerp_(gradient, 1 - BETAS[0])
                square.lerp_(gradient.square(), 1 - BETAS[1])
                size = (square / (1 - BETAS[1] ** (done + 1))).sqrt_().add_(EPSILON)
                value.addcdiv_(mean, size, value=-self.config.sae.sae_rate / (1 - BETAS[0] ** (done + 1)))
                if value.ndim == 2:
                    value.copy_(torch.nn.functional.normalize(value, dim=1))
        return float(distributed.sum_over_ranks(loss.detach()))

    @torch.no_grad()
    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        E, D, b = (value.to(blocks.device) for value in (self.encoder, self.components, self.bias))
        for block, rows in blocks:
            x = block.one_row_each(rows)
            z, reconstruction = encode(x, E, D, b, self.config.sae.active(len(E)))
            yield z * block.norms[:, None], (x - reconstruction).square().sum(dim=1) * block.norms


def encode(x: Tensor, E: Tensor, D: Tensor, b: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Latents and reconstruction of examples.

    Args:
        x: Examples, [n, d].
        E: Encoder, [C, d].
        D: Decoder, [C, d].
        b: Bias, [d].
        k: Most latents of an example.

    Returns:
        Latents [n, C], the k largest of each example and of these only positive ones, and the reconstruction [n, d].
    """
    latents = (x - b) @ E.T
    values, which = latents.topk(min(k, len(E)), dim=1)
    z = torch.zeros_like(latents).scatter(1, which, values.relu())
    return z, z @ D + b


class GradientSvd(Decomposition):
    """Singular value decomposition of gradients of unit length, without centring.

    `components` are the leading right singular vectors, `coefficients` the left ones times the singular values.

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

    def _exact(self, blocks: Blocks) -> Tensor:
        """Leading eigenvectors of GᵀG, [C, p]."""
        gram = torch.zeros(blocks.dim, blocks.dim, dtype=torch.float64, device=blocks.device)
        for block, rows in blocks:
            scaled = block.scaled_rows(rows)
            gram += (scaled.T @ scaled).double()
        distributed.sum_over_ranks(gram)
        return torch.linalg.eigh(gram)[1].flip(1)[:, : self.config.components].T.float()

    def _iterate(self, blocks: Blocks) -> Tensor:
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

    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        vectors = self.components.to(blocks.device)
        for block, rows in blocks:
            part = block.sum_rows(block.scaled(vectors @ rows.T))
            yield part.T, (block.norms - part.square().sum(dim=0)).clamp_(min=0)


class ActivationSvd(GradientSvd):
    """The same of the last token's activations."""

    kind = "activation"
