"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import ClassVar

import tyro

from npeff.utils import Record

FEWEST = 200
"""Examples of a demo: with fewer, too few are held out to choose and to measure on."""


class DemoConfig(Record):
    """Find and test components of the embedded model on the embedded film reviews. Nothing is downloaded."""

    least: ClassVar[dict[str, int]] = {"examples": FEWEST, "components": 1}

    run: str | None = None
    """Directory of the run: runs/demo, or runs/demo-N for N instead of 1000 examples. A second demo in it only does
    what has changed."""
    examples: int | None = None
    """Review snippets to use; 1000, or what the environment variable NPEFF_DEMO_EXAMPLES says."""
    components: int | None = None
    """Components to look for; one for every 15 examples that are fitted if not given."""


class VerifyConfig(Record):
    """Check the files of a run by their hashes, name the damaged ones, and collect shards and table again.

    Results are checked too: decompositions, analyses, perturbations and labels. Of those it only says what to do.
    """

    run: tyro.conf.Positional[str]
    """Run directory."""
    repair: bool = True
    """Collect damaged shards again; without, only name them (exit code 2 if there are any)."""


class ReplayConfig(Record):
    """Run again what made a run, a decomposition or a perturbation, with the very config that it was made with."""

    made: tyro.conf.Positional[str]
    """Run directory, or a directory in its decompositions or perturbations."""
    to: str | None = None
    """Run directory to do it in; without it the same one, where what is there is continued or kept."""
