"""`npeff study judge`: a language model answers the same groups, through any OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from npeff.study.chat import Chat, Messages
from npeff.study.config import JudgeConfig
from npeff.study.kit import CHOICES, LONGEST, Answer, Kit, Sheet, read_key, read_kit, write_sheet
from npeff.study.score import save_themes
from npeff.utils.configs import read_record, write_record
from npeff.utils.files import only_one

JUDGES = "judges"
_CHARACTERS_PER_TOKEN = 4
_REPLY_TOKENS = 15
"""A reply in the form that is asked for; a model that thinks aloud first takes more."""
FORM_OF_ANSWER = (
    "Answer in one line and write nothing else: yes, maybe or no; after yes or maybe a colon and the theme in a few "
    "words."
)
_ANSWER = re.compile(r"(yes|maybe|no)\s*(?:[:.,;\u2013\u2014-]+\s*(.*))?", re.IGNORECASE)


@dataclass(frozen=True)
class JudgeReply:
    """A judge's reply on disk; it counts only for the very question, model and settings it was given to."""

    group: int
    """Number of the group."""
    asked: str
    """Hash of question, model and settings."""
    endpoint: str
    """Address that was asked."""
    model: str
    """Name of the model there."""
    temperature: float | None
    """As `npeff study judge --temperature`."""
    max_tokens: int
    """As `npeff study judge --max-tokens`."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens as the server counted them."""
    reply: str = ""
    """What the model said."""


def judge(config: JudgeConfig) -> Path | None:
    """Ask about every group that has no answer yet.

    Args:
        config: Options of the command.

    Returns:
        The file of answers, or None after a dry run.
    """
    kit, chat = read_kit(config.kit), Chat(config)
    folder = Path(config.kit) / JUDGES / file_name(config.model)
    requests = {group.number: messages_for(kit, group.texts) for group in kit.groups}
    questions = {number: _question(config, chat.url, number, messages) for number, messages in requests.items()}
    replies = {number: reply for number, asked in questions.items() if (reply := _kept(folder, asked)) is not None}
    waiting = [number for number in requests if number not in replies]
    print(_estimate(requests, waiting))
    if config.dry_run:
        return None
    with only_one(folder):
        for number in tqdm(waiting, desc=f"Asking {config.model}", unit="group", disable=None):
            text, tokens = chat.ask(requests[number])
            replies[number] = replace(questions[number], tokens=tokens, reply=text)
            write_record(_file(folder, number), replies[number])
    answers = {number: parse(replies[number].reply) for number in requests}
    unread = {number: replies[number].reply for number, answer in answers.items() if answer is None}
    read = {number: answer for number, answer in answers.items() if answer is not None}
    sheet = Sheet(config.model[: LONGEST["who"]], read, f"judge:{config.model}"[: LONGEST["source"]], unread)
    path = Path(config.kit) / f"answers-judge-{folder.name}.json"
    write_sheet(path, kit, sheet)
    if unread:
        print(
            f"{len(unread)} of {len(replies)} replies are not in the form that was asked for. They are kept as they "
            f"are in {path}, and count as not answered."
        )
    print(f"{len(read)} answers in {path}; `npeff study score {config.kit} {path}` counts them.")
    if config.save_themes is not None:
        saved = save_themes(config.save_themes, read_key(config.kit, kit), [sheet])
        print(f"{saved} new automatic themes in {config.save_themes}")
    return path


def messages_for(kit: Kit, texts: Sequence[str]) -> Messages:
    """What a judge is told: the form's preamble, the worked samples as an earlier part of the talk, then the group.

    There is no system message, which not every model knows.

    Args:
        kit: The kit.
        texts: Texts of the group.

    Returns:
        Messages in the form of the chat endpoint.
    """
    messages = []
    opening = "\n\n".join([*kit.preamble, FORM_OF_ANSWER]) + "\n\n"
    for sample in kit.samples:
        messages.append({"role": "user", "content": opening + _listed(sample.texts)})
        answer = f"{sample.theme}: {sample.words}" if sample.words else sample.theme
        messages.append({"role": "assistant", "content": answer})
        opening = ""
    return [*messages, {"role": "user", "content": opening + _listed(texts)}]


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def parse(reply: str) -> Answer | None:
    """Read a judge's reply; nothing is guessed.

    Args:
        reply: What the model said; what it thought aloud before is passed over.

    Returns:
        The answer; None where the reply is not in the form that was asked for.
    """
    reply = re.sub(r"(?s)\A\s*<think>.*?</think>", "", reply).strip()
    line = reply.partition("\n")[0].replace("*", "").strip(" \"'`_")
    match = _ANSWER.fullmatch(line)
    if match is None:
        return None
    choice = next(choice for choice in CHOICES if choice == match[1].lower())
    return Answer(choice, "" if choice == "no" else (match[2] or "").strip()[: LONGEST["words"]])


def file_name(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-") or "model"


def _question(config: JudgeConfig, url: str, number: int, messages: Messages) -> JudgeReply:
    """What is asked, without a reply yet."""
    settings = (url, config.model, config.temperature, config.max_tokens)
    asked = hashlib.sha256(json.dumps([settings, messages]).encode()).hexdigest()
    return JudgeReply(number, asked, *settings)


def _kept(folder: Path, question: JudgeReply) -> JudgeReply | None:
    """The reply that an earlier call got to the same question."""
    file = _file(folder, question.group)
    reply = read_record(JudgeReply, file) if file.is_file() else None
    return reply if reply is not None and reply.asked == question.asked else None


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:03d}.json"


def _estimate(requests: dict[int, Messages], waiting: list[int]) -> str:
    """What is still to be asked, in requests and tokens."""
    characters = sum(len(message["content"]) for number in waiting for message in requests[number])
    done = len(requests) - len(waiting)
    known = f", {done} answered already" if done else ""
    return (
        f"{len(waiting)} requests{known}: about {characters // _CHARACTERS_PER_TOKEN:,} tokens to the model and "
        f"{len(waiting) * _REPLY_TOKENS:,} back (more if it thinks aloud)"
    )
