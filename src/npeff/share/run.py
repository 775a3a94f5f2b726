"""`npeff push` and `npeff pull`: a run's results, to others and from them.

    share.json     the index: version, fingerprint of the run, and the size and SHA-256 of every file
    README.md      the card
    ...            files of the run, under the names that they have in it

An index from somewhere else is not trusted: `read_index` refuses every name that is not of the kinds listed here, so
that a pull writes only files of a run, and only below the run's directory.
"""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from npeff.share.card import make_card
from npeff.share.config import PullConfig, PushConfig
from npeff.share.hub import HUB, INDEX, Place, open_place
from npeff.store.layout import DECOMPOSITIONS, EXAMPLES, MANIFEST, RESULTS, SHARDS, decomposition_names
from npeff.store.run import Run
from npeff.utils import Record, UserError, __version__, amount, from_dict, write_record
from npeff.utils.files import disk_errors, only_one, sha256, write_text

FORMAT = 1
CARD = "README.md"
SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".tex", ".png", ".svg", ".safetensors")
CHANGED_MODELS = ("delta", "adapter", "model")
"""Folders that `--save` writes: as large as the model, and not needed to look at results."""
_SHARD = re.compile(rf"{SHARDS}/[0-9]+\.safetensors")
_DEEPEST = 6
_LONGEST = 255
LARGEST_INDEX = 10**8
"""Bytes that an index may have, so that a hostile one does not fill the memory."""


class Entry(Record):
    """A shared file, as the index lists it."""

    size: int
    """Bytes."""
    sha256: str
    """Hash of its content, in hexadecimal digits."""


class Index(Record):
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


def push(config: PushConfig) -> str:
    """Share a run.

    Args:
        config: The run, and where to.

    Returns:
        SHA-256 of the index, with which others can ask for exactly this.

    Raises:
        UserError: There are no rows to share, or the place holds something else.
    """
    run = Run.open(config.run)
    place = open_place(config.to, public=config.public)
    if config.rows and not run.has_rows:
        raise UserError(f"{run.path} has no rows to share. {run.how_to_get_rows}")
    _check_replaceable(place, run)
    card = make_card(run, config.to if config.to.startswith(HUB) else None, config.rows)
    files = shared_files(run, config.rows)  # with the analyses that were made for the card
    with tempfile.TemporaryDirectory(prefix="npeff-") as folder:
        files |= {name: Path(folder, name) for name in (CARD, INDEX)}
        write_text(files[CARD], card)
        index = make_index(run, {name: path for name, path in files.items() if name != INDEX}, config.rows)
        write_record(files[INDEX], index)
        digest = sha256(files[INDEX])
        where = place.put(files, f"Share {run.path.name}")
    total = sum(entry.size for entry in index.files.values())
    print(f"{len(index.files)} files, {amount(total)}, {'with' if config.rows else 'without'} rows: {where}")
    print(f"sha256 {digest}")
    return digest


def _check_replaceable(place: Place, run: Run) -> None:
    """Refuse to replace anything but an earlier push of the same run."""
    sizes = place.sizes()
    if sizes and INDEX not in sizes:
        raise UserError(f"{place.name} holds other files ({', '.join(sorted(sizes)[:3])}). Choose another place.")
    if sizes and _fetch_index(place, sizes)[0].run != run.fingerprint:
        raise UserError(f"{place.name} holds another run. Choose another place.")


def _fetch_index(place: Place, sizes: dict[str, int]) -> tuple[Index, str]:
    """The index of a shared run, and its SHA-256."""
    if sizes[INDEX] > LARGEST_INDEX:
        raise UserError(f"{INDEX} of {place.name} has {amount(sizes[INDEX])}: do not trust it.")
    with tempfile.TemporaryDirectory(prefix="npeff-") as folder:
        place.fetch([INDEX], Path(folder))
        path = Path(folder, INDEX)
        return read_index(path.read_bytes(), place.name), sha256(path)


def pull(config: PullConfig) -> Run:
    """Copy a shared run, whole or not at all.

    Args:
        config: Where from, and the run directory to make.

    Returns:
        The run.

    Raises:
        UserError: The run directory exists, or what is shared is not a whole and undamaged run.
    """
    path = Path(config.run)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already. Choose a new directory for the run.")
    place = open_place(config.source, config.revision)
    index = _trusted_index(place, config.sha256)
    staging = path.absolute().with_name(f".{path.absolute().name}.pull.partial")
    with only_one(staging):
        _fetch_files(place, index, staging)
        if Run.open(staging).fingerprint != index.run:
            raise UserError(f"{place.name} lists another run than it holds: do not trust it.")
        with disk_errors(path):
            (staging / ".lock").unlink(missing_ok=True)
            staging.rename(path)  # also replaces an empty directory
    run = Run.open(path)
    print(f"{len(index.files)} files are as they were shared: {path}")
    if not index.rows:
        print(f"The rows were not shared. {run.how_to_get_rows}")
    return run


def _trusted_index(place: Place, digest: str | None) -> Index:
    """The index of a shared run, after a check that exactly the files that it lists are there."""
    sizes = place.sizes()
    if INDEX not in sizes:
        local = f"For a repository on the Hub write {HUB}owner/name."
        hint = "If it is private, log in with `hf auth login`." if place.name.startswith(HUB) else local
        raise UserError(f"{place.name} is not a shared run: there is no {INDEX}. {hint}")
    index, actual = _fetch_index(place, sizes)
    if digest is not None and actual != digest.lower():
        raise UserError(f"{place.name} is not what you asked for: the SHA-256 of its {INDEX} differs.")
    unlisted = ", ".join(sorted(sizes.keys() - index.files.keys() - {INDEX})[:3])
    if unlisted:
        raise UserError(f"{place.name} holds files that it does not list ({unlisted}): do not trust it.")
    wrong = ", ".join([name for name, entry in index.files.items() if sizes.get(name) != entry.size][:3])
    if wrong:
        raise UserError(f"{place.name} is not whole: it lacks {wrong}, or has it in another size than it lists.")
    return index


def _fetch_files(place: Place, index: Index, staging: Path) -> None:
    """Fill `staging` with exactly the files of the index, each checked; what a broken pull has fetched is kept."""
    missing = {name: entry for name, entry in index.files.items() if not _is_whole(staging / name, entry)}
    total = sum(entry.size for entry in missing.values())
    if total > shutil.disk_usage(staging).free:
        raise UserError(f"This takes {amount(total)}, more than is free on the disk of {staging.parent}.")
    if missing:
        place.fetch(missing, staging)
    damaged = [name for name, entry in missing.items() if not _is_whole(staging / name, entry)]
    for name in damaged:
        (staging / name).unlink(missing_ok=True)
    if damaged:
        raise UserError(f"{damaged[0]} of {place.name} is damaged (its SHA-256 differs). No run was made; pull again.")
    for path in sorted(staging.rglob("*"), reverse=True):  # of other pulls, and what the Hub's client notes down
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.relative_to(staging).as_posix() not in {*index.files, ".lock"}:
            path.unlink()


def _is_whole(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size and sha256(path) == entry.sha256


# --- what of a run is shared ------------------------------------------------------------------------------------------


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
    changed_model = len(parts) > 3 and parts[2] in CHANGED_MODELS
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
    expected = {EXAMPLES: run.manifest.examples_sha256}
    expected |= {shard.file: record.sha256 for shard, record in zip(run.shards, run.manifest.shards, strict=True)}
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
