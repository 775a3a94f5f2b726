"""Commands in processes of their own, killed at random moments until they are done."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
KILLED = -9
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    seconds: float
    events: int | None
    said: str


class Forkserver:
    """Starts processes; see `tests.faults.forkserver`."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        """Logs go to `folder`; `within` is a command that runs the server in surroundings of its own."""
        self._log = folder / "said.txt"
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.faults.forkserver"],
            cwd=ROOT,
            env=os.environ | QUIET,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, arguments: Sequence[str], call: str = "npeff.cli:main", **limits: Any) -> Ended:
        """Run `npeff ARGUMENTS`, or another function that takes a list of texts; see `forkserver` for `limits`."""
        order = {"call": call, "arguments": list(arguments), "log": str(self._log), **limits}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        return Ended(answer["code"], answer["seconds"], answer["events"], said)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server has ended"
        found: dict[str, Any] = json.loads(line)
        return found


def kill_until_done(
    server: Forkserver, arguments: Sequence[str], call: str, whole: Ended, moments: random.Random, most: int
) -> int:
    """Start a command again and again, killing it at random moments, until it ends by itself; returns the kills.

    Every other moment is a time, spread over the duration of an undisturbed run; the others are between two changes of
    files, spread over the number of changes of an undisturbed run. After `most` kills it may go on to the end.
    """
    assert whole.events is not None
    kills = 0
    while True:
        limits: dict[str, Any] = {}
        if kills < most and moments.random() < 0.5:
            limits["after_seconds"] = moments.uniform(0, whole.seconds)
        elif kills < most:
            limits["after_events"] = moments.randrange(whole.events)
        ended = server.run(arguments, call, **limits)
        if ended.code != KILLED:
            assert ended.code == 0, ended.said
            return kills
        kills += 1
