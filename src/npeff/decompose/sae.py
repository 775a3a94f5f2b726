"""A TopK sparse autoencoder on activations of unit length (Gao et al., "Scaling and evaluating SAEs", 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from npeff.decompose.base import Decomposition
from npeff.decompose.blocks import Blocks
from npeff.decompose.checkpoint import WINDOW, History
from npeff.decompose.config import SaeConfig
from npeff.store.rows import RowSource
from npeff.utils import distributed

BETAS, EPSILON = (0.9, 0.999), 1e-8


def steps_per_entry(options: SaeConfig) -> int:
    """Steps of the optimiser between two entries of the history."""
    return max(1, options.sae_patience // WINDOW)


@dataclass
class SaeState:
    """What a checkpoint holds besides parameters and moments."""

    done: int
    """Steps of the optimiser."""
    history: History


class Sae(Decomposition):
    """z = TopK(E(x − b)), x̂ = zD + b, with rows of E and D of unit norm; `components` are D's rows.

    E and D start equal; their gradients are projected to the tangent space of the unit spheres before Adam sees them.
    Memory: all activations, 4md, since batches are drawn from all examples; every rank takes its share of each batch.
    """

    kind = "activation"
    tensors = (*Decomposition.tensors, "encoder", "bias")

    encoder: torch.Tensor
    bias: torch.Tensor

    def fit(self, source: RowSource) -> Self:
        blocks = self._blocks(source, keep_bytes=float("inf"), shard=False)
        self._check_examples(blocks, source.dim)
        x = blocks.all_rows()
        self._train(x[(x != 0).any(dim=1)])
        self.coefficients, self.residuals = self.explain(source)
        self.history.add(float(self.residuals.double().sum()) / blocks.nonzero)
        return self

    def _train(self, x: torch.Tensor) -> None:
        options, C = self.config.sae, self.config.components
        batch, every = min(options.sae_batch, len(x)), steps_per_entry(options)
        generator = torch.Generator().manual_seed(self.config.seed)
        E = torch.nn.functional.normalize(torch.randn(C, x.shape[1], generator=generator), dim=1).to(x.device)
        parameters = [E, E.clone(), x.mean(dim=0)]
        moments = [torch.zeros_like(value) for value in parameters for _ in BETAS]
        done, recent = 0, 0.0
        saved = self.checkpoint.load(SaeState) if self.checkpoint else None
        if saved:
            tensors = [saved[1][f"tensor{i}"].to(x.device) for i in range(3 + len(moments))]
            parameters, moments = tensors[:3], tensors[3:]
            done, self.history = saved[2].done, saved[2].history
        with self.history.shown("sae", options.sae_steps // every, done // every, self.quiet):
            while done < options.sae_steps:
                recent += self._step(x, parameters, moments, done, batch)
                done += 1
                if done % every:
                    continue
                self.history.add(recent / every)
                recent = 0.0
                if self.history.settled(self.config.tolerance):
                    self.history.ending = "converged"
                    break
                if self.checkpoint and done % (every * self.config.checkpoint_passes) == 0:
                    named = {f"tensor{i}": value.detach() for i, value in enumerate([*parameters, *moments])}
                    self.checkpoint.save(done, [], named, SaeState(done, self.history))
            else:
                self.history.ending = "out of passes"
        self.encoder, self.components, self.bias = (value.detach().cpu() for value in parameters)

    def _step(
        self, x: torch.Tensor, parameters: list[torch.Tensor], moments: list[torch.Tensor], done: int, batch: int
    ) -> float:
        """One step of Adam on a batch that seed and step number determine; returns the loss per example."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + done)
        drawn = torch.randint(len(x), (batch,), generator=generator) if batch < len(x) else torch.arange(len(x))
        mine = x[drawn[distributed.rank() :: distributed.world_size()].to(x.device)]
        E, D, b = (value.requires_grad_() for value in parameters)
        _, reconstruction = encode(mine, E, D, b, self.config.sae.top_k)
        loss = (mine - reconstruction).square().sum() / batch
        gradients = torch.autograd.grad(loss, [E, D, b])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), loss.detach()[None]])
        distributed.sum_over_ranks(flat)
        with torch.no_grad():
            start = 0
            for i, value in enumerate(parameters):
                gradient = flat[start : start + value.numel()].view_as(value)
                start += value.numel()
                if value.ndim == 2:  # along the sphere only
                    gradient = gradient - (gradient * value).sum(dim=1, keepdim=True) * value
                mean, square = moments[2 * i], moments[2 * i + 1]
                mean.lerp_(gradient, 1 - BETAS[0])
                square.lerp_(gradient.square(), 1 - BETAS[1])
                size = (square / (1 - BETAS[1] ** (done + 1))).sqrt_().add_(EPSILON)
                value.addcdiv_(mean, size, value=-self.config.sae.sae_rate / (1 - BETAS[0] ** (done + 1)))
                if value.ndim == 2:
                    value.copy_(torch.nn.functional.normalize(value, dim=1))
        return float(flat[-1])

    @torch.no_grad()
    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        E, D, b = (value.to(blocks.device) for value in (self.encoder, self.components, self.bias))
        for block, rows in blocks:
            x = block.one_row_each(rows)
            z, reconstruction = encode(x, E, D, b, self.config.sae.top_k)
            yield z * block.norms[:, None], (x - reconstruction).square().sum(dim=1) * block.norms


def encode(
    x: torch.Tensor, E: torch.Tensor, D: torch.Tensor, b: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
