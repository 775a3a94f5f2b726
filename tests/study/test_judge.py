"""The judge against `transformers serve` with a small model, and the client against servers that misbehave."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import get_session

from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.study.config import JudgeConfig, MakeConfig, ScoreConfig
from npeff.study.judge import Chat, judge, messages_for, parse
from npeff.study.kit import Answer, read_key, read_kit, read_sheet
from npeff.study.make import make
from npeff.study.score import score
from npeff.utils.configs import replace
from npeff.utils.errors import UserError
from tests import tiny
from tests.study.server import Told, break_off, hang_up, never_answer, say, send, serving

GROUPS = 4
SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def kit(run: Run, tmp_path: Path) -> Path:
    return make(MakeConfig(str(run.path), str(tmp_path / "kit"), ("npeff",), groups=GROUPS))


def config(kit: Path, told: Told, **options: Any) -> JudgeConfig:
    return JudgeConfig(str(kit), endpoint=told.url, model="org/a model", **options)


def test_every_group_is_asked_the_same_way_and_scored(
    kit: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(shutil.copytree(run.path, tmp_path / "run"))  # other tests use the same one
    replies = ["yes: numbers", "No.", "**Maybe**: about <films>", "I cannot tell."]
    with serving(*map(say, replies)) as told:
        path = judge(config(kit, told, save_themes=str(run.path)))
    assert path == kit / "answers-judge-org-a-model.json"
    shown = read_kit(kit)
    for group, request in zip(shown.groups, told.requests, strict=True):
        assert request["path"] == "/v1/chat/completions"
        body = request["body"]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("org/a model", 0.0, 1000)
        assert body["messages"] == messages_for(shown, group.texts)
        assert "authorization" not in request["headers"]
        talk = [message["content"] for message in body["messages"]]
        assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert all(text in talk[-1] for text in group.texts)
        assert all(text in talk[0] for text in (*shown.preamble, *shown.samples[0].texts))
        assert (talk[1], talk[3]) == ("yes: How to repair things that are broken.", "no")
    sheet = read_sheet(path, shown)
    assert sheet.answers == {1: Answer("yes", "numbers"), 2: Answer("no"), 3: Answer("maybe", "about <films>")}
    assert (sheet.source, sheet.automatic) == ("judge:org/a model", True)
    values = json.loads(path.read_text())
    assert values["unread"] == {"4": "I cannot tell."}
    out = capsys.readouterr().out
    assert "4 requests: about" in out
    assert "1 of 4 replies" in out
    assert score(ScoreConfig(str(kit), (str(path),)))
    assert "org/a model (automatic)" in capsys.readouterr().out
    themes = [
        entry.component
        for entry in read_key(kit, shown).groups
        if entry.component is not None and entry.number in (1, 3)
    ]
    for component in themes:
        assert any(a.source == "judge:org/a model" for a in Themes(run, "npeff").history(component))


def test_a_stopped_judge_continues(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(say("yes: a"), say("yes: b"), send(500, "out of order")) as told:
        with pytest.raises(UserError, match=r"3 tries.*500: out of order.*continues"):
            judge(config(kit, told, retries=2))
        assert len(told.requests) == 5
        assert not (kit / "answers-judge-org-a-model.json").exists()
        told.requests.clear()
        told.actions = [say("no")]
        assert judge(config(kit, told)) is not None
        assert len(told.requests) == 2
        assert "2 requests, 2 answered already" in capsys.readouterr().out
        before = len(told.requests)
        judge(config(kit, told))
        assert len(told.requests) == before  # all is known
        judge(config(kit, told, temperature=None))  # another question: asked again
        assert len(told.requests) == before + GROUPS
        assert "temperature" not in told.requests[-1]["body"]


@pytest.mark.parametrize(
    "trouble",
    [send(429, "{}", Retry_After="0"), send(503, "busy"), send(500, b"\xff\x00"), hang_up, break_off, never_answer],
)
def test_a_busy_server_is_asked_again(kit: Path, trouble: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with serving(trouble, trouble, say("yes: a")) as told:
        path = judge(config(kit, told, timeout=0.5))
        assert path is not None
        assert len(told.requests) == GROUPS + 2
    assert set(read_sheet(path, read_kit(kit)).answers) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (send(401, '{"error": {"message": "bad key"}}'), r"401: .*bad key.*the API key \(--key-env"),
        (
            send(404, '{"detail": "The model `m` does not exist"}'),
            "404: .*does not exist.*Check --endpoint, --model",
        ),
        (send(400, '{"error": "temperature is not supported"}'), r"--temperature \(None leaves it out\)"),
        (send(422, "\x1b[31mred\x1b[0m\n" + "x" * 9999), r"422: ?\[31mred.*…"),
        (send(302, "", Location="http://192.0.2.1/"), "a redirect, which is not followed"),
        (send(200, "<html>hello</html>"), "not an OpenAI-compatible chat endpoint; it answered: <html>hello"),
        (send(200, "{}"), "not an OpenAI-compatible"),
        (send(200, '{"choices": []}'), "not an OpenAI-compatible"),
        (send(200, '{"choices": [{"message": {"content": [1]}}]}'), "not an OpenAI-compatible"),
        (send(200, "[" * 100_000), "not an OpenAI-compatible"),
    ],
)
def test_what_no_retry_repairs_is_said_at_once(
    kit: Path, reply: Callable[[BaseHTTPRequestHandler], None], message: str
) -> None:
    with serving(reply) as told:
        with pytest.raises(UserError, match=re.compile(message, re.DOTALL)) as raised:
            judge(config(kit, told))
        assert len(told.requests) == 1
        assert str(raised.value).isprintable()


def test_newer_models_name_the_limit_differently(kit: Path) -> None:
    refusal = send(400, '{"error": {"message": "Use \'max_completion_tokens\' instead of \'max_tokens\'."}}')
    with serving(refusal, say("no")) as told:
        judge(config(kit, told, max_tokens=50))
        assert len(told.requests) == GROUPS + 1
        assert told.requests[-1]["body"]["max_completion_tokens"] == 50
        assert "max_tokens" not in told.requests[-1]["body"]


def test_nobody_listens(kit: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=r"Cannot reach .*/v1/chat/completions: .*Connection refused.*Start the server"):
        judge(JudgeConfig(str(kit), endpoint=address, model="m"))
    with pytest.raises(UserError, match="Cannot reach"):
        judge(JudgeConfig(str(kit), endpoint="http://no-such-host.invalid", model="m"))


def test_the_key_is_sent_and_never_kept(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving(say("no"), send(500, f"no such key: {SECRET}")) as told:
        with pytest.raises(UserError, match=r"no such key: \*\*\*") as raised:
            judge(config(kit, told, key_env="JUDGE_KEY", retries=1))
        told.requests.clear()
        told.actions = [send(401, json.dumps({"error": {"message": f"Bearer {SECRET} is wrong"}}))]
        with pytest.raises(UserError, match=r"Bearer \*\*\* is wrong") as refused:
            judge(config(kit, told, key_env="JUDGE_KEY"))
        assert told.requests[0]["headers"]["authorization"] == f"Bearer {SECRET}"
        told.actions = [say("no")]
        judge(config(kit, told, key_env="JUDGE_KEY"))
        assert SECRET not in repr(Chat(config(kit, told, key_env="JUDGE_KEY")))
    out, err = capfd.readouterr()
    assert SECRET not in out + err + str(raised.value) + str(refused.value)
    for path in kit.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    monkeypatch.setenv("JUDGE_KEY", "two\nlines")
    with pytest.raises(UserError, match="does not hold an API key"):
        judge(config(kit, told, key_env="JUDGE_KEY"))
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match=r"JUDGE_KEY.*not set"):
        judge(config(kit, told, key_env="JUDGE_KEY"))


def test_a_dry_run_asks_nothing(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(JudgeConfig(str(kit), endpoint="http://127.0.0.1:9", model="m", dry_run=True)) is None
    characters = sum(len(m["content"]) for g in read_kit(kit).groups for m in messages_for(read_kit(kit), g.texts))
    assert f"4 requests: about {characters // 4:,} tokens" in capsys.readouterr().out
    assert not (kit / "judges").exists()


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("yes: About films.", Answer("yes", "About films.")),
        ("  Maybe - sport", Answer("maybe", "sport")),
        ("**Yes:** a *theme*", Answer("yes", "a theme")),
        ("YES — dashes", Answer("yes", "dashes")),
        ("no", Answer("no")),
        ("No, they differ.", Answer("no")),
        ('"yes"', Answer("yes")),
        ("yes: a\nyes: b", Answer("yes", "a")),
        ("<think>no, or is it\nyes: x</think>\n\nmaybe: y", Answer("maybe", "y")),
        ("<think>no: never ends", None),
        ("", None),
        ("yesterday", None),
        ("Yes and no", None),
        ("The answer is yes: films", None),
        ("nothing: here", None),
    ],
)
def test_replies_are_read_not_guessed(reply: str, answer: Answer | None) -> None:
    assert parse(reply) == answer


def test_nobody_but_the_endpoint_is_told_anything(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a login at the Hugging Face Hub nor its offline mode reaches a server of one's own."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    session = get_session()
    usual = session.follow_redirects, session.event_hooks
    with serving(say("no")) as told, serving(say("yes: a")) as elsewhere:
        judge(config(kit, told))
        assert len(told.requests) == GROUPS
        assert not any(SECRET in str(request) for request in told.requests)
        told.actions = [send(307, "", Location=f"{elsewhere.url}/chat/completions")]
        with pytest.raises(UserError, match="a redirect, which is not followed"):
            judge(config(kit, told, temperature=1.0))
        assert not elsewhere.requests
    assert (session.follow_redirects, session.event_hooks) == usual


def test_wrong_options(kit: Path) -> None:
    good = JudgeConfig(str(kit), endpoint="http://h", model="m")
    for wrong in ({"model": " "}, {"max_tokens": 0}, {"timeout": 0.0}, {"retries": -1}):
        with pytest.raises(UserError):
            replace(good, **wrong)


# --- a real server with a real, if small, model -----------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}="
ANSWER = "yes: film"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose next token depends on the last one alone: after "=" it gives one answer, and ends."""
    tokenizer = tiny.tokenizer()
    network = tiny.network("llama")
    chain = tokenizer("=" + ANSWER)["input_ids"] + [tokenizer.eos_token_id]
    assert len(set(chain)) == len(chain)
    for layer in network.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(linear.weight)
            torch.nn.init.zeros_(linear.bias)
    torch.nn.init.ones_(network.model.norm.weight)
    torch.nn.init.zeros_(network.lm_head.weight)
    for last, following in pairwise(chain):
        network.lm_head.weight[following] = torch.nn.functional.normalize(
            network.model.embed_tokens.weight[last], dim=0
        )
    directory = tmp_path_factory.mktemp("chat")
    network.config.max_position_embeddings = 8192
    network.config.eos_token_id = network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.save_pretrained(directory)
    chatty = copy.deepcopy(tokenizer)  # other tests use the same one
    chatty.chat_template = TEMPLATE
    chatty.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", script, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = chat_model / "server.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            for _ in range(1200):
                assert process.poll() is None, log.read_text()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def test_transformers_serve(served: str, chat_model: Path, kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = judge(JudgeConfig(str(kit), endpoint=served, model=str(chat_model), max_tokens=20))
    assert path is not None
    sheet = read_sheet(path, read_kit(kit))
    assert sheet.answers == {n: Answer("yes", "film") for n in range(1, GROUPS + 1)}
    assert score(ScoreConfig(str(kit), (str(path),)))
    assert "| 100% (2 of 2) |" in capsys.readouterr().out
    reply = json.loads(next((kit / "judges").rglob("001.json")).read_text())
    assert reply["tokens"]["prompt_tokens"] > 100
    with pytest.raises(UserError):
        judge(JudgeConfig(str(kit), endpoint=served, model="no/such-model", retries=0))
