"""One pass over a batch of prompts gives everything that any method needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npeff.collect.capture import Capture
from npeff.collect.config import DirectionsConfig
from npeff.collect.directions import combine_to_predicted, make_directions, most_rows, predicted, reduce_rank
from npeff.collect.sketch.base import Sketch
from npeff.models.answers import AnswerModel, AnswerSet
from npeff.models.load import LoadedModel
from npeff.models.select import Selection, blocks

TOP_TOKENS = 8
DIRECTION_ENTRIES = 2**26
"""Most numbers in the directions of a batch, half a gigabyte: with the vocabulary as answers they outgrow all else."""


@dataclass(frozen=True)
class Wanted:
    """What to collect besides probabilities and predictions."""

    fisher: bool = True
    gradient: bool = True
    activation: bool = True


EVERYTHING = Wanted()
_FINITE = ("rows", "pef_norm", "gradient", "gradient_norm")


class Collector:
    """Runs batches of token ids through a model and keeps projected gradients."""

    def __init__(
        self,
        model: LoadedModel,
        answers: AnswerSet,
        selection: Selection,
        sketch: Sketch,
        directions: DirectionsConfig,
        wanted: Wanted = EVERYTHING,
        share_prompt: bool = True,
    ) -> None:
        self.model, self.sketch, self.directions, self.wanted = model, sketch, directions, wanted
        self.selection = selection
        self.answer_model = AnswerModel(model, answers, share_prompt)
        self._most_rows = most_rows(directions, self.answer_model.count)

    def batches(self, prompts: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
        """Put prompts of similar length together.

        Args:
            prompts: Token ids.
            budget: Most tokens of a batch, padding included.

        Yields:
            Positions in `prompts` that make a batch.
        """
        extra = self.answer_model.extra_tokens
        most = max(1, DIRECTION_ENTRIES // (self.answer_model.count * self._most_rows))
        batch: list[int] = []
        for position in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)):
            # longest first, so the first of a batch sets its width
            width = len(prompts[batch[0]]) + extra if batch else 0
            if batch and (width * (len(batch) + 1) > budget or len(batch) == most):
                yield batch
                batch = []
            batch.append(position)
        if batch:
            yield batch

    def collect(self, prompts: Sequence[Sequence[int]], examples: list[int]) -> dict[str, torch.Tensor]:
        """Everything about a batch of prompts.

        Args:
            prompts: Token ids of B prompts.
            examples: Their numbers, which seed random directions, [B].

        Returns:
            Tensors on the CPU, for k rows of which an example uses the first `rank`: rows [B, k, p] and gradient [B, p]
            at unit norm; pef_norm (norm of the per-example Fisher), gradient_norm, kept, probability [B]; rank,
            prediction, set_aside [B] (set aside: something was not finite); activation [B, d]; probabilities [B, r], or
            for the vocabulary the leading top_probabilities and top_tokens [B, 8]; where the rank was reduced, mixture
            [B, k, most directions], which turns directions into those of the rows.
        """
        with Capture(self.selection.modules, self.sketch.fold_input) as capture, _LastResidual(self) as residual:
            capture.start(len(prompts), *self.answer_model.sequences(prompts))
            z, places = self.answer_model.logits(prompts)
            collected = self._probabilities(z.detach())
            p = z.detach().double().softmax(1)
            finite = p.isfinite().all(1)
            p = torch.where(finite[:, None], p, 1.0 / p.shape[1])
            if self.wanted.activation:
                collected["activation"] = residual.at(places, len(prompts))
                finite &= collected["activation"].isfinite().all(1)
            if self.wanted.fisher or self.wanted.gradient:
                collected |= self._rows(capture, z, p, examples)
                finite &= torch.stack(
                    [collected[name].isfinite().view(len(finite), -1).all(1) for name in _FINITE if name in collected]
                ).all(0)
        collected["set_aside"] = ~finite
        for name, tensor in collected.items():
            if tensor.is_floating_point():
                collected[name] = torch.where(finite.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0)
        if "rank" in collected:
            collected["rank"] = torch.where(finite, collected["rank"], 0)
        return {name: tensor.cpu() for name, tensor in collected.items()}

    def _probabilities(self, z: torch.Tensor) -> dict[str, torch.Tensor]:
        p = z.double().softmax(1).float()
        probability, prediction = p.max(1)
        collected = {"prediction": prediction.int(), "probability": probability}
        if self.answer_model.answers.kind == "vocabulary":
            top = p.topk(min(TOP_TOKENS, p.shape[1]), dim=1)
            return collected | {"top_probabilities": top.values, "top_tokens": top.indices.int()}
        return collected | {"probabilities": p}

    def _rows(self, capture: Capture, z: torch.Tensor, p: torch.Tensor, examples: list[int]) -> dict[str, torch.Tensor]:
        """Rows of the Fisher and the predicted answer's gradient, from as few backward passes as they need."""
        collected: dict[str, torch.Tensor] = {}
        V, kept = p.new_zeros(len(p), 0, p.shape[1]), None
        if self.wanted.fisher:
            V, kept = make_directions(self.directions, p, examples)
        count = V.shape[1]
        mix = combine_to_predicted(V, p) if self.wanted.gradient and self.wanted.fisher else None
        if self.wanted.gradient and mix is None:
            V = torch.cat([V, predicted(p)[:, None]], 1)
        rows = capture.rows(z, V.float(), self.sketch)
        if self.wanted.gradient:
            gradient = (mix.float()[:, None] @ rows)[:, 0] if mix is not None else rows[:, -1]
            norm = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).float()
            collected |= {"gradient": gradient / _not_zero(norm)[:, None], "gradient_norm": norm}
        if self.wanted.fisher:
            assert kept is not None
            used = V[:, :count].abs().amax(2) > 0
            rows = rows[:, :count]
            # products of very long or short rows leave the range of float32, so their size is taken out first; being a
            # power of 2, it changes no digit
            size = rows.abs().amax((1, 2))
            size = torch.where(size > 0, torch.exp2(size.log2().floor()), 1.0)
            rows = rows / size[:, None, None]
            if self.directions.rank is not None:
                rows, share, mix = reduce_rank(rows, self.directions.rank)
                # batches may differ in the number of directions, so all are padded to the most that there can be
                fewer = min(self.directions.rank, self._most_rows) - mix.shape[1]
                collected["mixture"] = torch.nn.functional.pad(mix, (0, self._most_rows - count, 0, fewer))
                kept, used = kept * share, used[:, : self.directions.rank]
            gram = (rows @ rows.mT).double()
            norm = gram.square().sum((1, 2)).sqrt()
            pef_norm = (norm * size.double().square()).float()
            # a norm too small for float32 is zero, and its rows with it: whoever divides by it must find no rows
            factor = torch.where(pef_norm > 0, _not_zero(norm).rsqrt().float(), 0.0)
            collected |= {
                "rows": rows * factor[:, None, None],
                "pef_norm": pef_norm,
                "kept": kept.float(),
                "rank": used.sum(1).int(),
            }
        return collected


def _not_zero(norm: torch.Tensor) -> torch.Tensor:
    """Norms to divide by; a zero vector stays zero."""
    return torch.where(norm > 0, norm, 1.0)


class _LastResidual:
    """Keeps the output of the last block: the residual stream before the final norm."""

    def __init__(self, collector: Collector) -> None:
        self.block = blocks(collector.model.network)[-1] if collector.wanted.activation else None
        self.output: torch.Tensor | None = None

    def __enter__(self) -> _LastResidual:
        def keep(_: Any, __: Any, output: Any) -> None:
            self.output = (output[0] if isinstance(output, tuple) else output).detach()

        self.handle = self.block.register_forward_hook(keep) if self.block is not None else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            self.handle.remove()

    def at(self, places: torch.Tensor, examples: int) -> torch.Tensor:
        """[B, d] float32 at the last tokens of the prompts."""
        assert self.output is not None
        # where every suffix is a sequence of its own, an example's first sequence has its prompt too
        output = self.output[:: len(self.output) // examples]
        return output[torch.arange(examples, device=output.device), places].float()
