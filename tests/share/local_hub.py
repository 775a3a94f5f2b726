"""A Hub for one repository at a time, on this machine: the part of its HTTP interface that the Hub client uses here.

It keeps what it is sent in memory and is not the Hub: whatever the real one refuses, this one may take.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class LocalHub:
    """Serves while it is open.

    `files` is the repository's content, None as long as there is no repository; `asked` counts how often a file was
    downloaded. A file in `damaged` is damaged the first so many times.
    """

    def __init__(self, damaged: dict[str, int] | None = None) -> None:
        self.damaged = damaged or {}
        self.asked: Counter[str] = Counter()
        self.files: dict[str, bytes] | None = None
        self.created: dict[str, Any] = {}
        self.commits: list[str] = []
        self.parents: list[str | None] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def commit(self, lines: list[dict[str, Any]]) -> None:
        assert self.files is not None
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
                self.parents.append(value.get("parentCommit"))
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
            else:
                raise AssertionError(line["key"])


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            if self.hub.files is not None:
                return self._json(
                    {"error": "You already created this model repo", "url": f"{self.hub.address}/owner/name"}, 409
                )
            self.hub.created = json.loads(body)
            self.hub.files = {".gitattributes": b""}
            return self._json({"url": f"{self.hub.address}/owner/name", "name": "owner/name"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            return self._json({"files": modes})
        if "/commit/" in path:
            self.hub.commit([json.loads(line) for line in body.splitlines()])
            return self._json({"commitUrl": f"{self.hub.address}/owner/name/commit/{COMMIT}", "commitOid": COMMIT})
        return self._json({"error": f"POST {path}"}, 404)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.files is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if path in (
            "/api/models/owner/name",
            *(f"/api/models/owner/name/revision/{name}" for name in ("main", COMMIT)),
        ):
            return self._json({"id": "owner/name", "sha": COMMIT, "private": True, "siblings": []})
        if path == f"/api/models/owner/name/tree/{COMMIT}":
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.hub.files.items()
            ]
            return self._json(files)
        if path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/owner/name/resolve/{COMMIT}/")
            content = self.hub.files.get(name)
            if content is not None:
                etag = hashlib.sha1(content).hexdigest()
                if self.command == "GET":
                    self.hub.asked[name] += 1
                    if self.hub.asked[name] <= self.hub.damaged.get(name, 0):
                        content = bytes(len(content))
                return self._send(content, 200, {"ETag": f'"{etag}"'})
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        return self._json({"error": f"GET {path}"}, 404)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
