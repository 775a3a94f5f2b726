"""Odd requests to a real server: an answer that makes sense or a closed connection, and the server goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npeff.store.run import Run
from tests.explore.openapi import OPENAPI
from tests.explore.serving import send, serving
from tests.faults import cases
from tests.faults.fuzzing import ODD_VALUES, many, mutated, no_hang, seeded
from tests.synthetic import add_decomposition, make_run

NAME = "npeff"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = make_run(tmp_path_factory.mktemp("served") / "run", [f"text {i}" for i in range(40)])
    add_decomposition(made, components=3, name=NAME)
    return made


@pytest.fixture(scope="module")
def port(run: Run) -> Iterator[int]:
    with serving(run) as number:
        yield number


METHODS = [
    *["GET", "GET", "GET", "HEAD", "POST", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"],
    "",
    "\x00",
    "A" * 300,
]
PATHS = [
    "/",
    "/index.html",
    "/data/run.js",
    "/served.js",
    "/api/state",
    "/api/history",
    "/api/theme",
    "/api/try",
    "/api/",
    "/api/x",
    "/../manifest.json",
    "/..%2f..%2fmanifest.json",
    "/%2e%2e/%2e%2e/x",
    "//etc/passwd",
    "/%00",
    "/%",
    "/%zz",
    "/\\..\\x",
    "/é",
    "*",
    "http://example.org/",
    "/data/../../x",
    "/api/state?decomposition=npeff",
    "/api/state?decomposition=%ff",
    "/api/state?decomposition=../npeff",
    "/api/history?decomposition=npeff&component=1",
    "/api/history?decomposition=npeff&component=-1",
    "/api/history?decomposition=npeff&component=%C2%B2",
    "/api/history?decomposition=npeff&component=99999999999999999999",
    "",
    "/" + "a" * 5000,
    "/?" + "&a=b" * 40,
]
HEADERS = [
    "Content-Type: application/json",
    "Content-Type: text/plain",
    "X-Npeff: 1",
    "Sec-Fetch-Site: same-origin",
    "Sec-Fetch-Site: cross-site",
    "Origin: http://example.org",
    "Origin: null",
    "Host: example.org",
    "Connection: close",
    "Transfer-Encoding: chunked",
    "Content-Length: -1",
    "Content-Length: 5",
    "Content-Length: 1e3",
    "Content-Length: 99999999999",
    "Expect: 100-continue",
    "Range: bytes=0-1",
    "Content-Encoding: gzip",
    "Upgrade: websocket",
    "no colon",
    ": empty",
    "X: " + "y" * 70_000,
]
BODY = json.dumps({"decomposition": NAME, "component": 1, "theme": "x", "note": "y"}).encode()


def odd_request(random: Random, port: int) -> bytes:
    lines = [f"{random.choice(METHODS)} {random.choice(PATHS)} HTTP/1.1"]
    if random.random() < 0.9:
        lines.append(f"Host: 127.0.0.1:{port}")
    lines += random.sample(HEADERS, random.choice((0, 1, 2, 3, 5)))
    body = BODY if random.random() < 0.5 else b""
    if body and random.random() < 0.8:
        lines.append(f"Content-Length: {len(body)}")
    content = "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
    return mutated(content, random) if random.random() < 0.4 else content


def answer_to(content: bytes, port: int) -> bytes:
    """All that comes back until the server or we close."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection, contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            found += part
    return found


def test_odd_requests(port: int, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    random = seeded()
    for _ in range(cases(1800, 8000)):
        content = odd_request(random, port)
        with no_hang():
            found = answer_to(content, port)
        if found.startswith(b"HTTP/1.1 "):
            status = int(found.split(None, 2)[1])
            assert status == 100 or 200 <= status < 600, content
            assert status != 500, (content, found[:500])
        assert b"Traceback" not in found
        assert str(run.path).encode() not in found
        assert b"root:" not in found
    assert send(port, "GET", f"/api/state?decomposition={NAME}")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


# --- by the server's own description -------------------------------------------------------------------------------


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a schema, and some that do not."""
    kind = schema.get("type")
    fitting: st.SearchStrategy[Any] = ODD_VALUES
    if kind == "object":
        parts = {name: values_of(part) for name, part in schema.get("properties", {}).items()}
        fitting = st.fixed_dictionaries({}, optional=parts) | st.fixed_dictionaries(parts)
    elif kind == "array":
        fitting = st.lists(values_of(schema["items"]), max_size=schema.get("maxItems", 3) + 1)
    elif kind == "string":
        fitting = st.sampled_from([NAME, "x", "x" * (schema.get("maxLength", 9) + 1)]) | st.text(max_size=20)
    elif kind == "integer":
        fitting = st.integers(-2, 5) | st.integers()
    return st.one_of(fitting, fitting, fitting, ODD_VALUES)


OPERATIONS = [
    (path, method, operation) for path, item in OPENAPI["paths"].items() for method, operation in item.items()
]


@many(cases(250, 3000))
@given(data=st.data())
def test_requests_by_the_description(port: int, data: st.DataObject) -> None:
    """Every answer is of a status that the description names, and is JSON."""
    path, method, operation = data.draw(st.sampled_from(OPERATIONS))
    body = b""
    headers = {"Host": f"127.0.0.1:{port}"}
    if method == "post":
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = json.dumps(data.draw(values_of(schema))).encode()
        headers |= {"Content-Type": "application/json", "X-Npeff": "1", "Content-Length": str(len(body))}
    else:
        from urllib.parse import urlencode

        names = [parameter["name"] for parameter in operation.get("parameters", ())]
        given_values = {name: data.draw(st.sampled_from([NAME, "1", "-1", "x", ""]) | st.text()) for name in names}
        given_values = {name: value.encode("utf-8", "replace") for name, value in given_values.items()}  # type: ignore[misc]
        path += "?" + urlencode(given_values) if data.draw(st.booleans()) or names else ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with no_hang():
        connection.request(method.upper(), path, body, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
    connection.close()
    assert str(answer.status) in operation["responses"], (path, body[:500], answer.status, found)
    assert answer.status != 500, (path, body[:500], found)


def test_slow_and_silent_clients_do_not_stop_the_others(port: int) -> None:
    """A hundred connections that send nothing, or half a request."""
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for number, connection in enumerate(idle):
        connection.sendall(b"POST /api/theme HTTP/1.1\r\nContent-Length: 50\r\n"[: number % 40])
    try:
        assert send(port, "GET", f"/api/state?decomposition={NAME}")[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_only_the_page_is_served(port: int, run: Run) -> None:
    secrets = [path.relative_to(run.path) for path in Path(run.path).rglob("*") if path.is_file()]
    secrets = [path for path in secrets if path.parts[0] != "site"]
    assert secrets
    for path in secrets:
        for way in (f"/{path}", f"/../{path}", f"/%2e%2e/{path}", f"/data/../../{path}", f"/..%2f{path}"):
            assert (
                answer_to(f"GET {way} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(), port).split()[1] == b"404"
            )
