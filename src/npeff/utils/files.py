"""Files that appear whole or not at all."""

import contextlib
import errno
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from npeff.utils.errors import UserError, out_of_memory

PARTIAL = ".partial"
_LEFTOVERS = (f".*{PARTIAL}", ".tmp??????")
"""Names of unfinished files: ours, and those that safetensors writes beside a file before it renames them."""
SEAL = "seal"
_UMASK = os.umask(0o077)  # it can only be read by setting it
os.umask(_UMASK)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file so that a reader, or a process that is killed, sees the old one or the new one, never a part.

    Args:
        path: The file.

    Yields:
        A temporary path beside it; on success it is synced and renamed to `path`, on failure removed.

    Raises:
        UserError: There is something else in its place.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file that can be replaced. Choose another name.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.chmod(0o666 & ~_UMASK)  # some writers make files that only their owner may read
            temporary.replace(path)
            _sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Write a directory as a whole.

    Args:
        path: The directory.

    Yields:
        A new directory beside it; on success it takes the place of what is there, on failure it goes.

    Raises:
        OSError: It cannot be put in place; what was there is back.
    """
    path = Path(path).absolute()
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    old = new.with_suffix(".old")
    try:
        with disk_errors(path):
            _remove_abandoned(path)
            new.mkdir(parents=True)
            yield new
            if path.exists():
                path.rename(old)
            try:
                new.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk too, so that a crash of the machine does not bring old files back."""
    with contextlib.suppress(OSError):  # not every file system knows it, and Windows does not
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished directory is one whose writer was killed."""


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; not what another process may be writing now."""
    name = glob.escape(path.name)
    former = sorted(path.parent.glob(f".{name}.*.old"))
    if former and not path.exists():  # its writer was killed between the two renames
        former.pop().rename(path)
    for leftover in (*path.parent.glob(f".{name}.*.new"), *former):
        if time.time() - leftover.stat().st_mtime > _ABANDONED:
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a full or read-only disk raises into a message for the user.

    Args:
        path: What is being written.

    Yields:
        Nothing.

    Raises:
        UserError: The disk is full or may not be written to.
        Exception: Whatever else the block raises, also for lack of memory.
    """
    try:
        yield
    except Exception as error:
        # safetensors reports a full disk as its own exception, with the number only in the text
        full = f"os error {errno.ENOSPC}" in str(error)
        if out_of_memory(error) or not (full or isinstance(error, OSError)):
            raise
        raise UserError(_disk_message(path, error)) from error


def _disk_message(path: Path, error: Any) -> str:
    number = getattr(error, "errno", errno.ENOSPC)  # the exception of safetensors has none
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full: could not write {path}. Free some space and run the command again; it continues."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Cannot write {path}: {error.strerror}. Choose a directory that you may write to."
    return f"Could not write {path}: {error.strerror or error}."


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, sealed: bool = False) -> None:
    """Write `value` as indented JSON, whole or not at all.

    A `sealed` file, which must be a dictionary's, ends with a hash of all else in it: `read_json` refuses it if it has
    changed since. For what later commands build on.
    """
    write_text(path, json.dumps(with_seal(value) if sealed else value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of ours, without its seal; a damaged one is the user's to know about."""
    return without_seal(path, parse_json(path))


def read_object(path: Path, sealed: bool = False) -> dict[str, Any]:
    """Read a JSON file of ours that holds an object.

    Args:
        path: The file.
        sealed: Whether it must have a seal; without, a file that has none is read too.

    Returns:
        The object, without its seal.

    Raises:
        UserError: It cannot be read, is damaged, or holds something else.
    """
    value = parse_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it should hold a JSON object. Restore it from a copy, or make it again.")
    if sealed and SEAL not in value:
        raise UserError(f"{path} has no seal.")
    return without_seal(path, value)


def parse_json(path: Path) -> Any:
    """What a JSON file holds, seal and all."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from error


def with_seal(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with a hash of all that is in it."""
    return {**value, SEAL: _seal(value)}


def without_seal(path: Path, value: Any) -> Any:
    """A JSON value without its seal.

    Args:
        path: Where it was read.
        value: What was read.

    Returns:
        What it was before it was sealed.

    Raises:
        UserError: The seal is not the one of this value.
    """
    if not isinstance(value, dict) or not value:
        return value
    # a seal that only lost its name is the last entry still; such a file is not one that was never sealed
    name = SEAL if SEAL in value else list(value)[-1]
    found = {key: item for key, item in value.items() if key != name}
    fits = isinstance(value[name], str) and value[name] == _seal(found)
    if name != SEAL and not fits:
        return value
    if name != SEAL or not fits:
        raise UserError(
            f"{path} is damaged or was edited: it is not what its {SEAL!r} was made of. Restore it from a copy, or "
            f"make it again. (If you meant to edit it, remove the entry {SEAL!r}.)"
        )
    return found


def _seal(value: dict[str, Any]) -> str:
    """Hash of a JSON value, the same however the file is laid out."""
    # as it will be read: keys that are numbers become text
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def installed_file(package: str, name: str) -> Path | None:
    """A file that an installed package brings, found without importing the package; None if it is not there."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders if (path := Path(folder) / name).is_file()), None)


def remove_partials(directory: Path, below: bool = False) -> None:
    """Remove what killed writers left behind.

    To be called by who has the right to write there: a writer at work would lose its file.

    Args:
        directory: Where to look.
        below: Whether to look in all directories below it, too.
    """
    find = Path(directory).rglob if below else Path(directory).glob
    for leftover in [path for name in _LEFTOVERS for path in find(name)]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(directory: Path, active: bool = True, wait: float = 0.0) -> Iterator[None]:
    """Be the only writer of a directory, as long as the block runs and however it ends.

    Args:
        directory: What to lock; made if it is missing.
        active: Whether to do it at all: of several ranks, one holds the lock for all.
        wait: Seconds to wait for another writer.

    Yields:
        Nothing.

    Raises:
        UserError: Another process is writing there, or the directory cannot be written to.
    """
    if not active:
        yield
        return
    lock = FileLock(directory / ".lock", timeout=wait, poll_interval=0.01)
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:  # which is an OSError, but none of the disk
            raise UserError(f"Another process is writing to {directory}. Wait for it to end.") from error
    try:
        yield
    finally:
        lock.release()
