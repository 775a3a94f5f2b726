"""Where runs are shared: a folder, a zip file, or a repository on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import shutil
import stat
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from npeff.share.index import INDEX
from npeff.utils.errors import UserError
from npeff.utils.files import disk_errors, whole_directory, whole_file

HUB = "hf://"
ZIP = ".zip"
_AT_ONCE = 1 << 20
_HUB_PACKAGES = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")
_OF_THE_HUB = {".gitattributes"}
"""Files that the Hub itself adds to a repository."""


class Place(Protocol):
    """Somewhere a shared run lies, or will."""

    name: str

    def names(self) -> list[str]:
        """Names of all files there; empty if there is nothing yet."""

    def fetch(self, name: str, target: Path) -> None:
        """Write the file `name` to `target`."""

    def put(self, files: Mapping[str, Path], texts: Mapping[str, bytes], message: str) -> str:
        """Put files there in place of what was there, whole or not at all; returns where people find them."""


def open_place(name: str, revision: str | None = None, public: bool = False) -> Place:
    """The place that a user means: `hf://owner/name`, a file `NAME.zip`, or else a folder."""
    if not name.startswith(HUB):
        if revision is not None:
            raise UserError(f"--revision is for repositories on the Hub (hf://owner/name), which {name!r} is not.")
        return Archive(Path(name)) if name.endswith(ZIP) else Folder(Path(name))
    repository = name.removeprefix(HUB)
    if len([part for part in repository.split("/") if part]) != 2 or repository.count("/") != 1:
        raise UserError(f"{name!r} does not name a repository on the Hub. Write hf://owner/name.")
    return Hub(repository, revision, public)


class Folder:
    """A folder on this machine, or on a disk that others see too."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def names(self) -> list[str]:
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder.")
        if not (self.path / INDEX).is_file():  # not a shared run, however much there may be
            return sorted(path.name for path in self.path.iterdir())
        found = []
        for path in sorted(self.path.rglob("*")):
            if path.is_symlink():
                raise UserError(f"{path} is a link. A shared run has none: do not trust it.")
            if path.is_file():
                found.append(path.relative_to(self.path).as_posix())
            elif not path.is_dir():
                raise UserError(f"{path} is neither file nor folder. A shared run has only these: do not trust it.")
        return found

    def fetch(self, name: str, target: Path) -> None:
        source = self.path / name
        if not source.is_file():
            raise UserError(f"{self.path} has no {name}.")
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target, follow_symlinks=False)

    def put(self, files: Mapping[str, Path], texts: Mapping[str, bytes], message: str) -> str:
        with whole_directory(self.path) as new:
            for name, source in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, new / name)
            for name, content in texts.items():
                (new / name).write_bytes(content)
        return str(self.path)


class Archive:
    """A zip file. What is in it is not compressed: tensors hardly can be."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def names(self) -> list[str]:
        if not self.path.exists():
            return []
        with self._open() as archive:
            entries = archive.infolist()
        names = Counter(entry.filename for entry in entries)
        for entry in entries:
            if entry.is_dir() or stat.S_ISLNK(entry.external_attr >> 16) or names[entry.filename] > 1:
                raise UserError(f"{self.path} has an entry {entry.filename!r} that no shared run has: do not trust it.")
        return sorted(names)

    def fetch(self, name: str, target: Path) -> None:
        with self._open() as archive, disk_errors(target):
            try:
                size = archive.getinfo(name).file_size
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, target.open("wb") as handle:
                    # an entry may unpack to more than it says
                    for start in range(0, size, _AT_ONCE):
                        handle.write(source.read(min(_AT_ONCE, size - start)))
            except (KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
                raise UserError(f"Cannot read {name} in {self.path}: {error}.") from error

    def put(self, files: Mapping[str, Path], texts: Mapping[str, bytes], message: str) -> str:
        with whole_file(self.path) as temporary, zipfile.ZipFile(temporary, "x") as archive:
            for name, content in texts.items():
                archive.writestr(name, content)
            for name, path in files.items():
                archive.write(path, name)
        return str(self.path)

    def _open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"Cannot read {self.path}: {error}.") from error


@dataclass
class Hub:
    """A model repository on the Hugging Face Hub. Who is logged in, and which Hub, is the Hub client's own business."""

    repository: str
    revision: str | None = None
    public: bool = False

    def __post_init__(self) -> None:
        self.name = HUB + self.repository

    def names(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._errors():
            try:
                found = HfApi().list_repo_files(self.repository, revision=self.revision)
            except RepositoryNotFoundError:  # one that is private looks the same
                return []
        return sorted(set(found) - _OF_THE_HUB)

    def fetch(self, name: str, target: Path) -> None:
        from huggingface_hub import hf_hub_download

        with self._errors():
            # the client continues a broken download, and gives a link into its cache: what is behind it is copied
            found = Path(hf_hub_download(self.repository, name, revision=self.revision))
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target)

    def put(self, files: Mapping[str, Path], texts: Mapping[str, bytes], message: str) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi()
        wanted: dict[str, Path | bytes] = {**files, **texts}
        with self._errors(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*commit a data file.*"
            )  # the example table is meant to be there
            api.create_repo(self.repository, private=not self.public, exist_ok=True)
            stale = set(self.names()) - wanted.keys()
            # one commit, so nobody ever sees half of it
            done = api.create_commit(
                self.repository,
                [
                    *(CommitOperationAdd(name, content) for name, content in wanted.items()),
                    *(CommitOperationDelete(name) for name in sorted(stale)),
                ],
                commit_message=message,
            )
        return str(done.commit_url)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the Hub or the way to it refuses, as a message."""
        try:
            yield
        except Exception as error:
            # the client has errors of its own, and lets those of the libraries below it through
            package = type(error).__module__.split(".")[0]
            if not isinstance(error, OSError | ValueError) and package not in _HUB_PACKAGES:
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"The Hub did not give or take {self.repository}: {reason} "
                f"(`hf auth login` logs in; HF_ENDPOINT names another Hub.)"
            ) from error


def is_empty_or_shared(names: list[str]) -> bool:
    """Whether a place has nothing in it, or a shared run."""
    return not names or INDEX in names
