"""`npeff explore`: serves a run's page on this machine only."""

from __future__ import annotations

import contextlib
import mimetypes
import threading
import webbrowser
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tyro

from npeff import __version__
from npeff.errors import UserError
from npeff.explore.export import MARKER, export_site
from npeff.store import Run

LOOPBACK = "127.0.0.1"
SITE = "site"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # data files are scripts: without this any page in the same browser could load and read them
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class ExploreConfig:
    """Look at a run's components in the browser. Serves on this machine only; Ctrl-C ends it."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    open: bool = True
    """Open the page in the default browser."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UserError(f"--port {self.port} is not a port; give one from 1 to 65535, or 0 for a free one.")


def explore(config: ExploreConfig) -> None:
    """Export the page of a run into RUN/site if it is not there or out of date, and serve it until interrupted."""
    run = Run.open(config.run)
    export_site(run, run.path / SITE)
    with make_server(run.path / SITE, config.port) as server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        print(f"Serving {run.path} at {address} (Ctrl-C ends it)", flush=True)
        if config.open:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def make_server(site: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the exported page in `site`, bound to loopback."""
    if not (site / MARKER).is_file():
        raise UserError(f"{site} is not an exported page.")

    class Handler(_Handler):
        root = site.resolve()

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise UserError(f"Cannot listen on port {port}: {error.strerror}. Choose another --port.") from error
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of files below `root`; nothing else."""

    root: Path
    timeout = 30
    server_version = f"npeff/{__version__}"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if not self._is_ours():
            return self._refuse(HTTPStatus.FORBIDDEN)
        file = self._file()
        if file is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        content = file.read_bytes()
        self.send_response(HTTPStatus.OK)
        kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
        return None

    def _is_ours(self) -> bool:
        """Whether the request comes from our own page or from the user's address bar.

        A foreign name that resolves to this machine shows in Host, a foreign page in Origin or Sec-Fetch-Site. Such a
        page may link to ours, but not load parts of it.
        """
        port = self.connection.getsockname()[1]
        hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
        given = [host.lower() for host in self.headers.get_all("Host", [])]
        origin = self.headers.get("Origin")
        return (
            len(given) == 1
            and given[0] in hosts
            and (origin is None or origin.lower() in {f"http://{host}" for host in hosts})
            and (
                self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
                or self.headers.get("Sec-Fetch-Dest") == "document"
            )
        )

    def _file(self) -> Path | None:
        """The file that is asked for, if it is below the root."""
        path = unquote(urlsplit(self.path).path)
        if "\0" in path or "\\" in path or not path.startswith("/"):
            return None
        try:
            file = (self.root / (path.lstrip("/") or "index.html")).resolve()
            return file if file.is_relative_to(self.root) and file.is_file() else None
        except OSError:  # a name too long for the file system, for one
            return None

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet: people look at the page, not at its requests."""
