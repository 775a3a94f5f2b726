"""What of a run is shared, and the index that lists it.

    share.json     format, npeff version, fingerprint of the run, and for every file its size and SHA-256
    README.md      the card
    ...            files of the run, under the names that they have in it

An index from somewhere else is not trusted: `read_index` refuses every name that is not of the kinds written here, so
a pull writes nothing but files of a run, below the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npeff.store.layout import EXAMPLES, MANIFEST, SHARDS
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import sha256
from npeff.utils.version import __version__

FORMAT = 1
INDEX = "share.json"
CARD = "README.md"
SINGLE_FILES = (MANIFEST, EXAMPLES, CARD)
FOLDERS = ("decompositions", "annotations", "perturbations", "comparisons", "stability", "spectra", "sweeps", "icl")
SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".tex", ".png", ".svg", ".safetensors")
CHANGED_MODELS = ("delta", "adapter", "model")
"""What `npeff perturb --save` writes: as large as the model, and not needed to look at results."""
_DEEPEST = 6
_LONGEST = 255


@dataclass(frozen=True)
class Entry:
    """A shared file as the index has it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What share.json says."""

    fingerprint: str
    rows: bool
    """Whether the collected rows are there."""
    files: dict[str, Entry]
    """Name, relative to the run and with forward slashes → its size and hash."""

    def to_bytes(self) -> bytes:
        """The text of share.json."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        values = {"format": FORMAT, "npeff": __version__, "run": self.fingerprint, "rows": self.rows, "files": files}
        return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def shared_files(run: Run, rows: bool) -> dict[str, Path]:
    """Files of a run that are shared: name → path."""
    found = {name: run.path / name for name in SINGLE_FILES if name != CARD and (run.path / name).is_file()}
    for folder in FOLDERS:
        for path in sorted((run.path / folder).rglob("*")):
            name = path.relative_to(run.path).as_posix()
            if path.is_file() and not path.is_symlink() and is_shared_name(name) and _is_finished(run, name):
                found[name] = path
    if rows:
        found |= {shard.file: run.path / shard.file for shard in run.shards}
    return found


def _is_finished(run: Run, name: str) -> bool:
    """Whether a file belongs to something finished: a decomposition is when its config.json is there."""
    parts = name.split("/")
    return parts[0] != "decompositions" or (run.path / parts[0] / parts[1] / "config.json").is_file()


def is_shared_name(name: str) -> bool:
    """Whether a file of this name may be part of a shared run.

    Nothing hidden, absolute, above the run, or with a character that some system takes for a separator.
    """
    parts = name.split("/")
    if name in SINGLE_FILES:
        return True
    if not all(_is_plain(part) for part in parts) or not 2 <= len(parts) <= _DEEPEST:
        return False
    if parts[0] == SHARDS:
        return len(parts) == 2 and parts[1].endswith(".safetensors") and parts[1].removesuffix(".safetensors").isdigit()
    changed_model = parts[0] == "perturbations" and len(parts) > 3 and parts[2] in CHANGED_MODELS
    return parts[0] in FOLDERS and parts[-1].endswith(SUFFIXES) and not changed_model


def _is_plain(part: str) -> bool:
    return (
        0 < len(part.encode("utf-8", "replace")) <= _LONGEST
        and part.isprintable()
        and not part.startswith((".", " "))
        and not part.endswith((".", " "))
        and not set(part) & set('\\:*?"<>|')
    )


def make_index(run: Run, files: dict[str, Path], card: bytes, rows: bool) -> Index:
    """Hash what is shared; a file that is not what the run's manifest says is not shared."""
    entries = {name: Entry(path.stat().st_size, sha256(path)) for name, path in files.items()}
    expected = {EXAMPLES: run.manifest["examples_sha256"]}
    expected |= {shard.file: record["sha256"] for shard, record in zip(run.shards, run.manifest["shards"], strict=True)}
    for name in entries.keys() & expected.keys():
        if entries[name].sha256 != expected[name]:
            raise UserError(f"{files[name]} is damaged. `npeff verify {run.path}` mends it.")
    entries[CARD] = Entry(len(card), hashlib.sha256(card).hexdigest())
    return Index(run.fingerprint, rows, entries)


def read_index(content: bytes, where: str) -> Index:
    """The index of a shared run, refused if there is anything in it that `make_index` does not write."""
    try:
        values = json.loads(content)
        version = values["format"]
        if version != FORMAT:
            raise UserError(
                f"{where} is shared in format {version!r}; this npeff knows format {FORMAT}. Upgrade npeff."
            )
        files = {name: _entry(name, entry) for name, entry in values["files"].items()}
        index = Index(str(values["run"]), bool(values["rows"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{INDEX} of {where} is damaged: {error}. Get it again, or ask who shared it.") from error
    for name in _suspicious(files):
        raise UserError(f"{where} lists {name!r}, which is no file of a run. Nothing was copied; do not trust it.")
    missing = [name for name in (MANIFEST, EXAMPLES) if name not in files]
    if missing:
        raise UserError(f"{where} is not a whole run: it lacks {' and '.join(missing)}.")
    return index


def _entry(name: str, entry: dict[str, Any]) -> Entry:
    size, digest = entry["size"], entry["sha256"]
    well_formed = isinstance(size, int) and size >= 0 and isinstance(digest, str) and len(digest) == 64
    if not well_formed:
        raise ValueError(f"size or hash of {name!r} is wrong")
    return Entry(size, digest)


def _suspicious(files: dict[str, Entry]) -> Iterator[str]:
    yield from (name for name in files if not is_shared_name(name))
    seen: dict[str, str] = {}
    for name in files:  # one file on systems that do not tell capital letters apart
        if seen.setdefault(name.casefold(), name) != name:
            yield name
