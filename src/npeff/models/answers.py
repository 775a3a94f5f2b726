"""Answers: from prompts to the logits of an example's answers, for each kind of answer set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from npeff.models.answer_sets import AnswerSet, TokenTree
from npeff.models.devices import fetching_again
from npeff.models.load import LoadedModel
from npeff.models.prompts import SECOND
from npeff.utils import UserError
from npeff.utils.random import random_bits

NEVER = -1e4
"""Logit of an answer that a prompt does not have."""
SEGMENT = 32
"""Tokens that are run at once where several places of a prompt are asked: gradients of a place end at its segment."""
# of log-probabilities of suffixes, between two ways to compute them
TREE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


class AnswerModel:
    """Computes differentiable answer logits of batches of prompts."""

    def __init__(self, model: LoadedModel, answers: AnswerSet, share_prompt: bool = True):
        """Prepare a model for a set of answers.

        Args:
            model: Loaded model.
            answers: Its answers.
            share_prompt: Whether suffixes share one run of the prompt. Without, one sequence per suffix is run: slow,
                for checks and for models without tree attention.

        Raises:
            UserError: Suffixes cannot share a prompt in this model.
        """
        self.model, self.answers = model, answers
        self._share_prompt = share_prompt
        self._separate = answers.kind == "suffixes" and not share_prompt
        self.tree = TokenTree.build(answers.tokens) if answers.kind == "suffixes" and share_prompt else None
        accepted = inspect.signature(model.network.forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        if self.tree and "position_ids" not in accepted:
            raise UserError("Suffixes cannot share a prompt: the model takes no position ids. Use --no-share-prompt.")

    @property
    def count(self) -> int:
        """Number r of answers; of generated ones, the most that a prompt may have."""
        if self.answers.samples is not None:
            return self.answers.samples.samples
        settings: Any = self.model.network.config
        return len(self.answers.tokens) or int(settings.get_text_config().vocab_size)

    @property
    def extra_tokens(self) -> int:
        """Tokens that an example needs beside its prompt."""
        return len(self.tree.tokens) if self.tree else 0

    @property
    def alone(self) -> bool:
        """Whether examples must be run one by one.

        DeBERTa shares what it computes of positions between them; generated answers are each prompt's own.
        """
        settings: Any = self.model.network.config
        return str(settings.model_type).startswith("deberta") or self.answers.kind == "generated"

    def _with_own(self, prompt: Sequence[int]) -> AnswerModel:
        """For generated answers: the model with the continuations of a prompt as suffixes."""
        own = tuple(self.answers.tokens[i] for i in self.answers.own[tuple(prompt)])
        return AnswerModel(self.model, AnswerSet("suffixes", ("",) * len(own), own), self._share_prompt)

    @torch.no_grad()
    def sample(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Continuations of a prompt, as the config says; the same for the same prompt and seed.

        Args:
            prompt: Token ids.

        Returns:
            Token ids of the different ones among them.
        """
        # loaded late, because it takes a second
        from transformers import DynamicCache

        asked, tokenizer = self.answers.samples, self.model.tokenizer
        assert asked is not None
        generator = torch.Generator().manual_seed(_seed(asked.samples_seed, prompt))
        part, cache, steps = torch.tensor([list(prompt)] * asked.samples, device=self.model.device), DynamicCache(), []
        for _ in range(asked.max_tokens):
            place = torch.full((len(part), 1), part.shape[1] - 1, device=part.device)
            z = self._forward(part, place, None, past_key_values=cache)[:, 0].double().cpu()
            steps.append(torch.multinomial((z / asked.temperature).softmax(1), 1, generator=generator))
            part = steps[-1].to(part.device)
        return list(dict.fromkeys(_until_stop(ids, tokenizer, asked.stop) for ids in torch.cat(steps, 1).tolist()))

    def check_tree(self, prompt: Sequence[int]) -> None:
        """Compare a few suffixes behind a shared prompt with the same ones alone.

        A model may look at its tokens in a way that a mask and positions do not govern: a sliding window that is
        shorter than the prompt, or a state that runs through all tokens.

        Args:
            prompt: Token ids, best of the longest prompt.

        Raises:
            UserError: The log-probabilities differ by more than rounding.
        """
        if self.answers.kind == "generated":
            self._with_own(prompt).check_tree(prompt)
        if self.tree is None:
            return
        tokens = self.answers.tokens
        order = sorted(self.answers.own.get(tuple(prompt), range(len(tokens))), key=lambda i: -len(tokens[i]))
        chosen = sorted({*order[:3], max(order)})
        with torch.no_grad():
            shared = self.logits([prompt])[0][0, chosen]
            alone = AnswerModel(self.model, self.answers.only(chosen), share_prompt=False).logits([prompt])[0][0]
        error = float((shared - alone).abs().max() / alone.abs().max().clamp_min(1))
        if error > TREE_TOLERANCE[self.model.config.dtype]:
            raise UserError(
                f"With this model, suffixes that share a prompt of {len(prompt)} tokens score differently from "
                f"suffixes alone (relative difference {error:.1g}): does it have a sliding window or a recurrent "
                f"state? Use --no-share-prompt."
            )

    def sequences(self, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """What the network sees.

        Args:
            prompts: Token ids of B prompts.

        Returns:
            Number and length of the sequences.
        """
        if self.answers.kind == "generated":
            return self._with_own(prompts[0]).sequences(prompts)
        length = max(map(len, prompts))
        if self._separate:
            return len(prompts) * len(self.answers.tokens), length + self.answers.longest
        return len(prompts), length + self.extra_tokens

    def logits(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch of prompts.

        Args:
            prompts: Token ids of B prompts.

        Returns:
            Answer logits z [B, r], float32, and the places [B] of the prompts' last tokens.
        """
        if self.answers.kind == "generated":
            found = [self._with_own(prompt).logits([prompt]) for prompt in prompts]
            z = [F.pad(own, (0, self.count - own.shape[1]), value=NEVER) for own, _ in found]
            return torch.cat(z), torch.cat([place for _, place in found])
        if self._separate:
            scores, places = self._separate_suffixes(prompts)
            return self._with_possible(scores, prompts), places
        if self.answers.kind == "classes":
            return self._classes(prompts)
        if self.tree is not None:
            ids, mask, places = self._pad(prompts)
            return self._with_possible(self._suffix_tree(self.tree, ids, mask, places), prompts), places
        logits, places = self._next_token(prompts)
        return self._with_possible(self._chosen(logits), prompts), places

    def _with_possible(self, z: torch.Tensor, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Answer logits [B, r] in which those that a prompt does not have are impossible."""
        if not self.answers.own:
            return z
        possible = torch.zeros(z.shape, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            possible[row, list(self.answers.own.get(tuple(prompt), range(z.shape[1])))] = True
        return z.masked_fill(~possible.to(z.device), NEVER)

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """Answer logits [B, r], float32, of the logits [B, vocabulary] behind the prompts."""
        tokens = [token for (token,) in self.answers.tokens] if self.answers.kind == "tokens" else slice(None)
        return logits[:, tokens].float()

    def logits_after(
        self, prompts: Sequence[Sequence[int]], cache: Any, positions: Sequence[Sequence[int]], seen: Sequence[range]
    ) -> torch.Tensor:
        """Run the model on parts of prompts, the rest of which it has seen already. Not for suffixes.

        Args:
            prompts: Token ids of what is left of B prompts.
            cache: Keys and values of what was seen, as transformers keeps them, for B sequences; those of `prompts` are
                added.
            positions: Where in its prompt each of the tokens stands, ascending.
            seen: Positions of the cache that belong to each prompt; a token looks at those before its own.

        Returns:
            Answer logits z [B, r], float32.
        """
        ids, mask, places = self._pad(prompts)
        where, _, _ = self._pad(positions)
        width, device = ids.shape[1], ids.device
        if cache.get_seq_length():  # padded on the left, so that all end at one place and the head runs there alone
            shifted = (torch.arange(width, device=device) + places[:, None] + 1) % width
            ids, where, mask = (part.gather(1, shifted) for part in (ids, where, mask))
            places = torch.full_like(places, width - 1)
        cached = torch.arange(cache.get_seq_length(), device=device)
        first, last = torch.tensor([[own.start, own.stop] for own in seen], device=device).T[:, :, None, None]
        before = (cached >= first) & (cached < last) & (cached < where[:, :, None])
        own = torch.ones(width, width, dtype=torch.bool, device=device).tril() & mask[:, None, :]
        own = own | torch.eye(width, dtype=torch.bool, device=device)
        bias = self._bias(torch.cat([before, own], 2))
        return self._chosen(self._forward(ids, places[:, None], bias, position_ids=where, past_key_values=cache)[:, 0])

    def logits_along(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[Sequence[int]],
        start: Callable[[int, int, int, int], None],
    ) -> list[torch.Tensor]:
        """Run the model once on each of B prompts, and ask at several places of it. Not for suffixes and classes.

        The prompts are run a segment after another, each behind the keys and values of those before it. So a backward
        pass from a place goes through its own segment and those before, not through the rest of the prompt.

        Args:
            prompts: Token ids.
            places: Of each prompt, the tokens behind which it is asked, ascending.
            start: Called before each segment with B, B, its length and the tokens before it, as `Capture.start`.

        Returns:
            Answer logits z [B, r], float32, of the first place of every prompt, of the second, and so on. Prompts with
            fewer places repeat their last.
        """
        # loaded late, because it takes a second
        from transformers import DynamicCache

        ids, _, _ = self._pad(prompts)
        rounds = max(map(len, places))
        asked = torch.tensor([[*own, *own[-1:] * (rounds - len(own))] for own in map(list, places)])
        cache, found = DynamicCache(), []
        for begin in range(0, ids.shape[1], SEGMENT):
            part = ids[:, begin : begin + SEGMENT]
            here = torch.unique(asked[(asked >= begin) & (asked < begin + SEGMENT)])
            start(len(ids), len(part), part.shape[1], begin)
            # padding is on the right, so that what is causal needs no mask
            wanted = (here - begin).to(ids.device).expand(len(ids), -1)
            logits = self._forward(part, wanted, None, past_key_values=cache)
            found.append({place: self._chosen(logits[:, n]) for n, place in enumerate(here.tolist())})
        return [
            self._with_possible(
                torch.stack([found[place // SEGMENT][place][row] for row, place in enumerate(column)]),
                [prompt[: place + 1] for prompt, place in zip(prompts, column, strict=True)],
            )
            for column in asked.T.tolist()
        ]

    @torch.no_grad()
    def surprise(self, tokens: Sequence[int], places: Sequence[int]) -> tuple[list[float], list[float]]:
        """How hard tokens of a text are to predict from what stands before them.

        Args:
            tokens: Token ids of the text.
            places: Which of them, n; not the first one.

        Returns:
            Loss of each [n], and entropy of what may stand there [n], in nats.
        """
        ids, _, _ = self._pad([tokens])
        chosen = torch.tensor([places], device=ids.device)
        log_p = self._forward(ids, chosen - 1, None)[0].float().log_softmax(1)
        loss = -log_p.gather(1, ids[0, chosen[0], None])[:, 0]
        return loss.tolist(), (-(log_p.exp() * log_p).sum(1)).tolist()

    def goes_along(self, prompt: Sequence[int]) -> bool:
        """Whether `logits_along` gives the logits of a prompt alone: not every model has a cache that can do that.

        Args:
            prompt: Token ids.

        Returns:
            Whether it does, up to rounding.
        """
        if self.answers.kind not in ("tokens", "vocabulary"):
            return False
        try:
            with torch.no_grad():
                (along,) = self.logits_along([prompt], [[len(prompt) - 1]], lambda *_: None)
                alone = self.logits([prompt])[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # models without such a cache
            return False
        error = float((along - alone).abs().max() / alone.abs().max().clamp_min(1))
        return error < TREE_TOLERANCE[self.model.config.dtype]

    def _bias(self, seen: torch.Tensor) -> torch.Tensor:
        """What attention adds to its scores, [B, 1, T, S]: nothing where `seen` [B, T, S], or else the least number."""
        dtype = next(self.model.network.parameters()).dtype
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    @torch.no_grad()
    def ask(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model says, and whether it would have said it by itself.

        Args:
            prompts: Token ids of B prompts.

        Returns:
            Answer logits [B, r], and how much of the probability of all that may come next goes to the answers, [B].
        """
        tokens = self.answers.tokens
        if self.answers.kind == "classes":  # there is nothing else that it may say
            return self.logits(prompts)[0], torch.ones(len(prompts))
        if self.answers.kind not in ("suffixes", "generated"):
            z = self._next_token(prompts)[0].float()
            first = [ids[0] for ids in tokens] or slice(None)
            chosen = self._with_possible(z[:, first], prompts)
            return chosen, torch.where(chosen > NEVER, z.softmax(1)[:, first], 0).sum(1)
        z = self.logits(prompts)[0]
        if self.answers.kind == "generated":
            return z, z.exp().sum(1)
        # what goes on as another answer does is in that one's probability already
        alone = [not any(ids != other and ids[: len(other)] == other for other in tokens) for ids in tokens]
        return z, z.exp()[:, alone].sum(1)

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and mask [B, T], padded on the right, and where each prompt's last token is."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        # masked: any token will do
        ids = pad_sequence([torch.as_tensor(prompt) for prompt in prompts], batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        device = self.model.device
        return ids.to(device), mask.to(device), (lengths - 1).to(device)

    def _next_token(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, vocabulary] of what comes next, and the places [B] of the prompts' last tokens."""
        ids, mask, places = self._pad(prompts)
        return self._forward(ids, places[:, None], _unless_all(mask))[:, 0], places

    def _forward(
        self, ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Logits [B, n, vocabulary] at `places` [B, n]; the head runs only where some example needs it."""
        if self._keeps_logits:
            needed, places = torch.unique(places, return_inverse=True)
            options["logits_to_keep"] = needed
        with fetching_again(self.model.network):
            found = self.model.network(input_ids=ids, attention_mask=mask, use_cache=False, **options)
        logits: torch.Tensor = found.logits.to(places.device)
        return logits.gather(1, places[:, :, None].expand(-1, -1, logits.shape[2]))

    def _classes(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the classes, and the places of the tokens that decide: first ones, or last of causal models."""
        codes, mask, ends = self._pad(prompts)
        network: Any = self.model.network
        takes = inspect.signature(network.forward).parameters
        # where there are no types in the text, a model's own default is right, whatever it does with zeros
        typed = "token_type_ids" in takes and "token_type_ids" in self.model.tokenizer.model_input_names
        types = {"token_type_ids": codes // SECOND} if typed else {}
        # models find the last token, or positions, by what is no padding
        ids = torch.where(mask, codes % SECOND, network.config.get_text_config().pad_token_id or 0)
        with fetching_again(network):
            logits = network(input_ids=ids, attention_mask=_unless_all(mask), **types).logits
        places = ends if hasattr(network, "score") else torch.zeros_like(ends)
        return logits[:, [number for (number,) in self.answers.tokens]].float(), places

    def _suffix_tree(self, tree: TokenTree, ids: torch.Tensor, mask: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """All suffixes behind one run of the prompt: a node sees the prompt, its ancestors and itself."""
        batch, width = ids.shape
        device, whole = ids.device, width + len(tree.tokens)
        tokens = torch.tensor(tree.tokens, dtype=torch.int64, device=device)
        ancestors = tree.ancestors().to(device)
        ids = torch.cat([ids, tokens.expand(batch, -1)], 1)
        order = torch.arange(whole, device=device).expand(batch, -1)
        positions = torch.cat([order[:, :width], ends[:, None] + ancestors.sum(1)], 1)

        seen = torch.ones(whole, whole, dtype=torch.bool, device=device).tril()
        seen[width:, width:] = ancestors
        itself = torch.eye(whole, dtype=torch.bool, device=device)  # so does padding: no row is empty
        seen = seen & F.pad(mask, (0, len(tokens)), value=True)[:, None, :] | itself
        places = torch.cat([ends[:, None], order[:, width:]], 1)
        logits = self._forward(ids, places, self._bias(seen), position_ids=positions).float()
        steps = [(answer, node, token) for answer, path in enumerate(tree.paths) for node, token in path]
        answer, node, token = torch.tensor(steps, device=device).T
        chosen = logits[:, node, token] - logits.logsumexp(2)[:, node]
        return chosen.new_zeros(batch, len(tree.paths)).index_add(1, answer, chosen)

    def _separate_suffixes(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain way: every prompt once with every suffix."""
        answers = self.answers.tokens
        ids, mask, ends = self._pad([[*prompt, *suffix[:-1]] for prompt in prompts for suffix in answers])
        tokens, counts, lasts = (part.repeat(len(prompts), 1) for part in self._pad(answers))
        # the places that predict a suffix's tokens; short suffixes repeat their last place and do not count it
        steps = torch.arange(tokens.shape[1], device=ends.device)
        places = ends[:, None] - (lasts.view(-1, 1) - steps).clamp_min(0)
        logits = self._forward(ids, places, _unless_all(mask)).float().log_softmax(2)
        chosen = logits.gather(2, tokens[:, :, None])[:, :, 0]
        return (chosen * counts).sum(1).view(len(prompts), -1), places[:: len(answers), 0]


def _seed(seed: int, prompt: Sequence[int]) -> int:
    """A seed for each prompt, whatever others there are."""
    return int.from_bytes(random_bits(7, seed, *prompt).tobytes(), "big")


def _until_stop(ids: list[int], tokenizer: Any, stop: str) -> tuple[int, ...]:
    """A continuation up to the model's end of text or the token that completes `stop`, that one included."""
    for count, token in enumerate(ids, 1):
        if token == tokenizer.eos_token_id or (stop and stop in tokenizer.decode(ids[:count])):
            return tuple(ids[:count])
    return tuple(ids)


def _unless_all(mask: torch.Tensor) -> torch.Tensor | None:
    """The attention mask of a batch; None if nothing is padded, where models are faster without."""
    return None if bool(mask.all()) else mask.long()
