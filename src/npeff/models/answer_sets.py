"""Sets of answers: a task's labels as tokens, the vocabulary, or what a model has written behind each prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch

from npeff.models.config import SamplesConfig
from npeff.models.prompts import Prompts
from npeff.tasks.task import Task
from npeff.utils import Record, UserError


class TokenTree(Record):
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
        steps = [[(tuple(suffix[:depth]), token) for depth, token in enumerate(suffix)] for suffix in suffixes]
        begun = dict.fromkeys(before for path in steps for before, _ in path)  # the empty one comes first
        nodes = {before: node for node, before in enumerate(begun)}
        tokens, parents = [before[-1] for before in nodes if before], [nodes[before[:-1]] for before in nodes if before]
        paths = (tuple((nodes[before], token) for before, token in path) for path in steps)
        return TokenTree(tuple(tokens), tuple(parents), tuple(paths))

    def ancestors(self) -> torch.Tensor:
        """[nodes, nodes] without node 0: whether a node may look at another, itself included; so sums are depths."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent:
                seen[node] |= seen[parent - 1]
        return seen


class AnswerSet(Record):
    """The answers of a task in the tokens of a model."""

    kind: str
    """tokens, suffixes, vocabulary, classes or generated, as `answers` of a task."""
    names: Sequence[str]
    """What the answers are called; empty for the vocabulary. Of generated ones, a list of all that were written."""
    tokens: Sequence[tuple[int, ...]]
    """Token ids of each answer, the first one only where that is the answer; empty for the vocabulary. Of a class, its
    number."""
    samples: SamplesConfig | None = None
    """Generated only: how to sample."""
    own: dict[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    """Which answers a prompt has, where they are not the same for all; of generated ones, a range."""

    def only(self, chosen: list[int]) -> AnswerSet:
        """Some of the answers; the vocabulary is always whole."""
        if self.kind in ("vocabulary", "generated"):
            return self
        return AnswerSet(self.kind, tuple(self.names[i] for i in chosen), tuple(self.tokens[i] for i in chosen))

    @property
    def longest(self) -> int:
        """How many tokens an answer needs behind the prompt."""
        if self.samples is not None:
            return self.samples.max_tokens
        return max((len(ids) - 1 for ids in self.tokens), default=0) if self.kind == "suffixes" else 0

    def number(self, prompts: Sequence[Sequence[int]], chosen: torch.Tensor) -> torch.Tensor:
        """Answers by their place in `names`.

        Args:
            prompts: Token ids of B prompts.
            chosen: Which of its prompt's answers each is, [B, n].

        Returns:
            [B, n]; -1 where a prompt has not so many. All but generated answers have one number already.
        """
        if self.kind != "generated":
            return chosen
        own = [self.own[tuple(prompt)] for prompt in prompts]
        first = torch.tensor([[each[0]] for each in own], device=chosen.device)
        count = torch.tensor([[len(each)] for each in own], device=chosen.device)
        return torch.where(chosen < count, chosen + first, -1)

    def write(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]], tokenizer: Any) -> None:
        """Take continuations as the answers of a prompt.

        Args:
            prompt: Token ids.
            continuations: Token ids of each, all different.
            tokenizer: The model's, for their names.
        """
        names, tokens = self.names, self.tokens
        assert isinstance(names, list)
        assert isinstance(tokens, list)
        self.own[tuple(prompt)] = range(len(tokens), len(tokens) + len(continuations))
        tokens.extend(tuple(ids) for ids in continuations)
        names.extend(tokenizer.decode(list(ids)) for ids in continuations)


def resolve_answers(task: Task, tokenizer: Any, samples: SamplesConfig | None = None) -> AnswerSet:
    """Write a task's labels as tokens, as they stand behind the prompt: with a leading space where it has none.

    Args:
        task: What is asked.
        tokenizer: The model's.
        samples: How to sample answers that are generated.

    Returns:
        The answers, in the order of the labels.

    Raises:
        UserError: The tokenizer makes the same of two labels.
    """
    if task.answers == "vocabulary":
        return AnswerSet(task.answers, (), ())
    if task.answers == "generated":
        return AnswerSet(task.answers, [], [], samples or SamplesConfig())
    if task.answers == "classes":
        return AnswerSet(task.answers, task.labels, tuple((number,) for number in range(len(task.labels))))
    ending = task.places[0]["ask"] if task.places else task.prompt
    prompts, end = Prompts(task, tokenizer), ending.rsplit("}", 1)[-1] or ":"
    text = prompts.describe(task.before()) if task.is_chat else "x" + end
    (before,) = prompts.encode([text])
    tokens = []
    labels_of: dict[tuple[int, tuple[int, ...]], list[str]] = defaultdict(list)
    for label in task.labels:
        (ids,) = prompts.encode([f"{text}{prompts.gap}{label}"])
        if ids[: len(before)] != before or len(ids) == len(before):
            ids = before + list(tokenizer(f"{prompts.gap}{label}", add_special_tokens=False).input_ids)
        tokens.append(tuple(ids[len(before) :][: 1 if task.answers == "tokens" else None]))
    for number, group in enumerate([place["labels"] for place in task.places] or [task.labels]):
        for label in group:
            labels_of[number, tokens[task.labels.index(label)]].append(repr(label))
    same = "; ".join([" = ".join(labels) for labels in labels_of.values() if len(labels) > 1][:4])
    if same and task.answers == "tokens":
        hint = "Score whole labels instead: set `answers: suffixes` in the task."
        raise UserError(f"Labels of task {task.name!r} begin with the same token: {same}. {hint}")
    if same:
        raise UserError(f"Labels of task {task.name!r} are the same to the tokenizer: {same}.")
    return AnswerSet(task.answers, task.labels, tuple(tokens))
