"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import ClassVar

import tyro

from npeff.utils import Record, UserError


class ExploreConfig(Record):
    """Look at a run's components in the browser. Serves on this machine only; Ctrl-C ends it."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    open: bool = True
    """Open the page in the default browser."""
    device: str | None = None
    """Where to run the model for texts that you try: cpu, cuda, ...; the device of the collection if not given."""
    decomposition: str | None = None
    """Decomposition to open; the run's default (the newest that `npeff decompose` made) if not given."""

    def _check(self) -> None:
        if not 0 <= self.port < 65536:
            raise UserError(f"--port {self.port} is not a port; give one from 1 to 65535, or 0 for a free one.")


class ExportConfig(Record):
    """Write the page of a run as static files. Decompositions that are not analysed yet are analysed first."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    out: tyro.conf.Positional[str]
    """Directory to write; an earlier export in it is replaced, anything else is left alone."""
    decomposition: str | None = None
    """Decomposition that the page opens on; the run's default (the newest that `npeff decompose` made) if not given."""


class ThemesConfig(Record):
    """List the themes and notes that people gave to a run's components, or write them to a file."""

    removed: ClassVar[dict[str, str]] = {"json": "--csv writes them, and RUN/annotations/NAME.jsonl has them as JSON."}

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    decomposition: str | None = None
    """Only the themes of this decomposition; those of all if not given."""
    csv: str | None = None
    """File to write as CSV."""
