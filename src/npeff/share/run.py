"""`npeff push` and `npeff pull`: a run's results, to others and from them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from tqdm import tqdm

from npeff.share.card import make_card
from npeff.share.config import PullConfig, PushConfig
from npeff.share.hub import HUB, Place, is_empty_or_shared, open_place
from npeff.share.index import CARD, INDEX, Index, make_index, read_index, shared_files
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import disk_errors, only_one, sha256
from npeff.utils.text import amount


def push(config: PushConfig) -> str:
    """Share `config.run` at `config.to`; returns the hash of the index, by which others can ask for exactly this."""
    run = Run.open(config.run)
    place = open_place(config.to, public=config.public)
    if config.rows and not run.has_rows:
        raise UserError(f"{run.path} has no rows to share. {run.how_to_get_rows}")
    _check_replaceable(place, run)
    card = make_card(run, place.name if place.name.startswith(HUB) else None, config.rows)  # analyses what is not yet
    files = shared_files(run, config.rows)
    index = make_index(run, files, card, config.rows)
    content = index.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    where = place.put(files, {CARD: card, INDEX: content}, f"Share {run.path.name}")
    total = sum(entry.size for entry in index.files.values())
    print(f"{len(index.files)} files, {amount(total)}, {'with' if config.rows else 'without'} rows: {where}")
    print(f"sha256 {digest}")
    return digest


def _check_replaceable(place: Place, run: Run) -> None:
    names = place.names()
    if not is_empty_or_shared(names):
        raise UserError(f"{place.name} holds other files ({', '.join(names[:3])}). Choose another place.")
    if names:
        index = read_index(_fetch_bytes(place, INDEX), place.name)
        if index.fingerprint != run.fingerprint:
            raise UserError(f"{place.name} holds another run. Choose another place.")


def _fetch_bytes(place: Place, name: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="npeff-") as folder:
        target = Path(folder) / "fetched"
        place.fetch(name, target)
        return target.read_bytes()


def pull(config: PullConfig) -> Run:
    """Copy a shared run to `config.run`, whole or not at all; returns it."""
    path = Path(config.run)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is there already. Choose a new directory for the run.")
    place = open_place(config.source, config.revision)
    index = _trusted_index(place, config.sha256)
    staging = path.absolute().with_name(f".{path.absolute().name}.pull.partial")
    with only_one(staging):
        _copy_files(place, index, staging)
        run = Run.open(staging)
        if run.fingerprint != index.fingerprint:
            raise UserError(f"{place.name} lists another run than it holds: do not trust it.")
        with disk_errors(path):
            (staging / ".lock").unlink(missing_ok=True)
            staging.rename(path)  # takes the place of an empty directory too
    run = Run.open(path)
    print(f"{len(index.files)} files are as they were shared: {path}")
    if not index.rows:
        print(f"The rows were not shared. {run.how_to_get_rows}")
    return run


def _trusted_index(place: Place, digest: str | None) -> Index:
    """The index of a shared run, after a check that nothing else is there."""
    names = place.names()
    if INDEX not in names:
        hint = f" For a repository on the Hub write {HUB}owner/name." if not place.name.startswith(HUB) else ""
        raise UserError(f"{place.name} is not a shared run: there is no {INDEX}.{hint}")
    content = _fetch_bytes(place, INDEX)
    if digest is not None and hashlib.sha256(content).hexdigest() != digest.lower():
        raise UserError(f"{place.name} is not the one you asked for: the SHA-256 of its {INDEX} differs.")
    index = read_index(content, place.name)
    strangers = sorted(set(names) - index.files.keys() - {INDEX})
    if strangers:
        raise UserError(
            f"{place.name} holds files that it does not list ({', '.join(strangers[:3])}): do not trust it."
        )
    missing = sorted(index.files.keys() - set(names))
    if missing:
        raise UserError(f"{place.name} is not whole: it lacks {', '.join(missing[:3])}.")
    return index


def _copy_files(place: Place, index: Index, staging: Path) -> None:
    """Fill `staging` with exactly the files of the index, each checked; what a broken pull has fetched is kept."""
    for path in sorted(staging.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(staging).as_posix() not in {*index.files, ".lock"}:
            path.unlink()
    total = sum(entry.size for entry in index.files.values())
    if total > shutil.disk_usage(staging).free:
        raise UserError(f"The run takes {amount(total)}, more than is free on the disk of {staging.parent}.")
    for name, entry in tqdm(index.files.items(), desc="Pulling", unit="file"):
        target = staging / name
        if target.is_file() and target.stat().st_size == entry.size and sha256(target) == entry.sha256:
            continue
        place.fetch(name, target)
        if target.stat().st_size != entry.size or sha256(target) != entry.sha256:
            target.unlink()
            raise UserError(f"{name} of {place.name} is damaged (its SHA-256 differs). No run was made; pull again.")
