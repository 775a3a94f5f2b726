"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class PushConfig:
    """Share a run's results in a folder, a zip file or on the Hugging Face Hub, with a card and hashes of all files."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    to: tyro.conf.Positional[str]
    """Folder, file NAME.zip, or hf://owner/name. An earlier push of the same run is replaced; anything else
    is left alone."""
    rows: bool = False
    """Also share the collected rows. They are large; without them a run can be explored and analysed, and its rows
    collected again, but not decomposed."""
    public: bool = False
    """Make a new repository on the Hub public. The texts of the examples are part of what is shared."""


@dataclass(frozen=True)
class PullConfig:
    """Get a shared run from a folder, a zip file or the Hugging Face Hub. Every file is checked by its hash."""

    source: tyro.conf.Positional[str]
    """Folder, file NAME.zip, or hf://owner/name."""
    run: tyro.conf.Positional[str]
    """Run directory to make; it must not be there yet."""
    revision: str | None = None
    """Branch, tag or commit of the Hub's repository."""
    sha256: str | None = None
    """Hash that `npeff push` has printed; anything else is refused."""
