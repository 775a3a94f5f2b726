"""`npeff explore`: serves a run's page on this machine only, takes themes and tries texts."""

import contextlib
import json
import mimetypes
import socket
import sys
import threading
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from npeff.explore.api import PREFIX, Api, Problem, methods
from npeff.explore.config import ExploreConfig
from npeff.explore.export import MARKER, export_site
from npeff.store.layout import choose_decomposition, decomposition_names
from npeff.store.run import Run
from npeff.utils import UserError, __version__

LOOPBACK = "127.0.0.1"
SITE = "site"
LARGEST = 64 * 1024
"""Bytes that a request may have."""
_SERVED = b"const SERVED = true;\n"
"""In place of the export's served.js: tells the page that somebody listens."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""Not left to the system, which may have been told otherwise."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # data files are scripts: without this any page in the same browser could load and read them
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def explore(config: ExploreConfig) -> None:
    """Serve the page of a run until interrupted; it is written into RUN/site if it is not there or out of date.

    Args:
        config: The run, where to listen, and which decomposition to open.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    export_site(run, run.path / SITE)
    api = Api(run, decomposition_names(run.path), config.device)
    with make_server(run.path / SITE, config.port, api) as server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        print(f"Serving {run.path} at {address} (Ctrl-C ends it)", flush=True)
        print(f"It opens on the decomposition {name}.", flush=True)
        if config.decomposition is not None:
            address += f"#/d/{quote(name, safe='')}"
        if config.open:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def make_server(site: Path, port: int = 0, api: Api | None = None) -> ThreadingHTTPServer:
    """A server of an exported page, bound to loopback.

    Args:
        site: Directory of the page.
        port: Port to listen on; 0 takes a free one.
        api: What answers requests of the page; without it, files are only read.

    Returns:
        The server, not started yet.

    Raises:
        UserError: There is no page in the directory, or the port cannot be had.
    """
    if not (site / MARKER).is_file():
        raise UserError(f"{site} is not an exported page.")
    try:
        return _Server((LOOPBACK, port), type("Handler", (_Handler,), {"root": site.resolve(), "api": api}))
    except OSError as error:
        raise UserError(f"Cannot listen on port {port}: {error.strerror}. Choose another --port.") from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in a line what went wrong; readers who leave before a page is whole are no error."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"npeff explore: {type(error).__name__}: {error}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of files below `root`, and the requests that `api` answers; nothing else."""

    root: Path
    api: Api | None = None
    timeout = 30
    server_version = f"npeff/{__version__}"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request of any method that is known."""
        path, _, query = self.path.partition("#")[0].partition("?")
        if self.command != "POST" and ("Content-Length" in self.headers or "Transfer-Encoding" in self.headers):
            self.close_connection = True  # what comes next is a body that nobody asked for, not a request
        if not self._is_ours():
            return self._refuse(HTTPStatus.FORBIDDEN, "This request comes from elsewhere.")
        if self.api is not None and path.startswith(PREFIX):
            return self._answer_api(self.api, path, query)
        if self.command == "POST":
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Files are only read.", Allow="GET, HEAD")
        if self.api is not None and path == "/served.js":
            return self._send(HTTPStatus.OK, _TYPES[".js"], _SERVED)
        file = self._file(unquote(path))
        if file is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "There is no such file.")
        kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return self._send(HTTPStatus.OK, kind, file.read_bytes())

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _answer_api(self, api: Api, path: str, query: str) -> None:
        allowed = ", ".join(methods(path))
        if not allowed:
            return self._refuse(HTTPStatus.NOT_FOUND, "There is no such request.")
        if self.command not in methods(path):
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}.", Allow=allowed)
        if self.command != "POST":
            return self._send_json(*api.answer(path, query, None))
        # a form of another site's page can neither send JSON nor a header of its own
        if self.headers.get("Sec-Fetch-Site") != "same-origin" and "X-Npeff" not in self.headers:
            return self._refuse(HTTPStatus.FORBIDDEN, "Without a browser, send a header X-Npeff along.")
        if self.headers.get_content_type() != "application/json":
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Send application/json.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, "Say how long the request is (Content-Length).")
        if len(length) > 9 or int(length) > LARGEST:
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request may have {LARGEST} bytes.")
        return self._send_json(*api.answer(path, query, self.rfile.read(int(length))))

    def _send_json(self, status: HTTPStatus, value: Any, **headers: str) -> None:
        body = json.dumps(value, allow_nan=False, separators=(",", ":"), default=vars).encode("ascii")
        self._send(status, "application/json", body, **headers)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _is_ours(self) -> bool:
        """Whether the request comes from our own page or from the user's address bar.

        A foreign name that resolves to this machine shows in Host, a foreign page in Origin or Sec-Fetch-Site. Such a
        page may link to ours, but not load parts of it.
        """
        port = self.connection.getsockname()[1]
        hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
        given = [host.lower() for host in self.headers.get_all("Host", [])]
        origin = self.headers.get("Origin")
        if len(given) != 1 or given[0] not in hosts:
            return False
        if origin is not None and origin.lower() not in {f"http://{host}" for host in hosts}:
            return False
        site, target = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Dest")
        return site in ("none", "same-origin") or target == "document"

    def _file(self, path: str) -> Path | None:
        """The file at a path, if it is below the root."""
        if "\0" in path or "\\" in path or not path.startswith("/"):
            return None
        try:
            file = (self.root / (path.lstrip("/") or "index.html")).resolve()
            return file if file.is_relative_to(self.root) and file.is_file() else None
        except OSError:  # a name too long for the file system, for one
            return None

    def _refuse(self, status: HTTPStatus, why: str, **headers: str) -> None:
        """Answer with an error and end the connection: what else was sent is not for us to make sense of."""
        self.close_connection = True
        self._send_json(status, Problem(why), Connection="close", **headers)
        if self.command == "POST":  # closing with unread bytes could take the answer away before it is read
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                self.rfile.read(2 * LARGEST)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class says to a request that it cannot read, in our words."""
        self._refuse(HTTPStatus(code), f"{message or HTTPStatus(code).phrase}.")

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet: people look at the page, not at its requests."""
