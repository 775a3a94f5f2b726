"""One writer per run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from npeff.utils.errors import UserError
from npeff.utils.files import disk_errors


@contextlib.contextmanager
def only_one(directory: Path, active: bool = True, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock on `directory` (made if missing); a second process that wants it is told so after `wait` seconds.

    The operating system drops the lock when its holder ends, however it ends.
    """
    if not active:
        yield
        return
    try:
        import fcntl
    except ImportError:  # a system without file locks: one writer is then the user's care
        yield
        return
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / ".lock").open("w")
    with handle:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= end:
                    raise UserError(f"Another process is writing to {directory}. Wait for it to end.") from error
                time.sleep(0.01)
        yield
