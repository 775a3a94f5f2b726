"""Answers: from prompts to the logits of an example's answers, for each of the three kinds of answer sets."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from npeff.models.load import LoadedModel
from npeff.tasks.task import Task
from npeff.utils.errors import UserError

# of log-probabilities of suffixes, between two ways to compute them
TREE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


@dataclass(frozen=True)
class TokenTree:
    """Suffixes as a tree: nodes are the tokens that are followed by another one in some suffix.

    The last token of a suffix is only predicted, never read, so it is no node. Node 0 stands for the end of the prompt.
    """

    tokens: tuple[int, ...]
    """Token of each node but node 0."""
    parents: tuple[int, ...]
    """Parent node of each node but node 0; parents come before their children."""
    paths: tuple[tuple[tuple[int, int], ...], ...]
    """For each suffix, its (node, token predicted there) pairs."""

    @staticmethod
    def build(suffixes: Sequence[Sequence[int]]) -> TokenTree:
        """Make the tree that holds all suffixes.

        Args:
            suffixes: Token ids of each.

        Returns:
            The tree.
        """
        nodes: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents, paths = [], [], []
        for suffix in suffixes:
            path = []
            for depth, token in enumerate(suffix):
                before = tuple(suffix[:depth])
                if before not in nodes:
                    nodes[before] = len(nodes)
                    tokens.append(before[-1])
                    parents.append(nodes[before[:-1]])
                path.append((nodes[before], token))
            paths.append(tuple(path))
        return TokenTree(tuple(tokens), tuple(parents), tuple(paths))

    def depths(self) -> list[int]:
        """Distance of each node but node 0 from the end of the prompt."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]

    def ancestors(self) -> torch.Tensor:
        """[nodes, nodes] without node 0: whether a node may look at another, itself included."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent:
                seen[node] |= seen[parent - 1]
        return seen


@dataclass(frozen=True)
class AnswerSet:
    """The answers of a task in the tokens of a model."""

    kind: str
    """tokens, suffixes or vocabulary, as `answers` of a task."""
    names: tuple[str, ...]
    """What the answers are called; empty for the vocabulary."""
    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each answer, the first one only where that is the answer; empty for the vocabulary."""

    def only(self, chosen: list[int]) -> AnswerSet:
        """Some of the answers; the vocabulary is always whole."""
        if self.kind == "vocabulary":
            return self
        return AnswerSet(self.kind, tuple(self.names[i] for i in chosen), tuple(self.tokens[i] for i in chosen))

    @property
    def longest(self) -> int:
        """How many tokens an answer needs behind the prompt."""
        return max((len(ids) - 1 for ids in self.tokens), default=0) if self.kind == "suffixes" else 0


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the model expects them: with BOS if it was trained with one, without a closing token."""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """`encode` of many texts at once, which is several times faster."""
    tokens = [list(ids) for ids in tokenizer(texts).input_ids]
    for ids, text in zip(tokens, texts, strict=True):
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
            ids.pop()
    return tokens


def resolve_answers(task: Task, tokenizer: Any) -> AnswerSet:
    """Write a task's labels as tokens, as they stand behind the prompt: with a leading space.

    Args:
        task: What is asked.
        tokenizer: The model's.

    Returns:
        The answers, in the order of the labels.

    Raises:
        UserError: The tokenizer makes the same of two labels.
    """
    if task.answers == "vocabulary":
        return AnswerSet(task.answers, (), ())
    end = task.prompt.rsplit("}", 1)[-1] or ":"
    before = encode(tokenizer, "x" + end)
    suffixes = []
    for label in task.labels:
        ids = encode(tokenizer, f"x{end} {label}")
        if ids[: len(before)] != before or len(ids) == len(before):
            ids = before + list(tokenizer(f" {label}", add_special_tokens=False).input_ids)
        suffixes.append(tuple(ids[len(before) :]))
    tokens = [ids[:1] if task.answers == "tokens" else ids for ids in suffixes]
    same = [
        " = ".join(repr(label) for label, other in zip(task.labels, tokens, strict=True) if other == ids)
        for ids, count in Counter(tokens).items()
        if count > 1
    ]
    if same and task.answers == "tokens":
        raise UserError(
            f"Labels of task {task.name!r} begin with the same token: {'; '.join(same[:4])}. "
            f"Score whole labels instead: set `answers: suffixes` in the task."
        )
    if same:
        raise UserError(f"Labels of task {task.name!r} are the same to the tokenizer: {'; '.join(same[:4])}.")
    return AnswerSet(task.answers, task.labels, tuple(tokens))


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
        self.model = model
        self.answers = answers
        self.share_prompt = share_prompt
        self.tree = TokenTree.build(answers.tokens) if answers.kind == "suffixes" else None
        accepted = inspect.signature(model.network.forward).parameters
        self._keeps_logits = "logits_to_keep" in accepted
        if self.tree is not None and share_prompt and "position_ids" not in accepted:
            raise UserError(
                "This model takes no position ids, so suffixes cannot share a prompt. Use --no-share-prompt."
            )

    @property
    def count(self) -> int:
        """Number r of answers."""
        settings: Any = self.model.network.config
        return len(self.answers.tokens) or int(settings.get_text_config().vocab_size)

    @property
    def extra_tokens(self) -> int:
        """Tokens that an example needs beside its prompt."""
        return len(self.tree.tokens) if self.tree is not None and self.share_prompt else 0

    def check_tree(self, prompt: Sequence[int]) -> None:
        """Compare a few suffixes behind a shared prompt with the same ones alone.

        A model may look at its tokens in a way that a mask and positions do not govern: a sliding window that is
        shorter than the prompt, or a state that runs through all tokens.

        Args:
            prompt: Token ids, best of the longest prompt.

        Raises:
            UserError: The log-probabilities differ by more than rounding.
        """
        if self.tree is None or not self.share_prompt:
            return
        tokens = self.answers.tokens
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
        chosen = sorted({*order[:3], len(tokens) - 1})
        few = AnswerSet(self.answers.kind, (), tuple(tokens[i] for i in chosen))
        with torch.no_grad():
            shared = self.logits([prompt])[0][0, chosen]
            alone = AnswerModel(self.model, few, share_prompt=False).logits([prompt])[0][0]
        error = float((shared - alone).abs().max() / alone.abs().max().clamp_min(1))
        if error > TREE_TOLERANCE[self.model.config.dtype]:
            raise UserError(
                f"With this model, suffixes that share a prompt of {len(prompt)} tokens score differently from "
                f"suffixes alone (relative difference {error:.1g}): does it have a sliding window or a recurrent "
                f"state? Use --no-share-prompt."
            )

    def sequences(self, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """(batch, tokens) that the network sees for these prompts."""
        length = max(map(len, prompts))
        if self.tree is not None and not self.share_prompt:
            return len(prompts) * len(self.answers.tokens), length + self.answers.longest
        return len(prompts), length + self.extra_tokens

    def logits(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch of prompts.

        Args:
            prompts: Token ids of B prompts.

        Returns:
            Answer logits z [B, r], float32, and the places [B] of the prompts' last tokens.
        """
        if self.tree is not None and not self.share_prompt:
            return self._separate_suffixes(prompts)
        ids, mask, places = self._pad(prompts)
        if self.tree is None:
            logits = self._forward(ids, places[:, None], _unless_all(mask))[:, 0]
            if self.answers.kind == "vocabulary":
                return logits.float(), places
            return logits[:, [token for (token,) in self.answers.tokens]].float(), places
        return self._suffix_tree(ids, mask, places), places

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and mask [B, T], padded on the right, and where each prompt's last token is."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = pad_sequence(
            [torch.as_tensor(prompt) for prompt in prompts], batch_first=True
        )  # masked: any token will do
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        device = self.model.device
        return ids.to(device), mask.to(device), (lengths - 1).to(device)

    def _forward(
        self, ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None, **options: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, n, vocabulary] at `places` [B, n]; the head runs only where some example needs it."""
        if self._keeps_logits:
            needed, places = torch.unique(places, return_inverse=True)
            options["logits_to_keep"] = needed
        logits: torch.Tensor = self.model.network(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        return logits.gather(1, places[:, :, None].expand(-1, -1, logits.shape[2]))

    def _suffix_tree(self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """All suffixes behind one run of the prompt: a node sees the prompt, its ancestors and itself."""
        assert self.tree is not None
        batch, width = ids.shape
        device, nodes = ids.device, len(self.tree.tokens)
        tokens = torch.tensor(self.tree.tokens, dtype=torch.int64, device=device)
        ids = torch.cat([ids, tokens.expand(batch, -1)], 1)
        prompt_positions = (mask.cumsum(1) - 1).clamp_min(0)
        depths = torch.tensor(self.tree.depths(), dtype=torch.int64, device=device)
        positions = torch.cat([prompt_positions, mask.sum(1, keepdim=True) - 1 + depths], 1)

        seen = torch.zeros(batch, width + nodes, width + nodes, dtype=torch.bool, device=device)
        seen[:, :width, :width] = torch.ones(width, width, dtype=torch.bool, device=device).tril() & mask[:, None, :]
        seen[:, width:, :width] = mask[:, None, :]
        seen[:, width:, width:] = self.tree.ancestors().to(device)
        seen |= torch.eye(width + nodes, dtype=torch.bool, device=device)  # padding sees itself: no row is empty
        dtype = next(self.model.network.parameters()).dtype
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)

        node_places = torch.arange(width, width + nodes, device=device).expand(batch, -1)
        everywhere = torch.cat([places[:, None], node_places], 1)
        logits = self._forward(ids, everywhere, bias[:, None], position_ids=positions)
        return self._sum_paths(logits)

    def _sum_paths(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probability of each suffix [B, r] from the logits at all nodes [B, nodes + 1, vocabulary]."""
        assert self.tree is not None
        steps = [(answer, node, token) for answer, path in enumerate(self.tree.paths) for node, token in path]
        answer, node, token = torch.tensor(steps, device=logits.device).T
        logits = logits.float()
        chosen = logits[:, node, token] - logits.logsumexp(2)[:, node]
        z = chosen.new_zeros(len(logits), len(self.tree.paths))
        return z.index_add(1, answer, chosen)

    def _separate_suffixes(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain way: every prompt once with every suffix."""
        answers = self.answers.tokens
        whole = [[*prompt, *suffix[:-1]] for prompt in prompts for suffix in answers]
        ids, mask, ends = self._pad(whole)
        lengths = [len(suffix) for _ in prompts for suffix in answers]
        longest = max(lengths)
        # the places that predict a suffix's tokens; short suffixes repeat their last place and do not count it
        back = torch.tensor([[max(length - 1 - step, 0) for step in range(longest)] for length in lengths])
        tokens = torch.tensor([[*suffix, *[0] * (longest - len(suffix))] for _ in prompts for suffix in answers])
        counts = torch.tensor([[step < length for step in range(longest)] for length in lengths])
        places = ends[:, None] - back.to(ends.device)
        logits = self._forward(ids, places, _unless_all(mask)).float().log_softmax(2)
        chosen = logits.gather(2, tokens.to(logits.device)[:, :, None])[:, :, 0]
        z = (chosen * counts.to(chosen.device)).sum(1).view(len(prompts), len(answers))
        return z, places[:: len(answers), 0]


def _unless_all(mask: torch.Tensor) -> torch.Tensor | None:
    """The attention mask of a batch; None if nothing is padded, where models are faster without."""
    return None if bool(mask.all()) else mask.long()
