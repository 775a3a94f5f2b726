"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

import tyro

from npeff.store.layout import check_name
from npeff.utils import Record, UserError


class SteerConfig(Record):
    """Let the model answer and go on with a text while a component is turned up or down, beside the model as it is.

    Weights are changed in memory, and put back bit for bit.
    """

    run: tyro.conf.Positional[str]
    """Run directory."""
    text: tyro.conf.Positional[str]
    """The text; it takes its place in the run's prompt."""
    component: int
    """Number of the component."""
    strength: tuple[float, ...] = (2.0, -2.0)
    """How far to turn it. At 1 the answers of held-out examples that use the component most change by a KL divergence
    of 0.1, to second order; above 0 towards the answers that the model gives them anyway."""
    tokens: int = 24
    """Most tokens to go on with; the likeliest one is taken each time."""
    plain: bool = False
    """Go on with the text as it is, without the run's prompt and its answers."""
    decomposition: str | None = None
    """Name of the decomposition; the newest that `npeff decompose` has made if not given."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""

    def _check(self) -> None:
        if self.tokens < 0 or not self.text:
            raise UserError("Give a text that is not empty, and at least 0 --tokens.")


class DiffConfig(Record):
    """Compare the components of two models, or of a series of checkpoints, on the same examples."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories of models that were asked the same examples. The first is compared with the last; more than two
    also tell when each component of the last one appears."""
    decomposition: tuple[str, ...] = ()
    """Name of the decomposition of each run; the newest that `npeff decompose` has made if not given."""
    refits: int = 4
    """How often each decomposition is made again, from other seeds and of halves of the examples, to see what changes
    although the model does not."""
    diff: str | None = None
    """Name of the results; that of the first run if not given."""

    def _check(self) -> None:
        check_name(self.diff, "--diff")
        if min(self.refits, len(self.runs)) < 2 or len(self.decomposition) not in (0, len(self.runs)):
            raise UserError("Give two runs or more, a --decomposition for each or none, and at least 2 --refits.")
