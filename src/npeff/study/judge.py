"""`npeff evalkit judge`: a language model answers the same groups, through any OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from npeff.study.answers import LONGEST, THEMES, Answer, Sheet, write_sheet
from npeff.study.chat import Chat
from npeff.study.config import JudgeConfig
from npeff.study.kit import Kit, read_key, read_kit
from npeff.study.score import save_labels
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_json, write_json

JUDGES = "judges"
_CHARACTERS_PER_TOKEN = 4
_REPLY_TOKENS = 15
"""A reply in the form that is asked for; a model that thinks aloud first takes more."""
FORM_OF_ANSWER = (
    "Answer in one line and write nothing else: yes, maybe or no; after yes or maybe a colon and the theme in a few "
    "words."
)
_ANSWER = re.compile(r"(yes|maybe|no)\s*(?:[:.,;\u2013\u2014-]+\s*(.*))?", re.IGNORECASE)


def judge(config: JudgeConfig) -> Path | None:
    """Ask about every group that has no answer yet; returns the file of answers, or None after a dry run."""
    kit = read_kit(config.kit)
    chat = Chat(
        config.endpoint,
        config.model,
        key=_key(config.key_env),
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        timeout=config.timeout,
        retries=config.retries,
        wait=config.wait,
    )
    folder = Path(config.kit) / JUDGES / file_name(config.model)
    requests = {group.number: messages_for(kit, group.texts) for group in kit.groups}
    journal = _Journal(folder, chat)
    waiting = [number for number, messages in requests.items() if journal.read(number, messages) is None]
    print(_estimate(requests, waiting))
    if config.dry_run:
        return None
    with only_one(folder):
        for number in tqdm(waiting, desc=f"Asking {config.model}", unit="group"):
            reply = chat.ask(requests[number])
            journal.write(number, requests[number], reply.text, reply.tokens)
    replies = {number: journal.read(number, messages) or "" for number, messages in requests.items()}
    parsed = {number: parse(reply) for number, reply in replies.items()}
    answers = {number: answer for number, answer in parsed.items() if answer is not None}
    sheet = Sheet(config.model[: LONGEST["who"]], answers, f"judge:{config.model}"[: LONGEST["source"]])
    path = Path(config.kit) / f"answers-judge-{file_name(config.model)}.json"
    unread = {str(number): replies[number] for number, answer in parsed.items() if answer is None}
    write_sheet(path, kit, sheet, unread=unread)
    if unread:
        print(
            f"{len(unread)} of {len(replies)} replies are not in the form that was asked for. They are kept as they "
            f"are in {path}, and count as not answered."
        )
    print(f"{len(answers)} answers in {path}; `npeff evalkit score {config.kit} {path}` counts them.")
    if config.save_labels is not None:
        saved = save_labels(config.save_labels, read_key(config.kit, kit), [sheet])
        print(f"{saved} new automatic labels in {config.save_labels}")
    return path


def messages_for(kit: Kit, texts: Sequence[str]) -> list[dict[str, str]]:
    """What a judge is told: the form's preamble, the worked samples as an earlier part of the talk, then the group.

    Without a system message, which not every model has.
    """
    messages = []
    opening = "\n\n".join([*kit.preamble, FORM_OF_ANSWER]) + "\n\n"
    for sample in kit.samples:
        messages.append({"role": "user", "content": opening + _listed(sample.texts)})
        said = f"{sample.theme}: {sample.words}" if sample.words else sample.theme
        messages.append({"role": "assistant", "content": said})
        opening = ""
    messages.append({"role": "user", "content": opening + _listed(texts)})
    return messages


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def parse(reply: str) -> Answer | None:
    """The answer in a reply; None where it is not in the form that was asked for. Nothing is guessed."""
    reply = re.sub(r"(?s)\A\s*<think>.*?</think>", "", reply).strip()
    line = reply.partition("\n")[0].replace("*", "").strip(" \"'`_")
    match = _ANSWER.fullmatch(line)
    if match is None:
        return None
    theme = next(theme for theme in THEMES if theme == match[1].lower())
    return Answer(theme, "" if theme == "no" else (match[2] or "").strip()[: LONGEST["words"]])


def file_name(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-") or "model"


class _Journal:
    """Replies on disk, a file each; one counts only for the very question, model and settings it was given to."""

    def __init__(self, folder: Path, chat: Chat) -> None:
        self._folder = folder
        self._settings = [chat.url, chat.model, chat.temperature, chat.max_tokens]

    def read(self, number: int, messages: list[dict[str, str]]) -> str | None:
        path = self._path(number)
        if not path.is_file():
            return None
        values = read_json(path)
        fits = isinstance(values, dict) and values.get("asked") == self._hash(messages) and "reply" in values
        return str(values["reply"]) if fits else None

    def write(self, number: int, messages: list[dict[str, str]], reply: str, tokens: dict[str, int]) -> None:
        url, model, temperature, max_tokens = self._settings
        settings = {"endpoint": url, "model": model, "temperature": temperature, "max_tokens": max_tokens}
        write_json(
            self._path(number),
            {"group": number, "asked": self._hash(messages), **settings, "tokens": tokens, "reply": reply},
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:03d}.json"

    def _hash(self, messages: list[dict[str, str]]) -> str:
        return hashlib.sha256(json.dumps([self._settings, messages]).encode()).hexdigest()


def _estimate(requests: dict[int, list[dict[str, str]]], waiting: list[int]) -> str:
    """What is still to be asked, in requests and tokens."""
    characters = sum(len(message["content"]) for number in waiting for message in requests[number])
    done = len(requests) - len(waiting)
    known = f", {done} answered already" if done else ""
    return (
        f"{len(waiting)} requests{known}: about {characters // _CHARACTERS_PER_TOKEN:,} tokens to the model and "
        f"{len(waiting) * _REPLY_TOKENS:,} back (more if it thinks aloud)"
    )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"The environment variable {variable} (--key-env) is not set or empty.")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"The environment variable {variable} (--key-env) does not hold an API key.")
    return key
