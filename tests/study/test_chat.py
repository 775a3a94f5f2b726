"""Addresses and waits of the client; tests/study/test_judge.py has it talk to servers that misbehave."""

from __future__ import annotations

import pytest

from npeff.study.config import JudgeConfig
from npeff.study.judge import Chat, chat_url
from npeff.utils.errors import UserError
from tests.study.server import say, send, serving

SECRET = "sk-very-secret-0123456789"


def test_waits_grow_and_follow_the_server(waits: list[float]) -> None:
    with serving(send(429, "", Retry_After="17"), send(429, "", Retry_After="soon"), send(503, ""), say("no")) as told:
        chat = Chat(JudgeConfig("kit", endpoint=told.url, model="m"))
        assert chat.ask([{"role": "user", "content": "?"}]) == ("no", {"prompt_tokens": 7, "completion_tokens": 2})
        assert waits[0] == 17
        assert 1.6 <= waits[1] <= 2.4
        assert 3.2 <= waits[2] <= 4.8
        told.requests.clear()
        told.actions = [send(429, "", Retry_After="100000")]
        with pytest.raises(UserError, match=r"3 tries"):
            Chat(JudgeConfig("kit", endpoint=told.url, model="m", retries=2)).ask([])
        assert waits[3:] == [60, 60]


def test_addresses() -> None:
    whole = "http://h:8000/v1/chat/completions"
    for given in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/", whole):
        assert chat_url(given) == whole
    assert chat_url("https://h/api/v3?x=1") == "https://h/api/v3/chat/completions?x=1"
    for wrong in ("", "localhost:8000", "ftp://h", "http://", "http://h:port", "file:///etc/passwd", "http://h/a b"):
        with pytest.raises(UserError, match="not an address"):
            chat_url(wrong)
    assert chat_url("http://[::1]:8000") == "http://[::1]:8000/v1/chat/completions"
    with pytest.raises(UserError, match="password does not belong there") as raised:
        chat_url(f"https://user:{SECRET}@h")
    assert SECRET not in str(raised.value)


def test_what_the_server_does_not_count_is_left_out() -> None:
    for usage in ("null", "{}", '{"prompt_tokens": null, "completion_tokens": 3}'):
        with serving(send(200, f'{{"choices": [{{"message": {{"content": null}}}}], "usage": {usage}}}')) as told:
            text, tokens = Chat(JudgeConfig("kit", endpoint=told.url, model="m")).ask([])
            assert (text, tokens) == ("", {"completion_tokens": 3} if "3" in usage else {})
