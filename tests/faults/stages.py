"""What is done in processes that are killed, other than commands: labels are given as the explorer's server does."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from npeff.explore.themes import Themes
from npeff.store.run import Run

EDITS = 60


def edit_labels(arguments: Sequence[str]) -> int:
    """Give labels, one after another, that are not in the journal of RUN's decomposition NAME yet."""
    run, name = arguments
    book = Themes(Run.open(run), name)
    done = {annotation.theme for j in range(book.components) for annotation in book.history(j)}
    for number in range(EDITS):
        if f"label {number}" not in done:
            book.add(number % book.components, f"label {number}", f"note {number} " * 50, who="Ada")
    return 0


def shell(arguments: Sequence[str]) -> int:
    """Run a line of shell where the fork server is: it may see other disks than we do."""
    (command,) = arguments
    return subprocess.run(["sh", "-c", command], check=False).returncode
