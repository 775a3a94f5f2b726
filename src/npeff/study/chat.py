"""A small client of OpenAI-compatible chat endpoints: standard library only, patient with servers that are busy."""

from __future__ import annotations

import http.client
import json
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message as Headers
from typing import IO, Any

from npeff.utils.errors import UserError
from npeff.utils.version import __version__

PATH = "/chat/completions"
_LONGEST_WAIT = 60.0
"""Seconds; a server that asks for more is asked again after these."""
_LARGEST = 4_000_000
"""Bytes of a reply that are read."""


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    text: str
    tokens: dict[str, int]
    """Counted by the server: prompt_tokens, completion_tokens; empty if it does not say."""


@dataclass
class Chat:
    """A model behind an endpoint."""

    endpoint: str
    """Base address such as http://localhost:8000/v1; /v1 and the path are added where they are missing."""
    model: str
    key: str | None = field(default=None, repr=False)
    temperature: float | None = 0.0
    max_tokens: int = 1000
    timeout: float = 120.0
    retries: int = 5
    wait: float = 1.0
    """Seconds before the first retry; each further one waits twice as long."""
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.url = chat_url(self.endpoint)
        # a redirect would take the key to wherever it points
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._limit = "max_tokens"

    def ask(self, messages: list[dict[str, str]]) -> Reply:
        """The model's reply; raises UserError when the endpoint cannot give one."""
        tries = 0
        while True:
            try:
                return self._once(messages)
            except _BusyError as busy:
                tries += 1
                if tries > self.retries:
                    raise UserError(
                        f"{self.url} gave no answer in {tries} tries, the last time: {busy.why}. Answers so far are "
                        "kept; run the command again later and it continues."
                    ) from busy
                waited = self.wait * 2 ** (tries - 1) * random.uniform(0.8, 1.2)
                self.sleep(min(_LONGEST_WAIT, max(waited, busy.after)))

    def _once(self, messages: list[dict[str, str]]) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            self._limit: self.max_tokens,
            "stream": False,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        headers = {"Content-Type": "application/json", "User-Agent": f"npeff/{__version__}"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                content = response.read(_LARGEST)
                if response.length:  # less came than was announced
                    raise http.client.IncompleteRead(content, response.length)
        except urllib.error.HTTPError as error:
            return self._refused(error, messages)
        except (TimeoutError, http.client.HTTPException, ConnectionResetError, BrokenPipeError) as error:
            raise _BusyError(self._safe(f"{type(error).__name__} {error}".strip())) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError | ConnectionResetError | BrokenPipeError):
                raise _BusyError(f"{type(error.reason).__name__}") from error
            raise UserError(self._unreachable(error.reason)) from error
        except OSError as error:
            raise UserError(self._unreachable(error)) from error
        return self._read(content)

    def _unreachable(self, reason: object) -> str:
        if isinstance(reason, ConnectionRefusedError):
            return f"Nothing listens at {self.url}. Start the server, or correct --endpoint."
        return self._safe(f"Cannot reach {self.url}: {reason}. Is --endpoint right, and the network there?")

    def _refused(self, error: urllib.error.HTTPError, messages: list[dict[str, str]]) -> Reply:
        """What an HTTP error means; asks again where only the name of an option was wrong."""
        with error:
            try:
                said = self._said(error.read(_LARGEST))
            except (OSError, http.client.HTTPException):
                said = ""
        what = f"{self.url} answers {error.code}{f': {said}' if said else ''}"
        if error.code in (408, 409, 425, 429) or error.code >= 500:
            raise _BusyError(self._safe(what), _seconds(error.headers)) from error
        if error.code == 400 and "max_completion_tokens" in said and self._limit == "max_tokens":
            self._limit = "max_completion_tokens"  # what newer models call it
            return self._once(messages)
        hint = ""
        if error.code in (401, 403):
            hint = " Put a valid API key into an environment variable and name it with --key-env."
        elif error.code == 404:
            hint = f" Is --endpoint right, and does it have the model {self.model!r}?"
        elif error.code == 400 and "temperature" in said:
            hint = " This model takes no temperature: add --temperature None."
        elif 300 <= error.code < 400:
            hint = " Give the address it points to as --endpoint; redirects are not followed."
        raise UserError(self._safe(what) + "." * (not what.endswith(".")) + hint) from error

    def _said(self, content: bytes) -> str:
        """The message in an error's body, in one line."""
        text = content.decode("utf-8", "replace")
        try:
            value = json.loads(text)
            while isinstance(value, dict):
                value = next((value[name] for name in ("error", "message", "detail") if name in value), text)
            text = str(value)
        except (ValueError, RecursionError):
            pass
        text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return text if len(text) <= 300 else text[:299] + "…"

    def _safe(self, text: str) -> str:
        """`text` without the key: some servers repeat it in their messages."""
        return text.replace(self.key, "***") if self.key else text

    def _read(self, content: bytes) -> Reply:
        try:
            value = json.loads(content)
            text = value["choices"][0]["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError("its content is no text")
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            start = self._safe(self._said(content))
            raise UserError(f"{self.url} is not an OpenAI-compatible chat endpoint; it answered: {start}") from error
        usage = value.get("usage") or {}
        counted = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        return Reply(text, {name: number for name, number in counted.items() if isinstance(number, int)})


def chat_url(endpoint: str) -> str:
    """Address of the chat completions of an endpoint."""
    try:
        parts = urllib.parse.urlsplit(endpoint.strip())
        parts.port  # noqa: B018 - raises if it is no number
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", endpoint.strip())
    except ValueError:
        fits = False
    if not fits:
        raise UserError(f"--endpoint {endpoint!r} is not an address; give one such as http://localhost:8000/v1.")
    if parts.username or parts.password:
        raise UserError("Leave the password out of --endpoint; put the key into an environment variable (--key-env).")
    path = parts.path.rstrip("/")
    if not path.endswith(PATH):
        path = (path or "/v1") + PATH
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


class _BusyError(Exception):
    """Worth another try, after so many seconds."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.why, self.after = why, after


def _seconds(headers: Headers) -> float:
    """How long a server asks to wait, if it says so in seconds."""
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None
