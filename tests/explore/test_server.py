"""The server gives the page to this machine's user, and nothing to anybody else."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from npeff import cli
from npeff.explore.config import ExploreConfig
from npeff.explore.server import make_server
from npeff.utils.errors import UserError
from tests.synthetic import add_decomposition, make_run


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    site = tmp_path / "site"
    (site / "data").mkdir(parents=True)
    (site / "site.json").write_text("{}")
    (site / "index.html").write_text("<title>here</title>")
    (site / "data" / "run.js").write_text("npeffData(1)")
    (tmp_path / "secret.txt").write_text("secret")
    (site / "link").symlink_to(tmp_path / "secret.txt")
    server = make_server(site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_it_serves_the_page(port: int) -> None:
    status, body, headers = get(port, "/")
    assert (status, body) == (200, b"<title>here</title>")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert get(port, "/index.html?x=1")[0] == 200
    assert get(port, "/data/run.js")[2]["Content-Type"].startswith("text/javascript")
    assert get(port, "/", Host=f"localhost:{port}")[0] == 200
    assert get(port, "/", "HEAD")[:2] == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/data/../../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/data/%2e%2e/%2e%2e/secret.txt",
        "//etc/passwd",
        "/%2fetc/passwd",
        "/link",
        "/data",
        "/data/",
        "/..\\secret.txt",
        "/index.html%00.js",
        "/" + "a" * 5000,
        "http://127.0.0.1/../secret.txt",
    ],
)
def test_there_is_no_way_out_of_the_page(port: int, path: str) -> None:
    status, body, _ = get(port, path)
    assert status in (403, 404)
    assert set(json.loads(body)) == {"error"}


def test_foreign_names_and_pages_are_refused(port: int) -> None:
    assert get(port, "/", Host="evil.example")[0] == 403
    assert get(port, "/", Host=f"evil.example:{port}")[0] == 403
    assert get(port, "/", Host="127.0.0.1:1")[0] == 403
    assert get(port, "/", Origin="http://evil.example")[0] == 403
    assert get(port, "/", Origin="null")[0] == 403
    assert get(port, "/", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert get(port, "/data/run.js", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="script")[0] == 403
    assert get(port, "/data/run.js", Sec_Fetch_Site="same-site", Sec_Fetch_Dest="script")[0] == 403
    assert get(port, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="document")[0] == 200  # a link to the page


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "NONSENSE"])
def test_it_only_reads(port: int, method: str) -> None:
    assert get(port, "/", method)[0] == 501


def test_without_somebody_who_listens_nothing_is_taken(port: int) -> None:
    status, _, headers = get(port, "/", "POST")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert get(port, "/api/state")[0] == 404
    assert get(port, "/api/theme", "POST", X_Npeff="1")[0] == 405
    assert get(port, "/served.js")[0] == 404  # of this made-up page; else the export's own


@pytest.mark.parametrize("line", [b"GET //[ HTTP/1.1", b"GET ? HTTP/1.1", b"GET /%zz HTTP/1.1", b"GET /#/?# HTTP/1.1"])
def test_odd_addresses_are_answered(port: int, line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(line + f"\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        assert raw.recv(1000).startswith((b"HTTP/1.1 404", b"HTTP/1.1 200"))
    assert capfd.readouterr().err == ""


def test_a_body_where_none_belongs_is_not_taken_for_a_request(port: int) -> None:
    inner = f"GET /data/run.js HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(inner)}\r\n\r\n".encode())
        raw.sendall(inner)
        received = b"".join(iter(lambda: raw.recv(1000), b""))
    assert b"<title>here</title>" in received
    assert b"npeffData" not in received


def test_readers_who_leave_early_are_no_error(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            raw.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert get(port, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_without_host_nothing_is_served(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in raw.recv(1000)


def test_it_listens_on_loopback_only(port: int, tmp_path: Path) -> None:
    server = make_server(tmp_path / "site")
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
    with pytest.raises(UserError, match="Choose another --port"):
        make_server(tmp_path / "site", port)
    with pytest.raises(UserError, match="not an exported page"):
        make_server(tmp_path)


def test_the_command_line() -> None:
    config = cli.parse("explore", ["runs/x", "--no-open", "--device", "cpu"])
    assert config == ExploreConfig("runs/x", open=False, device="cpu")
    with pytest.raises(UserError):
        ExploreConfig("runs/x", 70000)


def test_the_command_serves_until_interrupted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=3)
    # a process started in the background of a shell ignores the signal, and so would its children
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"from npeff.explore.server import *; explore(ExploreConfig({str(run.path)!r}, open=False))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("Serving")).split(" at ")[1].split()[0]
        assert address.startswith("http://127.0.0.1:")
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        assert b"npeff" in get(port, "/")[1]
        assert get(port, "/manifest.json")[0] == 404  # of the run only the page is served
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
