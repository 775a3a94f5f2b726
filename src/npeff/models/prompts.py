"""How a task's examples are put to a model: as plain text, or through its chat template."""

import datetime
import re
from typing import Any

from npeff.tasks.data import Dataset
from npeff.tasks.task import Before, Task, Turns
from npeff.utils import UserError, first_line

TODAY = datetime.date(2025, 1, 1)
"""What templates that write a date are told: a run must not depend on the day on which it is made."""
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
SECOND = 2**32
"""Added to the id of a token that belongs to the second text of a pair."""
_ANSWER = "ANSWERSTANDSHERE"
"""Stands for an answer, to see how the template puts one: white space at its ends would not survive every template."""


class Prompts:
    """Writes a task's prompts for one tokenizer, up to where the answer begins."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        """Find out how the tokenizer's template begins an answer, if the task is a chat.

        Args:
            task: What is asked.
            tokenizer: The model's.

        Raises:
            UserError: The task is a chat, and there is no template, or it does not take the task's turns.
        """
        self._task, self._tokenizer, self._lead = task, tokenizer, ""
        if not task.is_chat:
            self.gap = task.gap
            return
        if not has_template(tokenizer):
            hint = "Use a model that was tuned for chat, or --no-chat, which asks with a plain prompt."
            raise UserError(f"Task {task.name!r} is a chat, but the model has no chat template. {hint}")
        question = (*task.before()[1], {"user": "x"})
        asked, answered = self._apply(question), self._apply((*question, {"assistant": _ANSWER}), generation=False)
        until_answer, found, _ = answered.rpartition(_ANSWER)
        if not found:
            raise UserError(f"The model's chat template does not show what an assistant says, so {_HINT}")
        # what some templates put behind their generation prompt before they put an answer, as an empty train of thought
        self._lead = until_answer.removeprefix(asked) if until_answer.startswith(asked) else ""
        self.gap = task.gap if task.answer_start else until_answer[len(until_answer.rstrip(" ")) :]

    def write(self, dataset: Dataset) -> list[str]:
        """All that the model sees of each example.

        Args:
            dataset: n examples.

        Returns:
            n texts.
        """
        return [self._write(prompt, dataset.turns) for prompt in dataset.prompts(self._task)]

    def describe(self, before: Before) -> str:
        """All that the model sees, with the columns of the prompt in braces."""
        return self._write(before[0] + self._task.prompt, before[1])

    def tokens(self, dataset: Dataset) -> list[list[int]]:
        """Token ids of each example.

        Args:
            dataset: n examples.

        Returns:
            n lists. A classifier's are as its tokenizer gives them, with closing tokens; a token of type 1, as the
            second text of a pair may have, has `SECOND` added to it.

        Raises:
            UserError: The examples are pairs, and the tokenizer puts nothing between two texts.
        """
        texts = self.write(dataset)
        if self._task.answers != "classes":
            return self.encode(texts)
        add = self._tokenizer.num_special_tokens_to_add
        if self._task.pair and add(pair=True) == add(pair=False):
            hint = f'Put both texts into the prompt instead: prompt: "{self._task.prompt} {self._task.pair}".'
            raise UserError(f"The model takes no pairs: its tokenizer puts nothing between two texts. {hint}")
        encoded = self._tokenizer(texts, dataset.pairs(self._task))
        types = encoded.get("token_type_ids") or [[0] * len(ids) for ids in encoded.input_ids]
        pairs = zip(encoded.input_ids, types, strict=True)
        return [[token + SECOND * kind for token, kind in zip(*each, strict=True)] for each in pairs]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that begin as prompts do. A template brings its own BOS, so none is added to a chat."""
        if not self._task.is_chat:
            return encode_all(self._tokenizer, texts)
        return [list(ids) for ids in self._tokenizer(texts, add_special_tokens=False).input_ids]

    def _write(self, prompt: str, turns: Turns) -> str:
        if not self._task.is_chat:
            return prompt
        text, start = self._apply((*turns, {"user": prompt})) + self._lead, self._task.answer_start
        return text + start if start else text.rstrip(" ")  # the space goes to the answer, as tokenizers split words

    def _apply(self, turns: Turns, generation: bool = True) -> str:
        messages = [{"role": role, "content": text} for turn in turns for role, text in turn.items()]
        options = {"tokenize": False, "add_generation_prompt": generation}
        try:
            template = _NOW.sub(lambda call: repr(TODAY.strftime(call[2])), self._tokenizer.get_chat_template())
            return str(self._tokenizer.apply_chat_template(messages, chat_template=template, **options))
        except Exception as error:  # whatever a template's author has thought of
            raise UserError(f"The model's chat template cannot be rendered: {first_line(error)}; {_HINT}") from error


_HINT = "change the task's turns (some templates take no system prompt), or ask without chat."


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer knows how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))


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
