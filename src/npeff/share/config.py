"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

import tyro

from npeff.utils import Record


class PushConfig(Record):
    """Share a run's results in a folder, a zip file or on the Hugging Face Hub, with a card and hashes of all files."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    to: tyro.conf.Positional[str]
    """Folder, file NAME.zip, or hf://owner/name. An earlier push of the same run is replaced; anything else that
    is there is left as it is, and the push is refused."""
    rows: bool = False
    """Also share the collected rows, which are most of a run's size. Without them a run can be explored and analysed,
    but not decomposed; `npeff verify` collects them again."""
    public: bool = False
    """hf://: make a new repository public; by default it is private. The texts of the examples are shared too."""


class PullConfig(Record):
    """Get a shared run from a folder, a zip file or the Hugging Face Hub. Every file is checked by its hash."""

    source: tyro.conf.Positional[str]
    """Folder, file NAME.zip, or hf://owner/name."""
    run: tyro.conf.Positional[str]
    """Run directory to make; it must not exist yet, or be empty."""
    revision: str | None = None
    """hf://: branch, tag or commit of the repository."""
    sha256: str | None = None
    """Hash that `npeff push` has printed; anything else is refused."""
