"""Where runs are shared: a folder, a zip file, or a repository on the Hugging Face Hub.

All three have the same methods. A place need not exist before something is put there.

    sizes()                 every file there → its size in bytes; empty if there is nothing
    fetch(names, target)    copy files of these names into the folder `target`; the caller has checked the names
    put(files, message)     replace all that is there with `files` (name → path), or change nothing; returns where it is
"""

import contextlib
import glob
import re
import shutil
import stat
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from tqdm import tqdm

from npeff.utils import UserError
from npeff.utils.files import disk_errors, whole_directory, whole_file

INDEX = "share.json"
"""The file that lists all others of a shared run."""
HUB = "hf://"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""What the name of a repository on the Hub looks like."""


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar that is shown only on a terminal, also where the Hub's client makes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"desc": "Pulling", "unit": "file", **options, "disable": None})


class Folder:
    """A folder on this machine, or on a disk that others see too."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(name)

    def sizes(self) -> dict[str, int]:
        """Files of a shared run; of any other folder, what is directly in it.

        Returns:
            Name → bytes.

        Raises:
            UserError: It is not a folder, or a shared run in it has links or special files.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder.")
        if not (self.path / INDEX).is_file():
            return {path.name: 0 for path in self.path.glob("*")}
        paths = [path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir()]
        for path in paths:
            if path.is_symlink() or not path.is_file():
                raise UserError(f"{path} is a link or a special file, which no shared run has: do not trust it.")
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    def fetch(self, names: Collection[str], target: Path) -> None:
        """Copy files."""
        with disk_errors(target):
            for name in _Bar(names):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, target / name, follow_symlinks=False)

    def put(self, files: Mapping[str, Path], message: str) -> str:
        """Replace the folder; returns its name."""
        with whole_directory(self.path) as new:
            for name, path in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name)
        return self.name


class Archive:
    """A zip file. Its content is not compressed: tensors hardly can be."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(name)

    def sizes(self) -> dict[str, int]:
        """The entries of the zip file.

        Returns:
            Name → bytes after unpacking, as the zip file says.

        Raises:
            UserError: The file cannot be read, or has folders, links or two entries of one name.
        """
        if not self.path.exists():
            return {}
        with self._open() as archive:
            entries = archive.infolist()
        times = Counter(entry.filename for entry in entries)
        for entry in entries:
            if entry.is_dir() or stat.S_ISLNK(entry.external_attr >> 16) or times[entry.filename] > 1:
                raise UserError(f"{self.path} has an entry {entry.filename!r} that no shared run has: do not trust it.")
        return {entry.filename: entry.file_size for entry in entries}

    def fetch(self, names: Collection[str], target: Path) -> None:
        """Unpack entries, each to no more than the size that the zip file says."""
        with self._open() as archive, disk_errors(target):
            for name in _Bar(names):
                archive.extract(name, target)

    def put(self, files: Mapping[str, Path], message: str) -> str:
        """Replace the zip file; returns its name."""
        with whole_file(self.path) as temporary, zipfile.ZipFile(temporary, "x") as archive:
            for name, path in files.items():
                archive.write(path, name)
        return self.name

    @contextlib.contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        """The zip file, for reading; damaged, encrypted and unknown entries are the user's to know about."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise UserError(f"Cannot read {self.path}: {error}.") from error


class Hub:
    """A model repository on the Hugging Face Hub. Which Hub, and who is logged in, is left to the Hub's client."""

    def __init__(self, name: str, revision: str | None, public: bool) -> None:
        self.name, self.repository, self._api = name, name.removeprefix(HUB), HfApi()
        self._revision, self._public = revision, public

    def sizes(self) -> dict[str, int]:
        """Files at the revision; from then on this commit is read, whatever is pushed meanwhile.

        Returns:
            Name → bytes; empty also for a repository that this user may not see.
        """
        with self._errors():
            try:
                self._revision = self._api.model_info(self.repository, revision=self._revision).sha
                tree = list(self._api.list_repo_tree(self.repository, recursive=True, revision=self._revision))
            except RepositoryNotFoundError:
                return {}
        files = [item for item in tree if isinstance(item, RepoFile)]
        return {file.path: file.size for file in files if file.path != ".gitattributes"}  # which the Hub itself adds

    def fetch(self, names: Collection[str], target: Path) -> None:
        """Download files; what a broken download left behind is continued.

        Args:
            names: Files in the repository.
            target: Folder to write them to, under the same names.
        """
        patterns = [glob.escape(name) for name in names]
        with self._errors():
            self._api.snapshot_download(
                self.repository, revision=self._revision, local_dir=target, allow_patterns=patterns, tqdm_class=_Bar
            )

    def put(self, files: Mapping[str, Path], message: str) -> str:
        """Replace the content of the repository, which is made if there is none.

        It is one commit, so that nobody sees a part of it; `upload_folder` makes several if the files are many.

        Args:
            files: Name → path.
            message: Title of the commit.

        Returns:
            Address of the commit.
        """
        stale = self.sizes().keys() - files.keys()
        with self._errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*commit a data file.*")  # the table of examples
            self._api.create_repo(self.repository, private=not self._public, exist_ok=True)
            add, delete = map(CommitOperationAdd, files, files.values()), map(CommitOperationDelete, sorted(stale))
            # with its parent it is refused if somebody else has pushed meanwhile
            commit = self._api.create_commit(
                self.repository, [*add, *delete], commit_message=message, parent_commit=self._revision
            )
        return str(commit.commit_url)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the Hub refuses, or the network, as a message; which exceptions there are depends on the client."""
        try:
            yield
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"The Hub did not give or take {self.repository}: {reason} "
                f"(`hf auth login` logs in; HF_ENDPOINT names another Hub.)"
            ) from error


Place = Folder | Archive | Hub


def open_place(name: str, revision: str | None = None, public: bool = False) -> Place:
    """The place that a user means.

    Args:
        name: `hf://owner/name`, a file `NAME.zip`, or else a folder.
        revision: Branch, tag or commit; only for the Hub.
        public: Whether a new repository is public; only for the Hub.

    Returns:
        The place.

    Raises:
        UserError: The name is not one of the Hub's, or an option does not fit the place.
    """
    if name.startswith(HUB):
        if not HUB_ID.fullmatch(name.removeprefix(HUB)):
            raise UserError(f"{name!r} does not name a repository on the Hub. Write hf://owner/name.")
        return Hub(name, revision, public)
    if revision is not None or public:
        option = "--public" if public else "--revision"
        raise UserError(f"{option} is for repositories on the Hub (hf://owner/name), and {name!r} is none.")
    return Archive(name) if name.endswith(".zip") else Folder(name)
