"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npeff.errors import UserError

PARTIAL = ".partial"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed to `path`, on failure removed.

    A reader, or a process that is killed, sees the old file or the new one and never a part of one.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.chmod(0o666 & ~_umask())  # some writers make files that only their owner may read
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a full or read-only disk raises while `path` is written into a message for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(_disk_message(path, error)) from error
    except Exception as error:
        # safetensors reports a full disk as its own exception, with the number only in the text
        if f"os error {errno.ENOSPC}" in str(error):
            full = OSError(errno.ENOSPC, "No space left on device")
            raise UserError(_disk_message(path, full)) from error
        raise


def _disk_message(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full: could not write {path}. Free some space and run the command again; it continues."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Cannot write {path}: {error.strerror}. Choose a directory that you may write to."
    return f"Could not write {path}: {error.strerror or error}."


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of ours; a damaged one is the user's to know about."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from error


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def remove_partials(directory: Path) -> None:
    """Remove what killed writers left behind in `directory` (not in its subdirectories)."""
    for leftover in Path(directory).glob(f".*{PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
