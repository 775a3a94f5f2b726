"""Predictions behind a context, by forward passes only; the context is read once, not once for every example."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from npeff.collect.session import Prepared
from npeff.models.answers import encode_all
from npeff.tasks.data import Dataset
from npeff.utils.errors import UserError
from npeff.utils.types import Array

TEXTS_AT_ONCE = 1024


class Predictor:
    """A run's model, asked with a context before every prompt."""

    def __init__(self, prepared: Prepared, batch_tokens: int | None = None) -> None:
        self._prepared = prepared
        self._model = prepared.collector.answer_model
        self._budget = batch_tokens or prepared.config.batch_tokens
        accepted = inspect.signature(prepared.model.network.forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        # suffixes bring an attention mask of their own, so they are read behind the whole context every time
        self.shares = prepared.answers.kind == "tokens" and "past_key_values" in accepted
        self._checked = False

    def predict(self, context: str, examples: pa.Table) -> Array:
        """The answer number of each example behind `context`, int64 [m]."""
        found = [
            self._predict(self._tokens(context, examples.slice(start, TEXTS_AT_ONCE)))
            for start in range(0, len(examples), TEXTS_AT_ONCE)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _tokens(self, context: str, examples: pa.Table) -> list[list[int]]:
        prompts = encode_all(self._prepared.model.tokenizer, Dataset(examples, context).prompts(self._prepared.task))
        room = self._prepared.model.context - self._prepared.answers.longest
        longest = max(map(len, prompts))
        if longest > room:
            raise UserError(
                f"With the context, a prompt has {longest} tokens, but the model takes {room}. Use fewer --shots, or a "
                f"model with a longer context."
            )
        return prompts

    @torch.inference_mode()
    def _predict(self, prompts: list[list[int]]) -> Array:
        found = np.empty(len(prompts), np.int64)
        shared = self._shared(prompts)
        cache = self._read(prompts[0][:shared]) if shared else None
        rest = [ids[shared:] for ids in prompts]
        for batch in self._prepared.collector.batches(rest, self._budget):
            chosen = [rest[i] for i in batch]
            if cache is None:
                z = self._model.logits(chosen)[0]
            else:
                z = self._behind(cache, shared, chosen)
                if not self._checked:
                    self._checked = True
                    if not self._agree(z, self._model.logits([prompts[i] for i in batch])[0]):
                        self.shares = False
                        return self._predict(prompts)
            found[batch] = z.argmax(1).cpu().numpy()
        return found

    def _shared(self, prompts: Sequence[list[int]]) -> int:
        """How many first tokens all prompts have in common, leaving one to each."""
        if not self.shares or len(prompts) < 2:
            return 0
        first, last = min(prompts), max(prompts)  # what these two have in common, all have
        same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        return min(same, min(map(len, prompts)) - 1)

    def _read(self, ids: list[int]) -> Any:
        """Keys and values of the first tokens."""
        tokens = torch.tensor([ids], device=self._prepared.model.device)
        options = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self._prepared.model.network(input_ids=tokens, use_cache=True, **options).past_key_values

    def _behind(self, cache: Any, shared: int, prompts: list[list[int]]) -> torch.Tensor:
        """Answer logits [B, r] of prompts whose first `shared` tokens are in the cache."""
        device = self._prepared.model.device
        lengths = torch.tensor([len(ids) for ids in prompts])
        width = int(lengths.max())
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in prompts])
        mask = torch.cat([torch.ones(len(prompts), shared), torch.arange(width) < lengths[:, None]], 1).long()
        places, options = lengths - 1, {}
        if self._keeps_logits:
            needed, places = torch.unique(places, return_inverse=True)
            options["logits_to_keep"] = needed.to(device)
        own = copy.deepcopy(cache)  # the forward pass adds to it
        own.batch_repeat_interleave(len(prompts))
        logits: torch.Tensor = self._prepared.model.network(
            input_ids=padded.to(device), attention_mask=mask.to(device), past_key_values=own, use_cache=True, **options
        ).logits
        answers = [token for (token,) in self._prepared.answers.tokens]
        return logits[torch.arange(len(prompts)), places][:, answers].float()

    def _agree(self, z: torch.Tensor, plain: torch.Tensor) -> bool:
        """Whether sharing the context gives what the whole prompt gives; some models keep no plain cache."""
        tolerance = 1e-3 if self._prepared.config.model.dtype == "float32" else 3e-2
        return bool((z.softmax(1) - plain.softmax(1)).abs().max() <= tolerance)
