"""What the page asks of its server, over real HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npeff.decompose.run import open_decomposition
from npeff.explore.themes import Themes
from npeff.store.run import Run
from tests import tiny
from tests.explore.openapi import OPENAPI
from tests.explore.serving import NAME, collect_tiny, post, send, serving, try_texts
from tests.synthetic import add_decomposition, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=4, name="first")
    add_decomposition(run, "clusters", 3, name="a b#c&d=é")
    return run


@pytest.fixture(scope="module")
def lasting_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("lasting") / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=4, name="first")
    return run


@pytest.fixture(scope="module")
def lasting_port(lasting_run: Run) -> Iterator[int]:
    with serving(lasting_run) as port:
        yield port


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, review_file: Path) -> Run:
    return collect_tiny(tmp_path_factory.mktemp("tiny") / "run", model_directory, review_file)


def give_theme(port: int, component: Any, text: Any, **more: Any) -> tuple[int, Any]:
    return post(port, "/api/theme", {"decomposition": "first", "component": component, "theme": text, **more})


# --- themes and notes ---------------------------------------------------------------------------------------------


def test_a_theme_is_taken_shown_and_kept(run: Run) -> None:
    with serving(run) as port:
        status, state = send(port, "GET", "/api/state?decomposition=first")
        assert (status, state["themes"], state["model"]["state"]) == (200, [], "not loaded")
        assert state["user"]
        status, added = give_theme(port, 2, "sports", note="<b>bold</b>", who="Ada")
        assert (status, added["theme"], added["who"], added["source"]) == (200, "sports", "Ada", "person")
        give_theme(port, 2, "football")
        assert give_theme(port, 0, "to be removed")[0] == 200
        assert give_theme(port, 0, "", note="")[0] == 200
        name = "a%20b%23c%26d%3D%C3%A9"
        odd = {"decomposition": "a b#c&d=é", "component": 1, "theme": "odd"}
        assert post(port, "/api/theme", odd)[0] == 200
        assert send(port, "GET", f"/api/state?decomposition={name}")[1]["themes"][0]["theme"] == "odd"
    with serving(run) as port:
        (only,) = send(port, "GET", "/api/state?decomposition=first")[1]["themes"]
        assert (only["component"], only["theme"], only["note"]) == (2, "football", "")
        status, history = send(port, "GET", "/api/history?decomposition=first&component=2")
        assert [old["theme"] for old in history] == ["sports", "football"]
    assert [a.theme for a in Themes(run, "first").history(0)] == ["to be removed", ""]


def test_a_decomposition_that_was_made_anew(run: Run) -> None:
    with serving(run) as port:
        add_decomposition(run, components=5, name="first")
        status, answer = give_theme(port, 1, "x")
        assert status == 409
        assert "replaced" in answer["error"]
        assert post(port, "/api/try", {"decomposition": "first", "texts": ["x"]})[0] == 409
    assert Themes(run, "first").current() == {}


def test_a_damaged_journal_is_named(run: Run) -> None:
    with serving(run) as port:
        give_theme(port, 1, "x")
        journal = Themes(run, "first").path
        journal.write_bytes(b"{\n")
        status, answer = send(port, "GET", "/api/state?decomposition=first")
        assert status == 500
        assert "first.jsonl, line 1 is damaged" in answer["error"]


# --- who and what is refused --------------------------------------------------------------------------------------

GOOD = json.dumps({"decomposition": "first", "component": 0, "theme": "x"}).encode()
JSON = {"Content_Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 403),  # neither from our page nor on purpose
        (JSON | {"Sec_Fetch_Site": "cross-site", "X_Npeff": "1"}, 403),
        (JSON | {"Sec_Fetch_Site": "same-site", "X_Npeff": "1"}, 403),
        (JSON | {"Sec_Fetch_Site": "none"}, 403),
        (JSON | {"Origin": "http://evil.example", "X_Npeff": "1"}, 403),
        (JSON | {"Origin": "null", "Sec_Fetch_Site": "same-origin"}, 403),
        (JSON | {"Host": "evil.example", "X_Npeff": "1"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document", "Content_Type": "text/plain"}, 403),
        ({"X_Npeff": "1"}, 415),
        ({"X_Npeff": "1", "Content_Type": "text/plain"}, 415),
        ({"X_Npeff": "1", "Content_Type": "application/x-www-form-urlencoded"}, 415),
        (JSON | {"X_Npeff": "1", "Content_Length": ""}, 411),
        (JSON | {"X_Npeff": "1", "Content_Length": "-5"}, 411),
        (JSON | {"X_Npeff": "1", "Content_Length": "five"}, 411),
        (JSON | {"X_Npeff": "1", "Content_Length": "99999999999999999999"}, 413),
        (JSON | {"X_Npeff": "1"}, 200),
        (JSON | {"Sec_Fetch_Site": "same-origin"}, 200),
        ({"X_Npeff": "1", "Content_Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_only_our_page_may_write(lasting_port: int, headers: dict[str, str], status: int) -> None:
    found, answer = send(lasting_port, "POST", "/api/theme", GOOD, **headers)
    assert found == status
    assert ("error" in answer) == (status != 200)


def test_requests_have_a_limit(lasting_port: int) -> None:
    body = json.dumps({"decomposition": "first", "component": 0, "theme": "x", "note": "n" * 70_000}).encode()
    status, answer = send(lasting_port, "POST", "/api/theme", body, X_Npeff="1", **JSON)
    assert status == 413
    assert "65536" in answer["error"]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ([], 400),
        ({}, 400),
        ({"decomposition": "first", "component": 0}, 400),
        ({"decomposition": "first", "component": "0", "theme": "x"}, 400),
        ({"decomposition": "first", "component": True, "theme": "x"}, 400),
        ({"decomposition": "first", "component": 0.5, "theme": "x"}, 400),
        ({"decomposition": "first", "component": -1, "theme": "x"}, 400),
        ({"decomposition": "first", "component": 0, "theme": None}, 400),
        ({"decomposition": "first", "component": 0, "theme": "x", "source": "judge:me"}, 400),
        ({"decomposition": "first", "component": 0, "theme": "x" * 201}, 400),
        ({"decomposition": "first", "component": 0, "theme": "x", "note": "n" * 10_001}, 400),
        ({"decomposition": "first", "component": 0, "theme": "\ud800"}, 400),
        ({"decomposition": "first", "component": 4, "theme": "x"}, 404),
        ({"decomposition": "../first", "component": 0, "theme": "x"}, 404),
        ({"decomposition": "", "component": 0, "theme": "x"}, 400),
        ({"decomposition": "first", "component": 0.0, "theme": "x"}, 200),
        ({"decomposition": "first", "component": 0, "theme": "x" * 200, "note": "é" * 10_000}, 200),
    ],
)
def test_what_a_theme_may_be(lasting_port: int, value: Any, status: int) -> None:
    found, answer = post(lasting_port, "/api/theme", value)
    assert found == status
    assert ("error" in answer) == (status != 200)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 60_000, b"NaN", b'{"a":1}garbage', b"9" * 6000, b'"\\ud800"']
)
def test_what_is_no_json(lasting_port: int, body: bytes) -> None:
    headers = JSON | {"X_Npeff": "1", "Content_Length": str(len(body))}
    status, answer = send(lasting_port, "POST", "/api/theme", body, **headers)
    assert status == 400
    assert "error" in answer


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"decomposition": "first", "texts": []}, 400),
        ({"decomposition": "first", "texts": [""]}, 400),
        ({"decomposition": "first", "texts": ["x"] * 9}, 400),
        ({"decomposition": "first", "texts": "x"}, 400),
        ({"decomposition": "first", "texts": ["x" * 20_001]}, 400),
        ({"decomposition": "first", "texts": [1]}, 400),
        ({"decomposition": "absent", "texts": ["x"]}, 404),
    ],
)
def test_what_may_be_tried(lasting_port: int, value: Any, status: int) -> None:
    assert post(lasting_port, "/api/try", value)[0] == status


def test_other_paths_methods_and_queries(lasting_port: int) -> None:
    assert send(lasting_port, "GET", "/api/absent")[0] == 404
    assert send(lasting_port, "GET", "/api/")[0] == 404
    assert send(lasting_port, "GET", "/api/theme")[0] == 405
    assert post(lasting_port, "/api/state?decomposition=first", {})[0] == 405
    assert send(lasting_port, "PUT", "/api/theme")[0] == 501
    assert send(lasting_port, "HEAD", "/api/state?decomposition=first") == (200, None)
    for query in ("", "?decomposition=", "?decomposition=absent", "?decomposition=first&decomposition=first", "?%ff"):
        assert send(lasting_port, "GET", f"/api/state{query}")[0] in (400, 404)
    assert send(lasting_port, "GET", "/api/state?decomposition=%FF%FE")[0] == 400
    for component in ("x", "-1", "1e3", "%D9%A3", "9" * 5000, ""):
        assert send(lasting_port, "GET", f"/api/history?decomposition=first&component={component}")[0] == 400
    assert send(lasting_port, "GET", "/api/history?decomposition=first&component=4")[0] == 404
    assert send(lasting_port, "GET", "/api/state?decomposition=first", Origin="http://evil.example")[0] == 403


def test_half_a_request_does_no_harm(lasting_port: int) -> None:
    head = f"POST /api/theme HTTP/1.1\r\nHost: 127.0.0.1:{lasting_port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", lasting_port), timeout=10) as raw:
        raw.sendall(f"{head}X-Npeff: 1\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD[:10])
        raw.shutdown(socket.SHUT_WR)
        assert b" 400 " in raw.recv(1000)
    assert send(lasting_port, "GET", "/api/state?decomposition=first")[0] == 200


# --- the description ----------------------------------------------------------------------------------------------


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a JSON value is what a schema says; written for this test, apart from what the server checks with."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    types = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if not any(types[kind] for kind in kinds) or ("enum" in schema and value not in schema["enum"]):
        return False
    if isinstance(value, list):
        return all(fits(schema["items"], item) for item in value)
    if isinstance(value, dict) and "properties" in schema:
        if schema["additionalProperties"] is False and not set(value) <= set(schema["properties"]):
            return False
        return set(schema["required"]) <= set(value) and all(
            fits(schema["properties"][name], item) for name, item in value.items() if name in schema["properties"]
        )
    return True


def documented(path: str, method: str, status: int) -> dict[str, Any]:
    responses: dict[str, Any] = OPENAPI["paths"][path][method.lower()]["responses"]
    found: dict[str, Any] = responses[str(status)]["content"]["application/json"]["schema"]
    return found


def test_the_description_is_true(lasting_port: int) -> None:
    for path, operations in OPENAPI["paths"].items():
        for method in ("GET", "POST"):
            status, answer = send(lasting_port, method, path, b"{}" if method == "POST" else b"", X_Npeff="1", **JSON)
            assert (status == 405) == (method.lower() not in operations)
            if status != 405:
                assert fits(documented(path, method, status), answer)
    give_theme(lasting_port, 1, "x")
    state = send(lasting_port, "GET", "/api/state?decomposition=first")[1]
    assert fits(documented("/api/state", "GET", 200), state)
    history = send(lasting_port, "GET", "/api/history?decomposition=first&component=1")[1]
    assert fits(documented("/api/history", "GET", 200), history)
    assert not fits(documented("/api/state", "GET", 200), history)
    for code in {c for p in OPENAPI["paths"].values() for o in p.values() for c in o["responses"]}:
        assert HTTPStatus(int(code))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NEARLY = st.fixed_dictionaries(
    {"decomposition": st.just("first") | JSON_VALUES, "component": st.integers(0, 3) | JSON_VALUES},
    optional={"theme": st.text() | JSON_VALUES, "note": st.text() | JSON_VALUES, "who": st.text() | JSON_VALUES},
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=NEARLY | JSON_VALUES)
def test_whatever_is_sent_the_answer_is_documented(lasting_port: int, lasting_run: Run, value: Any) -> None:
    status, answer = post(lasting_port, "/api/theme", value)
    assert status in (200, 400, 404)
    assert fits(documented("/api/theme", "POST", status), answer)
    if status == 200:
        said = Themes(lasting_run, "first").history(value["component"])[-1]
        assert said.theme == " ".join(value["theme"].split())
        assert said.note == value.get("note", "").strip()


# --- texts to try -------------------------------------------------------------------------------------------------


def test_a_text_of_the_run_has_its_own_coefficients_and_answers(tiny_run: Run) -> None:
    texts = tiny_run.table["text"].to_pylist()[:2]
    with serving(tiny_run) as port:
        status, found = try_texts(port, [*texts, texts[0] + " , and far too long"])
        assert status == 200
        assert fits(documented("/api/try", "POST", 200), found)
        assert send(port, "GET", f"/api/state?decomposition={NAME}")[1]["model"] == {"state": "ready", "message": ""}
    fitted = open_decomposition(tiny_run, NAME)
    shares = fitted.shares(fitted.coefficients)
    assert shares is not None
    stored = tiny_run.tensor("probabilities")
    for i in range(2):
        coefficients = dict(zip(found["components"], found["coefficients"][i], strict=True))
        for j in range(5):
            assert coefficients.get(j, 0) == pytest.approx(float(fitted.coefficients[i, j]), rel=2e-3, abs=2e-3)
        assert found["residual"][i] == pytest.approx(float(fitted.residuals[i]), abs=2e-3)
        for k, j in enumerate(found["components"]):
            assert found["shares"][i][k] == pytest.approx(float(shares[i, j]), abs=4e-3)
        named = dict(zip(found["answers"], found["probabilities"][i], strict=True))
        assert named["Negative"] == pytest.approx(float(stored[i, 0]), abs=1e-4)
        assert named["Positive"] == pytest.approx(float(stored[i, 1]), abs=1e-4)
    assert found["coefficients"][2] != found["coefficients"][0]
    assert found["set_aside"] == [False] * 3


def test_hostile_and_overlong_texts(tiny_run: Run) -> None:
    with serving(tiny_run) as port:
        status, found = try_texts(port, ["<script>\x00\x1b \u202e 👩‍👩‍👧", "{text} {0} %s \\n"])
        assert status == 200
        assert len(found["residual"]) == 2
        status, answer = try_texts(port, ["too long " * 200])
        assert status == 400
        assert "tokens" in answer["error"]
        asked = {"decomposition": NAME, "texts": ["<b>\x00 👩‍👩‍👧 good\u202e", " "], "components": [0, 3]}
        status, found = post(port, "/api/words", asked)
        assert status == 200
        assert [len(row) for row in found[0]["effects"]] == [len(found[0]["places"])] * 2
        assert found[1]["effects"] == [[], []]
        for wrong in ({"components": []}, {"components": [5]}, {"texts": ["too long " * 200]}, {"components": [-1]}):
            assert post(port, "/api/words", {**asked, **wrong})[0] in (400, 404)


def test_a_model_that_is_gone_and_comes_back(tmp_path: Path, review_file: Path) -> None:
    model = tiny.save(tmp_path / "model")
    run = collect_tiny(tmp_path / "run", model, review_file)
    with serving(run) as port:
        model.rename(tmp_path / "elsewhere")
        status, message = try_texts(port, ["a fine film"])
        assert (status, "model" in message) == (0, True)
        tiny.save(model, seed=1)
        assert "no longer the one" in try_texts(port, ["a fine film"])[1]
        assert give_theme(port, 0, "x")[0] == 404  # themes do not need the model; there is just no `first` here
        (tmp_path / "elsewhere").rename(tmp_path / "model2")
        for file in (tmp_path / "model2").iterdir():
            file.replace(model / file.name)
        assert try_texts(port, ["a fine film"])[0] == 200


def test_open_questions_with_further_columns(tmp_path: Path, model_directory: Path) -> None:
    task = tmp_path / "open.yaml"
    task.write_text('prompt: "Topic: {topic}\\nQuestion: {text}\\nAnswer:"\nanswers: vocabulary\n')
    data = tmp_path / "open.jsonl"
    rows = [{"text": f"{i} {text}", "topic": "film"} for i, text in enumerate(tiny.TEXTS * 4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = collect_tiny(tmp_path / "run", model_directory, data, str(task))
    with serving(run) as port:
        assert send(port, "GET", f"/api/state?decomposition={NAME}")[1]["fields"] == ["topic"]
        for wrong in ({}, {"fields": []}, {"fields": [{"other": "x"}]}, {"fields": [{}]}):
            assert try_texts(port, ["good"], **wrong)[0] == 400
        text = run.table["text"][0].as_py()
        status, found = try_texts(port, [text, text], fields=[{"topic": "film"}, {"topic": "weather"}])
    assert status == 200
    first = [probability or 0 for probability in found["probabilities"][0]]
    assert found["answers"][first.index(max(first))] == run.table["prediction_text"][0].as_py()
    assert max(first) == pytest.approx(run.table["probability"][0].as_py(), rel=1e-3)
    assert all(row.count(None) == len(row) - 8 for row in found["probabilities"])  # the 8 most likely tokens are known
    assert found["coefficients"][0] != found["coefficients"][1]
    fitted = open_decomposition(run, NAME)
    for j, value in zip(found["components"], found["coefficients"][0], strict=True):
        assert value == pytest.approx(float(fitted.coefficients[0, j]), rel=1e-2, abs=1e-2)
