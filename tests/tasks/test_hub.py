"""A Hub that answers, one that does not, and the cache of its client."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import ModuleType

import huggingface_hub.constants
import pytest

from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.hub import hub_or_cache
from npeff.tasks.task import load_task
from npeff.utils.errors import UserError


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had asked to stay offline; and nothing listens at this endpoint."""
    for module in ("huggingface_hub.constants", "datasets.config"):
        pytest.importorskip(module)
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
def answering() -> Iterator[str]:
    """Address of a server that knows nothing, but answers."""

    class Nothing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Nothing)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def clients() -> list[ModuleType]:
    return [huggingface_hub.constants, sys.modules["datasets.config"]]


def test_without_an_answer_only_the_cache_is_used() -> None:
    with contextlib.suppress(ZeroDivisionError), hub_or_cache() as reason:
        assert "refused" in reason
        assert all(client.HF_HUB_OFFLINE for client in clients())
        raise ZeroDivisionError
    assert not any(client.HF_HUB_OFFLINE for client in clients())


def test_any_answer_will_do(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", answering)
    with hub_or_cache() as reason:
        assert reason == ""
        assert not any(client.HF_HUB_OFFLINE for client in clients())


def test_whoever_wants_to_be_offline_is_told_so(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", answering)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with hub_or_cache() as reason:
        assert "HF_HUB_OFFLINE" in reason
    assert huggingface_hub.constants.HF_HUB_OFFLINE


def test_data_that_cannot_be_reached_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"'stanfordnlp/sst2'.*the Hub cannot be reached.*local file") as error:
        load_dataset(load_task("sst2"), DataConfig())
    assert "\n" not in str(error.value)
    assert "Retry" not in "".join(capfd.readouterr())
