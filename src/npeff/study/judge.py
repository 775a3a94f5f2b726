"""`npeff study judge`: a language model answers the same groups, through any OpenAI-compatible endpoint."""

import hashlib
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from time import sleep
from typing import Any

from huggingface_hub import get_session
from tqdm import tqdm

from npeff.study.config import EndpointConfig, JudgeConfig
from npeff.study.kit import CHOICES, LONGEST, Answer, Kit, Sheet, read_key, read_kit
from npeff.study.score import save_themes
from npeff.utils import Record, UserError, only_one, read_record, replace, shorten, write_record

JUDGES = "judges"
FILE = "{:03d}.json"
_CHARACTERS_PER_TOKEN = 4
_REPLY_TOKENS = 15
"""A reply in the form that is asked for; a model that thinks aloud first takes more."""
FORM_OF_ANSWER = (
    "Answer in one line and write nothing else: yes, maybe or no; after yes or maybe a colon and the theme in a few "
    "words."
)
_ANSWER = re.compile(r"(yes|maybe|no)\s*(?:[:.,;\u2013\u2014-]+\s*(.*))?", re.IGNORECASE)
PATH = "/chat/completions"
_ADDRESS = re.compile(r"(?i)(https?://(?:\[[\da-f:.]+\]|[^\s/?#@:\[\]]+)(?::\d{1,5})?)(/[^\s?#]*)?(\?[^\s#]*)?")
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first retry, and before any, also where a server asks for more."""
_BUSY = (408, 409, 425, 429)
"""With all from 500, the HTTP errors that another try may not meet."""
Messages = list[dict[str, str]]


class JudgeReply(Record):
    """A judge's reply on disk; it counts only for the very question, model and settings it was given to."""

    group: int
    """Number of the group, or question."""
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
    reply: str | None = None
    """What the model said; None before it was asked."""


def judge(config: JudgeConfig) -> Path | None:
    """Ask about every group that has no answer yet.

    Args:
        config: Options of the command.

    Returns:
        The file of answers, or None after a dry run.
    """
    kit = read_kit(config.kit)
    folder = Path(config.kit) / JUDGES / file_name(config.model)
    said = ask_all(config, folder, {group.number: messages_for(kit, group.texts) for group in kit.groups})
    if said is None:
        return None
    read = {number: answer for number, text in said.items() if (answer := parse(text)) is not None}
    unread = {number: text for number, text in said.items() if number not in read}
    sheet = Sheet(config.model[: LONGEST["who"]], read, f"judge:{config.model}"[: LONGEST["source"]], unread, kit.id)
    path = Path(config.kit) / f"answers-judge-{folder.name}.json"
    write_record(path, sheet)
    if unread:
        print(
            f"{len(unread)} of {len(said)} replies are not in the form that was asked for. They are kept as they "
            f"are in {path}, and count as not answered."
        )
    print(f"{len(read)} answers in {path}; `npeff study score {config.kit} {path}` counts them.")
    if config.save_themes is not None:
        saved = save_themes(config.save_themes, read_key(config.kit, kit), [sheet])
        print(f"{saved} new automatic themes in {config.save_themes}")
    return path


def ask_all(config: EndpointConfig, folder: Path, requests: dict[int, Messages]) -> dict[int, str] | None:
    """Ask what has no answer yet.

    Args:
        config: Whom to ask, and how.
        folder: Where replies are kept.
        requests: Number → question.

    Returns:
        Number → what the model said; None after a dry run.
    """
    chat = Chat(config)
    settings = (chat.url, config.model, config.temperature, config.max_tokens)
    replies = {number: _known(folder, number, settings, messages) for number, messages in requests.items()}
    waiting = [number for number, known in replies.items() if known.reply is None]
    print(_estimate(requests, waiting))
    if config.dry_run:
        return None
    with only_one(folder):
        for number in tqdm(waiting, desc=f"Asking {config.model}", unit="question", disable=None):
            text, tokens = chat.ask(requests[number])
            replies[number] = replace(replies[number], tokens=tokens, reply=text)
            write_record(folder / FILE.format(number), replies[number])
    return {number: known.reply or "" for number, known in replies.items()}


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
        messages.append({"role": "user", "content": opening + listed(sample.texts)})
        answer = f"{sample.theme}: {sample.words}" if sample.words else sample.theme
        messages.append({"role": "assistant", "content": answer})
        opening = ""
    return [*messages, {"role": "user", "content": opening + listed(texts)}]


def listed(texts: Sequence[str]) -> str:
    """Texts as a numbered list."""
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))


def parse(reply: str) -> Answer | None:
    """Read a judge's reply; nothing is guessed.

    Args:
        reply: What the model said; what it thought aloud before is passed over.

    Returns:
        The answer; None where the reply is not in the form that was asked for.
    """
    match = _ANSWER.fullmatch(first_line(reply))
    if match is None:
        return None
    choice = next(choice for choice in CHOICES if choice == match[1].lower())
    return Answer(choice, "" if choice == "no" else (match[2] or "").strip()[: LONGEST["words"]])


def first_line(reply: str) -> str:
    """The first line of a reply without marks of emphasis, and without what the model thought aloud before."""
    reply = re.sub(r"(?s)\A\s*<think>.*?</think>", "", reply).strip()
    return reply.partition("\n")[0].replace("*", "").strip(" \"'`_")


def file_name(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-") or "model"


def _known(folder: Path, number: int, settings: tuple[Any, ...], messages: Messages) -> JudgeReply:
    """The reply that an earlier call got to the same question; else the question, without a reply yet."""
    asked = hashlib.sha256(json.dumps([settings, messages]).encode()).hexdigest()
    file, question = folder / FILE.format(number), JudgeReply(number, asked, *settings)
    kept = read_record(JudgeReply, file) if file.is_file() else question
    return kept if kept.asked == asked else question


def _estimate(requests: dict[int, Messages], waiting: list[int]) -> str:
    """What is still to be asked, in requests and tokens."""
    characters = sum(len(message["content"]) for number in waiting for message in requests[number])
    done = len(requests) - len(waiting)
    known = f", {done} answered already" if done else ""
    return (
        f"{len(waiting)} requests{known}: about {characters // _CHARACTERS_PER_TOKEN:,} tokens to the model and "
        f"{len(waiting) * _REPLY_TOKENS:,} back (more if it thinks aloud)"
    )


# --- the endpoint: patient where the server is busy -------------------------------------------------------------------


class Chat:
    """A model behind an endpoint. What it says in messages and errors never holds the API key."""

    def __init__(self, config: EndpointConfig) -> None:
        self.url = chat_url(config.endpoint)
        self._config, self._key, self._limit = config, _read_key(config.key_env), "max_tokens"
        # A client of its own: the one for the Hub sends the user's token, follows redirects, which would take texts to
        # wherever they point, and refuses every server, also one on this machine, where HF_HUB_OFFLINE is set.
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = type(get_session())(timeout=config.timeout, headers=headers, follow_redirects=False)

    def ask(self, messages: Messages) -> tuple[str, dict[str, int]]:
        """Ask once, and again as long as the server is busy.

        Args:
            messages: The talk so far, in the form of the chat endpoint.

        Returns:
            The model's reply, and prompt_tokens and completion_tokens as far as the server has counted them.

        Raises:
            UserError: The endpoint cannot give one, or was busy too often.
        """
        wait, tries = _FIRST_WAIT, 0
        while True:
            try:
                return self._read(self._post(messages))
            except _BusyError as busy:
                (why, seconds), tries = busy.args, tries + 1
                if tries > self._config.retries:
                    raise UserError(
                        f"{self.url} gave no answer in {tries} tries, the last time: {why}. Answers so far are kept; "
                        "run the command again later and it continues."
                    ) from busy
                sleep(min(_LONGEST_WAIT, max(seconds, wait * random.uniform(0.8, 1.2))))
                wait *= 2

    def _post(self, messages: Messages) -> Any:
        """What the server answers to one request, if that is no error."""
        config = self._config
        settings = {"temperature": config.temperature} if config.temperature is not None else {}
        body = {"model": config.model, "messages": messages, self._limit: config.max_tokens, **settings}
        try:
            response = self._client.post(self.url, json=body)
        except Exception as error:  # which exceptions there are depends on the client
            reason = next((each for each in reversed(_chain(error)) if isinstance(each, OSError)), None)
            if reason is None or isinstance(reason, TimeoutError | ConnectionResetError | BrokenPipeError):
                raise _BusyError(f"{type(error).__name__} {self._safe(error)}", 0.0) from error
            raise UserError(
                f"Cannot reach {self.url}: {self._safe(reason)}. Start the server, or correct --endpoint."
            ) from error
        status, answer = response.status_code, f"{self.url} answers {response.status_code}: {self._safe(response.text)}"
        if status in _BUSY or status >= 500:
            seconds = response.headers.get("Retry-After", "")
            raise _BusyError(answer, float(seconds) if seconds.isdecimal() else 0.0)
        if status >= 400 and "max_completion_tokens" in response.text and self._limit == "max_tokens":
            self._limit = "max_completion_tokens"  # what newer models call it
            return self._post(messages)
        if status >= 400:
            raise UserError(
                f"{answer}. Check --endpoint, --model, the API key (--key-env names its environment variable) and "
                "--temperature (None leaves it out)."
            )
        return response

    def _read(self, response: Any) -> tuple[str, dict[str, int]]:
        """The reply, and the tokens that were counted."""
        try:
            output = response.json()
            text, usage = output["choices"][0]["message"]["content"] or "", dict(output.get("usage") or {})
            if not isinstance(text, str):
                raise TypeError("its content is no text")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            answer = self._safe(response.text or "nothing, or a redirect, which is not followed")
            raise UserError(f"{self.url} is not an OpenAI-compatible chat endpoint; it answered: {answer}") from error
        counted = ("prompt_tokens", "completion_tokens")
        return text, {name: usage[name] for name in counted if isinstance(usage.get(name), int)}

    def _safe(self, said: object) -> str:
        """What was said on one line, without the key: some servers repeat it in their messages."""
        text = str(said).replace(self._key, "***") if self._key else str(said)
        return shorten("".join(char if char.isprintable() else " " for char in text), 300)


class _BusyError(Exception):
    """Why there is no answer yet, and the seconds that the server asks to wait before another try."""


def _chain(error: BaseException | None) -> list[BaseException]:
    """An exception and those behind it, the outermost first."""
    return [] if error is None else [error, *_chain(error.__context__)]


def _read_key(variable: str | None) -> str | None:
    """The API key in an environment variable."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(f"The environment variable {variable} (--key-env) is not set, or does not hold an API key.")
    return key


def chat_url(endpoint: str) -> str:
    """Address of the chat completions of an endpoint.

    Args:
        endpoint: Base address such as http://localhost:8000/v1; /v1 and the path are added where they are missing.

    Returns:
        The whole address.

    Raises:
        UserError: This is no address, or there is a password in it.
    """
    match = _ADDRESS.fullmatch(endpoint.strip())
    if match is None:
        raise UserError(
            "--endpoint is not an address such as http://localhost:8000/v1. A key or password does not belong there: "
            "put it into an environment variable (--key-env)."
        )
    host, path, query = match[1], (match[2] or "").rstrip("/"), match[3] or ""
    return f"{host}{path if path.endswith(PATH) else (path or '/v1') + PATH}{query}"
