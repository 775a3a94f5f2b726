"""A long mixed load on the explorer's server while a decomposition runs: does it leak, does it err?

    python -m tests.faults.soak --minutes 30        (or: make soak MINUTES=30)

Serves a run of a tiny model on this machine, as `npeff explore` does. Readers open pages, others label components, try
texts and send nonsense, all at once; `npeff decompose` runs on the same run again and again. Prints a table; the exit
code is 1 after an unexpected answer, a traceback, or a server that has grown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import tiny
from tests.explore.serving import NAME, collect_tiny, post, send, try_texts

READERS = 3
WARM_UP = 0.2
"""Share of the time after which the server has all that it needs: its threads, its caches."""
MORE_MEMORY = 32e6
"""Bytes by which the server may grow after that."""
MORE_FILES = 20
"""File descriptors, likewise: connections that are open at the moment."""


class Load:
    """Threads that send requests until they are told to stop, and what came of them."""

    def __init__(self, port: int, components: int) -> None:
        self.port, self.components = port, components
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: dict[str, list[float]] = {}
        self.labelled: dict[int, str] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin all kinds of requests."""
        kinds: list[tuple[str, Callable[[random.Random, int], tuple[int, bool]], float]] = [
            *[("page", self._page, 0.0)] * READERS,
            ("state", self._state, 0.05),
            ("label", self._label, 0.5),
            ("try", self._try, 0.2),
            ("nonsense", self._nonsense, 0.02),
        ]
        for number, (name, ask, pause) in enumerate(kinds):
            thread = threading.Thread(target=self._work, args=(name, ask, pause, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End all requests."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self, name: str, ask: Callable[[random.Random, int], tuple[int, bool]], pause: float, seed: int) -> None:
        moments, turn = random.Random(seed), 0
        while not self._stop.wait(pause * moments.random()):
            start = time.monotonic()
            try:
                status, fine = ask(moments, turn)
                answer, problem = str(status), None if fine else f"{name}: answer {status}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer, problem = type(error).__name__, f"{name}: {type(error).__name__}: {error}"
            with self._lock:
                self.answers[f"{name} {answer}"] += 1
                self.seconds.setdefault(name, []).append(time.monotonic() - start)
                if problem:
                    self.wrong.append(problem)
            turn += 1

    def _page(self, moments: random.Random, turn: int) -> tuple[int, bool]:
        number = moments.randrange(self.components)
        path = moments.choice(["/", "/data/run.js", "/data/0/components.js", f"/data/0/component/{number}.js"])
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        size = len(answer.read())
        connection.close()
        return answer.status, answer.status == 200 and size > 0

    def _state(self, moments: random.Random, turn: int) -> tuple[int, bool]:
        status, value = send(self.port, "GET", f"/api/state?decomposition={NAME}")
        return status, status == 200 and isinstance(value["annotations"], list)

    def _label(self, moments: random.Random, turn: int) -> tuple[int, bool]:
        component, label = moments.randrange(self.components), f"label {turn}"
        asked = {"decomposition": NAME, "component": component, "label": label, "note": "n" * 200, "who": "soak"}
        status, _ = post(self.port, "/api/annotation", asked)
        self.labelled[component] = label
        return status, status == 200

    def _try(self, moments: random.Random, turn: int) -> tuple[int, bool]:
        texts = moments.sample(tiny.TEXTS, moments.choice((1, 2, 4)))
        status, value = try_texts(self.port, texts)
        return status, status == 200 and len(value["coefficients"]) == len(texts)

    def _nonsense(self, moments: random.Random, turn: int) -> tuple[int, bool]:
        path, body = moments.choice(
            [("/api/annotation", b"{"), ("/api/try", b"[]"), ("/api/nothing", b"{}"), ("/../manifest.json", b"")]
        )
        headers = {"Content_Type": "application/json", "X_Npeff": "1"} if body else {}
        status, _ = send(self.port, "POST" if body else "GET", path, body, **headers)
        return status, status in (400, 404)


def decompose_again_and_again(run: Path, stop: threading.Event, ended: list[int]) -> None:
    """Fit with other seeds, one after another, in processes of their own."""
    seed = 1
    while not stop.is_set():
        options = [
            "--components",
            "4",
            "--seed",
            str(seed),
            "--max-passes",
            "300",
            "--tolerance",
            "0",
            "--device",
            "cpu",
        ]
        command = [
            sys.executable,
            "-m",
            "npeff.cli",
            "decompose",
            str(run),
            *options,
            "--decomposition",
            "soak",
            "--overwrite",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        ended.append(done.returncode)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
        seed += 1


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def soak(minutes: float, folder: Path) -> int:
    """Run it all; returns the exit code."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    model = tiny.save(folder / "model")
    data = folder / "reviews.jsonl"
    words = " ".join(tiny.TEXTS).split()
    with data.open("w", encoding="utf-8") as handle:
        for n in range(200):
            text = " ".join(words[(n * k) % len(words)] for k in range(2, 7))
            handle.write(json.dumps({"text": f"{n} {text}", "label": n % 2}) + "\n")
    run = collect_tiny(folder / "run", model, data)
    log = (folder / "server.txt").open("w+")
    command = [sys.executable, "-m", "npeff.cli", "explore", str(run.path), "--no-open", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("Serving")).split(" at ")[1].split()[0]
        server, load = psutil.Process(process.pid), Load(int(address.rstrip("/").rsplit(":", 1)[1]), 5)
        try_texts(load.port, ["good"])  # loads the model: what it takes is no leak
        load.start()
        stop, fits = threading.Event(), list[int]()
        fitting = threading.Thread(target=decompose_again_and_again, args=(run.path, stop, fits))
        fitting.start()
        samples = watch(server, minutes * 60)
        load.stop()
        stop.set()
        fitting.join()
        alive = process.poll() is None
        process.terminate()
    log.seek(0)
    said = log.read()
    return report(load, samples, fits, said, alive)


def watch(server: psutil.Process, seconds: float) -> list[dict[str, float]]:
    """Memory, file descriptors and threads of the server, from time to time."""
    start, samples = time.monotonic(), []
    while (passed := time.monotonic() - start) < seconds and server.is_running():
        with server.oneshot():
            samples.append(
                {
                    "seconds": passed,
                    "memory": float(server.memory_info().rss),
                    "files": float(server.num_fds()),
                    "threads": float(server.num_threads()),
                }
            )
        time.sleep(min(5.0, seconds / 50))
    return samples


def report(load: Load, samples: list[dict[str, float]], fits: list[int], said: str, alive: bool) -> int:
    """Print what was found; returns the exit code."""
    warm = samples[int(WARM_UP * len(samples)) :]
    tenth = max(1, len(warm) // 10)

    def both_ends(name: str) -> tuple[float, float]:
        """The largest at the beginning and at the end: what comes and goes is no leak."""
        return max(sample[name] for sample in warm[:tenth]), max(sample[name] for sample in warm[-tenth:])

    memory, files, threads = both_ends("memory"), both_ends("files"), both_ends("threads")
    print("| requests | number | answers | median ms | 99% ms |\n|---|---|---|---|---|")
    for name, seconds in sorted(load.seconds.items()):
        mine = {key.split()[1]: count for key, count in sorted(load.answers.items()) if key.split()[0] == name}
        answers = ", ".join(f"{status}: {count}" for status, count in mine.items())
        times = " | ".join(f"{1e3 * quantile(seconds, share):.1f}" for share in (0.5, 0.99))
        print(f"| {name} | {len(seconds)} | {answers} | {times} |")
    total = sum(load.answers.values())
    print(f"\n{samples[-1]['seconds'] / 60:.1f} minutes, {total} requests, {len(fits)} decompositions")
    print(f"memory {memory[0] / 1e6:.0f} MB after the warm-up, {memory[1] / 1e6:.0f} MB at the end")
    print(f"file descriptors {files[0]:.0f} and {files[1]:.0f}, threads {threads[0]:.0f} and {threads[1]:.0f}")
    problems: list[Any] = load.wrong[:20]
    problems += ["the server has ended"] if not alive else []
    problems += [f"{sum(code != 0 for code in fits)} decompositions failed"] if any(fits) else []
    problems += [f"the server said: {said[-2000:]}"] if "Traceback" in said or "Error" in said else []
    problems += ["the memory has grown"] if memory[1] - memory[0] > MORE_MEMORY else []
    problems += ["file descriptors have grown"] if files[1] - files[0] > MORE_FILES else []
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("no error, no leak" if not problems else f"{len(load.wrong)} wrong answers")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    with tempfile.TemporaryDirectory(prefix="npeff-soak-") as folder:
        return soak(parser.parse_args().minutes, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
