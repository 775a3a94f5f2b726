"""A chat server that does what it is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Told:
    """What the server does: one action a request, then the last one for ever."""

    actions: list[Callable[[BaseHTTPRequestHandler], None]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


def send(status: int, body: str | bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def act(handler: BaseHTTPRequestHandler) -> None:
        content = body.encode() if isinstance(body, str) else body
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return act


def say(text: str | None) -> Callable[[BaseHTTPRequestHandler], None]:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    return send(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}))


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def break_off(handler: BaseHTTPRequestHandler) -> None:
    send(200, b'{"choi', Content_Length="500")(handler)
    hang_up(handler)


def never_answer(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.settimeout(5)
    handler.rfile.read(1)  # until the other side gives up


@contextmanager
def serving(*actions: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Told]:
    told = Told(list(actions))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.requests.append(
                {
                    "path": self.path,
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "body": json.loads(body),
                }
            )
            self.close_connection = True
            action = told.actions[min(len(told.requests), len(told.actions)) - 1]
            action(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client hung up
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
