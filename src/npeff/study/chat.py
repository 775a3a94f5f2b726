"""Asking a model behind an OpenAI-compatible chat endpoint, patiently where the server is busy."""

from __future__ import annotations

import os
import random
import re
from time import sleep
from typing import Any

from huggingface_hub import get_session

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
