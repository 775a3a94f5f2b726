"""What of a run is shared, and the index that lists it.

    share.json     the index: version, fingerprint of the run, and the size and SHA-256 of every file
    README.md      the card
    ...            files of the run, under the names that they have in it

An index from somewhere else is not trusted: `read_index` refuses every name that is not of the kinds listed here, so
that a pull writes only files of a run, and only below the run's directory.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npeff.store.layout import DECOMPOSITIONS, EXAMPLES, MANIFEST, PERTURBATIONS, RESULTS, SHARDS, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError
from npeff.utils.files import sha256
from npeff.utils.version import __version__

FORMAT = 1
INDEX = "share.json"
CARD = "README.md"
SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".tex", ".png", ".svg", ".safetensors")
CHANGED_MODELS = ("delta", "adapter", "model")
"""Folders that `npeff perturb --save` writes: as large as the model, and not needed to look at results."""
_SHARD = re.compile(rf"{SHARDS}/[0-9]+\.safetensors")
_DEEPEST = 6
_LONGEST = 255


@dataclass(frozen=True)
class Entry:
    """A shared file, as the index lists it."""

    size: int
    """Bytes."""
    sha256: str
    """Hash of its content, in hexadecimal digits."""


@dataclass(frozen=True)
class Index:
    """What share.json holds."""

    format: int
    """Version of this layout."""
    npeff: str
    """Version of npeff that shared the run."""
    run: str
    """Fingerprint of the run."""
    rows: bool
    """Whether the collected rows are shared too."""
    files: dict[str, Entry]
    """Name of a file, relative to the run and with forward slashes → its size and hash."""


def shared_files(run: Run, rows: bool) -> dict[str, Path]:
    """Files of a run that are shared, except the card; unfinished decompositions and links are left out.

    Args:
        run: The run.
        rows: Whether the collected rows are shared.

    Returns:
        Name in the index → where the file is.
    """
    finished = decomposition_names(run.path)
    files = {name: run.path / name for name in (MANIFEST, EXAMPLES)}
    for path in (path for folder in RESULTS for path in sorted((run.path / folder).rglob("*"))):
        name = path.relative_to(run.path).as_posix()
        unfinished = name.startswith(f"{DECOMPOSITIONS}/") and name.split("/")[1] not in finished
        if path.is_file() and not path.is_symlink() and is_shared_name(name) and not unfinished:
            files[name] = path
    return files | ({shard.file: run.path / shard.file for shard in run.shards} if rows else {})


def is_shared_name(name: str) -> bool:
    """Whether a file of this name may be part of a shared run.

    Args:
        name: Name relative to the run, possibly from somebody else.

    Returns:
        False for anything hidden, absolute, above the run, of another kind than results are, or with a character that
        some system takes for a separator.
    """
    parts = name.split("/")
    if name in (MANIFEST, EXAMPLES, CARD) or _SHARD.fullmatch(name):
        return True
    if parts[0] not in RESULTS or not name.endswith(SUFFIXES) or not 2 <= len(parts) <= _DEEPEST:
        return False
    changed_model = parts[0] == PERTURBATIONS and len(parts) > 3 and parts[2] in CHANGED_MODELS
    return not changed_model and all(_is_plain(part) for part in parts)


def _is_plain(part: str) -> bool:
    fits = 0 < len(part.encode("utf-8", "replace")) <= _LONGEST and part.isprintable()
    return fits and part[0] not in ". " and part[-1] not in ". " and not set(part) & set('\\:*?"<>|')


def make_index(run: Run, files: Mapping[str, Path], rows: bool) -> Index:
    """Hash what is shared.

    Args:
        run: The run.
        files: Name → where the file is.
        rows: Whether the collected rows are among the files.

    Returns:
        The index of the files.

    Raises:
        UserError: A file is not what the run's manifest says.
    """
    entries = {name: Entry(files[name].stat().st_size, sha256(files[name])) for name in sorted(files)}
    expected = {EXAMPLES: run.manifest["examples_sha256"]}
    expected |= {shard.file: record["sha256"] for shard, record in zip(run.shards, run.manifest["shards"], strict=True)}
    for name in entries.keys() & expected.keys():
        if entries[name].sha256 != expected[name]:
            raise UserError(f"{files[name]} is damaged. `npeff verify {run.path}` repairs it.")
    return Index(FORMAT, __version__, run.fingerprint, rows, entries)


def read_index(content: bytes, where: str) -> Index:
    """The index of a shared run.

    Args:
        content: Content of share.json.
        where: Where it is from, for messages.

    Returns:
        The index; every name in it is one of a run's own files.

    Raises:
        UserError: It has another format, is damaged, lists files that no run has, or is not of a whole run.
    """
    try:
        values = json.loads(content)
        version = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
        index = from_dict(Index, values) if version == FORMAT else None
    except (ValueError, RecursionError, UserError) as error:
        raise UserError(f"{INDEX} of {where} is damaged: {error} Get it again, or ask who shared it.") from error
    if index is None:
        raise UserError(f"{where} is shared in format {version!r}; this npeff reads format {FORMAT}. Upgrade npeff.")
    same = Counter(name.casefold() for name in index.files)  # one file where capital letters make no difference
    for name in index.files:
        if not is_shared_name(name) or same[name.casefold()] > 1:
            raise UserError(f"{where} lists {name!r}, which is no file of a run. Nothing was copied; do not trust it.")
    if not {MANIFEST, EXAMPLES} <= index.files.keys():
        raise UserError(f"{where} is not a whole run: it lacks {MANIFEST} or {EXAMPLES}.")
    return index
