"""Asking a model behind an OpenAI-compatible chat endpoint, patiently where the server is busy."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any, NoReturn

from huggingface_hub import InferenceClient, get_session

from npeff.study.config import JudgeConfig
from npeff.utils.errors import UserError
from npeff.utils.text import shorten

PATH = "/chat/completions"
_ADDRESS = re.compile(
    r"(https?://(?:\[[\da-f:.]+\]|[^\s/?#@:\[\]]+)(?::\d{1,5})?)(/[^\s?#]*)?(\?[^\s#]*)?", re.IGNORECASE
)
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first retry, and before any, also where a server asks for more."""
_BUSY = (408, 409, 425, 429)
"""With all from 500, the HTTP errors that another try may not meet."""

Messages = list[dict[str, str]]


class Chat:
    """A model behind an endpoint. What it says in messages and errors never holds the API key."""

    def __init__(self, config: JudgeConfig) -> None:
        self.url = chat_url(config.endpoint)
        self._config, self._key = config, _read_key(config.key_env)
        # a header of None keeps the client from sending the user's token of the Hugging Face Hub to any server
        headers: Any = {"authorization": f"Bearer {self._key}" if self._key else None}
        self._client = InferenceClient(base_url=self.url, timeout=config.timeout, headers=headers)
        self._limit = "max_tokens"

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
                return self._ask_once(messages)
            except _BusyError as busy:
                tries += 1
                if tries > self._config.retries:
                    raise UserError(
                        f"{self.url} gave no answer in {tries} tries, the last time: {busy}. Answers so far are kept; "
                        "run the command again later and it continues."
                    ) from busy
                sleep(min(_LONGEST_WAIT, max(busy.after, wait * random.uniform(0.8, 1.2))))
                wait *= 2

    def _ask_once(self, messages: Messages) -> tuple[str, dict[str, int]]:
        config, output = self._config, None
        limit = {self._limit: config.max_tokens}
        try:
            with _direct_session():
                output = self._client.chat_completion(
                    messages, model=config.model, temperature=config.temperature, extra_body=limit
                )
            text, usage = output.choices[0].message.content or "", dict(output.usage or {})
            if not isinstance(text, str):
                raise TypeError("its content is no text")
            counted = ("prompt_tokens", "completion_tokens")
            return text, {name: usage[name] for name in counted if isinstance(usage.get(name), int)}
        except Exception as error:  # the client lets those of HTTP, of JSON and of odd replies through
            response = next((each.response for each in _chain(error) if hasattr(each, "response")), None)
            if response is not None and "max_completion_tokens" in response.text and self._limit == "max_tokens":
                self._limit = "max_completion_tokens"  # what newer models call it
                return self._ask_once(messages)
            self._explain(error, response, output)

    def _explain(self, error: Exception, response: Any, output: object) -> NoReturn:
        """Say why there is no reply."""
        if response is not None:
            status = response.status_code
            answer = f"{self.url} answers {status}: {self._safe(response.text)}"
            if status in _BUSY or status >= 500:
                seconds = response.headers.get("Retry-After", "")
                raise _BusyError(answer, float(seconds) if seconds.isdecimal() else 0.0) from error
            raise UserError(
                f"{answer}. Check --endpoint, --model, the API key (--key-env names its environment variable) and "
                "--temperature (None leaves it out)."
            ) from error
        if isinstance(error, ValueError | TypeError | LookupError | AttributeError | RecursionError):
            answer = self._safe(output or getattr(error, "doc", "") or "nothing, or a redirect, which is not followed")
            raise UserError(f"{self.url} is not an OpenAI-compatible chat endpoint; it answered: {answer}") from error
        reason = next((each for each in reversed(_chain(error)) if isinstance(each, OSError)), None)
        if reason is None or isinstance(reason, TimeoutError | ConnectionResetError | BrokenPipeError):
            raise _BusyError(f"{type(error).__name__} {self._safe(error)}") from error
        raise UserError(
            f"Cannot reach {self.url}: {self._safe(reason)}. Start the server, or correct --endpoint."
        ) from error

    def _safe(self, said: object) -> str:
        """What was said on one line, without the key: some servers repeat it in their messages."""
        text = str(said).replace(self._key, "***") if self._key else str(said)
        return shorten("".join(char if char.isprintable() else " " for char in text), 300)


class _BusyError(Exception):
    """Worth another try, after so many seconds."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


@contextmanager
def _direct_session() -> Iterator[None]:
    """Let the client talk to the endpoint and to nobody else.

    Its session is the one for the Hub: it follows redirects, which would take texts to wherever they point, and its
    hooks refuse every server, also one on this machine, where HF_HUB_OFFLINE is set.
    """
    session = get_session()
    usual = session.follow_redirects, session.event_hooks
    session.follow_redirects, session.event_hooks = False, {}
    try:
        yield
    finally:
        session.follow_redirects, session.event_hooks = usual


def _chain(error: BaseException | None) -> list[Any]:
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
