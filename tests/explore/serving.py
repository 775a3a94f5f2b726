"""Runs with a model that can be served, and requests to a real server."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.explore.api import Api
from npeff.explore.export import export_site
from npeff.explore.server import make_server
from npeff.models.config import ModelConfig
from npeff.store.layout import decomposition_names
from npeff.store.run import Run
from npeff.tasks.config import DataConfig

NAME = "npeff-5-0"


def collect_tiny(path: Path, model: Path, data: Path, task: str = "sst2") -> Run:
    """A run of a tiny model with one decomposition, NAME."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits for the first
    try:
        collect(
            CollectConfig(
                run=str(path),
                data=DataConfig(task=task, data=str(data)),
                model=ModelConfig(model=str(model), device="cpu"),
                sketch=SketchConfig(dim=256),
                storage="float32",
            )
        )
        decompose(DecomposeConfig(run=str(path), components=5, device="cpu"))
    finally:
        torch.set_num_threads(threads)
    return Run.open(path)


@contextmanager
def serving(run: Run) -> Iterator[int]:
    """Serve a run from this process; gives the port."""
    export_site(run, run.path / "site")
    server = make_server(run.path / "site", api=Api(run, decomposition_names(run.path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def explored(run: Run) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """`npeff explore` as a process of its own; gives its port, and the process to be ended as one likes."""
    command = [sys.executable, "-m", "npeff.cli", "explore", str(run.path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(line for line in process.stdout if line.startswith("Serving")).split(" at ")[1].split()[0]
            yield int(address.rstrip("/").rsplit(":", 1)[1]), process
        finally:
            process.send_signal(signal.SIGKILL)


def send(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """One request with exactly these headers besides Host and Content-Length; gives the status and the JSON answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {"Host": f"127.0.0.1:{port}", "Content_Length": str(len(body))} if body else {"Host": f"127.0.0.1:{port}"}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in (given | headers).items():
        if value:
            connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def post(port: int, path: str, value: Any) -> tuple[int, Any]:
    """Post JSON as the page does."""
    headers = {"Content_Type": "application/json", "X_Npeff": "test"}
    return send(port, "POST", path, json.dumps(value).encode(), **headers)


def try_texts(port: int, texts: list[str], name: str = NAME, **more: Any) -> tuple[int, Any]:
    """Ask for texts, and wait for the model if it is not there yet."""
    asked = {"decomposition": name, "texts": texts, **more}
    for _ in range(600):
        status, value = post(port, "/api/try", asked)
        if status != 202:
            return status, value
        while (model := send(port, "GET", f"/api/state?decomposition={name}")[1]["model"])["state"] == "loading":
            time.sleep(0.1)
        if model["state"] == "failed":
            return 0, model["message"]
    raise AssertionError("the model was never loaded")
