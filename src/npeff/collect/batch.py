"""One pass over a batch of prompts gives everything that any method needs."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from npeff.collect.capture import Capture
from npeff.collect.config import CollectConfig
from npeff.collect.directions import combine_to_predicted, make_directions, most_rows, predicted, reduce_rank
from npeff.collect.sketch.base import Sketch
from npeff.models.answer_sets import AnswerSet
from npeff.models.answers import AnswerModel
from npeff.models.load import LoadedModel
from npeff.models.select import Selection, blocks

TOP_TOKENS = 8
DIRECTION_ENTRIES = 2**26
"""Most numbers in the directions of a batch, half a gigabyte: with the vocabulary as answers they outgrow all else."""
_Round = tuple[torch.Tensor, torch.Tensor]
"""Answer logits [sequences, r], and the example of the batch that each belongs to [sequences]; -1 where to none."""
_FINITE = {"activation", "rows", "pef_norm", "gradient", "gradient_norm"}
"""An example with a value of these that is not finite is set aside."""


class Collector:
    """Runs batches of token ids through a model and keeps projected gradients."""

    def __init__(
        self, config: CollectConfig, model: LoadedModel, answers: AnswerSet, selection: Selection, sketch: Sketch
    ) -> None:
        self.config, self.model, self.selection, self.sketch = config, model, selection, sketch
        self.answer_model = AnswerModel(model, answers, config.share_prompt)
        self._most_rows = most_rows(config.directions, self.answer_model.count)
        self.shares_prompts: bool | None = None
        """Whether prompts that begin one another may; not known before there is one to try."""

    def batches(self, prompts: Sequence[Sequence[int]], budget: int, shared: bool = False) -> Iterator[list[int]]:
        """Put prompts of similar length together.

        Args:
            prompts: Token ids.
            budget: Most tokens of a batch, padding included.
            shared: Whether prompts that begin another one share its tokens, as `collect` lets them.

        Yields:
            Positions in `prompts` that make a batch.
        """
        extra = self.answer_model.extra_tokens
        most = max(1, DIRECTION_ENTRIES // (self.answer_model.count * self._most_rows))
        most = 1 if self.answer_model.alone else most
        chains = self._chains(prompts) if shared else [[i] for i in range(len(prompts))]
        chains = [chain[i : i + most] for chain in chains for i in range(0, len(chain), most)]
        batch: list[list[int]] = []
        for chain in sorted(chains, key=lambda own: (-len(own), -len(prompts[own[-1]]), own[-1])):
            # longest first, so the first of a batch sets its width; and with as many places, because a backward pass
            # from a place that some prompts lack goes through these prompts, too
            width = len(prompts[batch[0][-1]]) + extra if batch else 0
            full = width * (len(batch) + 1) > budget or sum(map(len, [*batch, chain])) > most
            if batch and (full or len(chain) < len(batch[0])):
                yield list(itertools.chain(*batch))
                batch = []
            batch.append(chain)
        if batch:
            yield list(itertools.chain(*batch))

    def _chains(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Positions in `prompts`, in lists in which each prompt begins the next one; alone where none can be shared."""
        chains: list[list[int]] = []
        for i in sorted(range(len(prompts)), key=lambda i: list(prompts[i])):
            before = prompts[chains[-1][-1]] if chains else ()
            if chains and len(before) < len(prompts[i]) and list(prompts[i][: len(before)]) == list(before):
                chains[-1].append(i)
            else:
                chains.append([i])
        if self.shares_prompts is None and len(chains) < len(prompts):
            self.shares_prompts = self.answer_model.goes_along(prompts[max(chains, key=len)[-1]])
        return chains if self.shares_prompts else [[i] for i in range(len(prompts))]

    def collect(self, prompts: Sequence[Sequence[int]], examples: list[int]) -> dict[str, torch.Tensor]:
        """Everything about a batch of prompts.

        Args:
            prompts: Token ids of B prompts.
            examples: Their numbers, which seed random directions, [B].

        Returns:
            Tensors on the CPU, for k rows of which an example uses the first `rank`: rows [B, k, p] and gradient [B, p]
            at unit norm; pef_norm (norm of the per-example Fisher), gradient_norm, kept, probability [B]; rank,
            prediction, set_aside [B] (set aside: something was not finite); activation [B, d]; probabilities [B, r], or
            for open answers the leading top_probabilities and top_tokens [B, 8]; where the rank was reduced, mixture
            [B, k, most directions], which turns directions into those of the rows.
        """
        config, chains = self.config, self._chains(prompts)
        outputs: list[Any] = []  # of the last block
        with ExitStack() as hooks, Capture(self.selection.modules, self.sketch.fold_input) as capture:
            if config.activation:
                last = blocks(self.model.network)[-1]
                hooks.enter_context(last.register_forward_hook(lambda *call: outputs.append(call[-1])))
            rounds, rows, places = self._ask(capture, prompts, chains)
            z = torch.empty(len(prompts), rounds[0][0].shape[1], device=self.model.device)
            for found, chosen in rounds:
                z[chosen[chosen >= 0]] = found.detach()[chosen >= 0]
            p = z.double().softmax(1)
            collected, finite = self._probabilities(p.float()), p.isfinite().all(1)
            if config.activation:
                collected["activation"] = _residual_at(outputs, rows, places)
            if config.fisher or config.gradient:
                collected |= self._rows(capture, rounds, torch.where(finite[:, None], p, 1.0 / p.shape[1]), examples)
        for name in _FINITE & collected.keys():
            finite &= collected[name].isfinite().view(len(finite), -1).all(1)
        for name, tensor in collected.items():
            if tensor.is_floating_point() or name == "rank":
                tensor[~finite] = 0
        return {name: tensor.cpu() for name, tensor in {**collected, "set_aside": ~finite}.items()}

    def _ask(
        self, capture: Capture, prompts: Sequence[Sequence[int]], chains: list[list[int]]
    ) -> tuple[list[_Round], torch.Tensor, torch.Tensor]:
        """Answer logits of a batch, and in which sequence [B] and at which token [B] each prompt ends."""
        every = torch.arange(len(prompts), device=self.model.device)
        if len(chains) == len(prompts):
            sequences, length = self.answer_model.sequences(prompts)
            capture.start(len(prompts), sequences, length)
            z, places = self.answer_model.logits(prompts)
            # where every suffix is a sequence of its own, an example's first sequence has its prompt too
            return [(z, every)], every * (sequences // len(prompts)), places
        rows, places = torch.empty_like(every), torch.empty_like(every)
        for row, chain in enumerate(chains):
            rows[chain] = row
        for i, prompt in enumerate(prompts):
            places[i] = len(prompt) - 1
        longest, ends = [prompts[chain[-1]] for chain in chains], [places[chain].tolist() for chain in chains]
        found = self.answer_model.logits_along(longest, ends, capture.start)
        chosen = [[chain[n] if n < len(chain) else -1 for chain in chains] for n in range(len(found))]
        return list(zip(found, torch.tensor(chosen, device=every.device), strict=True)), rows, places

    def _probabilities(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        probability, prediction = p.max(1)
        collected = {"prediction": prediction.int(), "probability": probability}
        if self.answer_model.answers.kind in ("vocabulary", "generated"):
            top = p.topk(min(TOP_TOKENS, p.shape[1]), dim=1)
            return collected | {"top_probabilities": top.values, "top_tokens": top.indices.int()}
        return collected | {"probabilities": p}

    def _rows(
        self, capture: Capture, rounds: list[_Round], p: torch.Tensor, examples: list[int]
    ) -> dict[str, torch.Tensor]:
        """Rows of the Fisher and the predicted answer's gradient, from as few backward passes as they need."""
        fisher, gradient = self.config.fisher, self.config.gradient
        V, kept = p.new_zeros(len(p), 0, p.shape[1]), p.new_zeros(len(p))
        if fisher:
            V, kept = make_directions(self.config.directions, p, examples)
        mix = combine_to_predicted(V, p) if gradient else None
        asked = torch.cat([V, predicted(p)[:, None]], 1) if gradient and mix is None else V
        directions = asked.float()
        rows = directions.new_zeros(*asked.shape[:2], self.sketch.dim)
        for number, (z, chosen) in enumerate(rounds, 1):
            there, own = chosen >= 0, directions[chosen]
            own[~there] = 0
            rows[chosen[there]] = capture.rows(z, own, self.sketch, number < len(rounds))[there]
        collected = self._fisher(rows[:, : V.shape[1]], V, kept) if fisher else {}
        if gradient:
            direct = (mix.float()[:, None] @ rows)[:, 0] if mix is not None else rows[:, -1]
            norm = torch.linalg.vector_norm(direct, dim=1, dtype=torch.float64).float()
            collected |= {"gradient": direct / _not_zero(norm)[:, None], "gradient_norm": norm}
        return collected

    def _fisher(self, rows: torch.Tensor, V: torch.Tensor, kept: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows [B, k, p] of directions V [B, k, r] that keep a share [B], at unit norm and of the rank asked for."""
        collected: dict[str, torch.Tensor] = {}
        used, rank = V.abs().amax(2) > 0, self.config.directions.rank
        # products of very long or short rows leave the range of float32, so their size is taken out first; being a
        # power of 2, it changes no digit
        size = rows.abs().amax((1, 2))
        size = torch.where(size > 0, torch.exp2(size.log2().floor()), 1.0)
        rows = rows / size[:, None, None]
        if rank is not None:
            rows, share, mix = reduce_rank(rows, rank)
            # batches may differ in the number of directions, so all are padded to the most that there can be
            missing = (0, self._most_rows - V.shape[1], 0, min(rank, self._most_rows) - mix.shape[1])
            collected["mixture"] = torch.nn.functional.pad(mix, missing)
            kept, used = kept * share, used[:, :rank]
        norm = (rows @ rows.mT).double().square().sum((1, 2)).sqrt()
        pef_norm = (norm * size.double().square()).float()
        # a norm too small for float32 is zero, and its rows with it: whoever divides by it must find no rows
        factor = torch.where(pef_norm > 0, _not_zero(norm).rsqrt().float(), 0.0)
        rows = rows * factor[:, None, None]
        return collected | {"rows": rows, "pef_norm": pef_norm, "kept": kept.float(), "rank": used.sum(1).int()}


def _not_zero(norm: torch.Tensor) -> torch.Tensor:
    """Norms to divide by; a zero vector stays zero."""
    return torch.where(norm > 0, norm, 1.0)


def _residual_at(outputs: list[Any], rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The last block's output, which is the residual stream before the final norm, at the last tokens of prompts.

    Args:
        outputs: Of the last block, for each part of the sequences: [sequences, T, d], or a tuple that begins with it.
        rows: The prompts' sequences, [B].
        places: Of the last tokens of the prompts, [B].

    Returns:
        float32 [B, d].
    """
    parts = [(output[0] if isinstance(output, tuple) else output).detach() for output in outputs]
    whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return whole.to(places.device)[rows, places].float()
