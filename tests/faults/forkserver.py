"""A process that has imported everything and forks a child for each command, to be killed at a chosen moment.

Importing torch and transformers takes seconds, and a kill test needs hundreds of processes. So one parent imports them,
with one thread and before any thread is started, and forks: the child is a process of its own with its own memory and
its own SIGKILL, and starts in milliseconds.

Orders are lines of JSON on standard input, answers lines of JSON on standard output:
    {"call": "module:function", "arguments": [...], "log": PATH, "after_seconds": S or null, "after_events": N or null,
     "memory_mb": M or null, "environment": {...}}
    → {"code": exit code, or minus the number of the signal, "seconds": duration, "events": seen, if it came to an end}
`after_events` counts what the child does to files (opening for writing, renaming, removing, making directories) and
kills it just before the N-th of them; `after_seconds` kills it from outside. `memory_mb` is what it may take on top of
what it has when it starts.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}


def import_everything() -> None:
    """All of npeff, and what it imports only when needed."""
    import npeff

    for module in pkgutil.walk_packages(npeff.__path__, "npeff."):
        if "npeff.study" not in module.name:
            importlib.import_module(module.name)
    for name in (
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
        "tests.faults.stages",
    ):
        importlib.import_module(name)


def watch_files(kill_before: int | None) -> list[int]:
    """Count what this process does to files; SIGKILL to itself before number `kill_before`."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in EVENTS:
            if seen[0] == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    sys.addaudithook(hook)
    return seen


LONGEST = 180
"""Seconds after which a command counts as hanging: it is ended by SIGALRM, which no test takes for a good end."""


def limit_memory(megabytes: int) -> None:
    """Let this process take so much address space beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def child(order: dict[str, Any]) -> None:
    """Do what was ordered and end. Never returns."""
    code = 1
    signal.alarm(LONGEST)
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order.get("environment") or {})
        if order.get("memory_mb") is not None:
            limit_memory(order["memory_mb"])
        module, _, function = order["call"].partition(":")
        call = getattr(importlib.import_module(module), function)
        seen = watch_files(order.get("after_events"))
        code = call(order["arguments"]) or 0
        events = seen[0]
        Path(f"{order['log']}.events").write_text(str(events))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Answer orders until standard input ends."""
    import torch

    torch.set_num_threads(1)
    import_everything()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(order)
        after = order.get("after_seconds")
        status = None
        while status is None:
            found, value = os.waitpid(pid, 0 if after is None else os.WNOHANG)
            if found:
                status = value
            elif time.monotonic() - start >= after:
                os.kill(pid, signal.SIGKILL)
                after = None
            else:
                time.sleep(0.0005)
        counted = Path(f"{order['log']}.events")
        answer = {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - start, "events": None}
        if counted.is_file():
            answer["events"] = int(counted.read_text())
            counted.unlink()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
