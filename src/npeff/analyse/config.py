"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from dataclasses import field
from typing import ClassVar

import tyro

from npeff.decompose.config import METHODS, Method, SaeConfig, SolverConfig
from npeff.utils import Record, UserError


class AnalyseConfig(Record):
    """Say what the components of a run's decompositions are tuned to. Writes tables, figures and JSON beside them."""

    renamed: ClassVar[dict[str, str]] = {"name": "decomposition"}
    removed: ClassVar[dict[str, str]] = {"correlated": "the eight most correlated components are listed."}
    least: ClassVar[dict[str, int]] = {"top": 2, "refits": 0}

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    decomposition: str | None = None
    """Name of the decomposition to analyse; without it, every finished one of the run."""
    top: int = 16
    """Top examples that must agree for a component to be tuned; components with fewer active ones are left out."""
    unique: bool = False
    """Count only the first of several top examples with the same text."""
    refits: int | None = None
    """How often NPEFF is fitted again, from other seeds and to halves of the examples, to see which components recur.
    If not given, 4 times where that takes less than about two minutes."""


class CompareConfig(Record):
    """Decompose a run with several methods, analyse each, and put their tunings side by side. Continues if stopped."""

    common: ClassVar[tuple[str, ...]] = ("methods", "components", "seed", "top")
    least: ClassVar[dict[str, int]] = {"components": 1, "top": 2}

    run: tyro.conf.Positional[str]
    """Directory of the run; one collection with Fishers, gradients and activations feeds all methods."""
    methods: tuple[Method, ...] = METHODS
    """Methods to compare."""
    components: int | None = None
    """Number of components of each; chosen from the number of examples if not given."""
    seed: int = 0
    """Seed of each."""
    top: int = 16
    """Top examples that must agree for a component to be tuned."""
    unique: bool = False
    """Count only the first of several top examples with the same text."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    sae: SaeConfig = field(default_factory=SaeConfig)

    def _check(self) -> None:
        if not self.methods:
            raise UserError("Give at least one method.")


class StabilityConfig(Record):
    """Decompose a run with several seeds and numbers of components, and compare the results. Continues if stopped."""

    removed: ClassVar[dict[str, str]] = {"against": "`npeff diff RUN OTHER` compares two runs of the same examples."}
    least: ClassVar[dict[str, int]] = {"components": 1, "top": 2}

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    components: tuple[int, ...] = ()
    """Numbers of components; seeds are compared for each, and splits between each two of them. If not given, one
    number is chosen from the number of examples, and a quarter of it."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds to compare; splits are those of the first."""
    method: Method = "npeff"
    """Method to decompose with."""
    top: int = 16
    """Top examples that must agree for a component to be tuned."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    def _check(self) -> None:
        for name in ("components", "seeds"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or (name == "seeds" and not values):
                raise UserError(f"--{name} should be different numbers, at least one.")
        if len(self.seeds) < 2 and len(self.components) == 1:
            raise UserError("Nothing to compare: give two seeds or two numbers of components.")


class SpectraConfig(Record):
    """Mean eigenvalue decay of a run's per-example Fishers, as collected."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""


class SweepConfig(SolverConfig, kw_only=True):
    """Fit a run with several numbers of components and say which to take. Continues if stopped."""

    common: ClassVar[tuple[str, ...]] = ("components", "method", "seed", "holdout")
    removed: ClassVar[dict[str, str]] = {"name": "a sweep is named after its method and seed."}

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    components: tuple[int, ...] = ()
    """Numbers of components to try; chosen from the number of examples if not given."""
    holdout: float = 0.5
    """Share of examples to hold out."""

    def _check(self) -> None:
        if not 0 < self.holdout < 1:
            raise UserError(f"holdout is a share of the examples, above 0 and below 1, not {self.holdout}.")


class ProbeConfig(Record):
    """Collect texts with a run's model, task and sketch, and print which components explain how much of them."""

    renamed: ClassVar[dict[str, str]] = {"top": "components"}
    least: ClassVar[dict[str, int]] = {"components": 1, "examples": 0}

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    texts: tyro.conf.Positional[tuple[str, ...]]
    """Texts to probe, each in quotes."""
    decomposition: str | None = None
    """Name of the decomposition; the run's default if not given."""
    components: int = 8
    """Number of components to print for a text."""
    examples: int = 1
    """Top examples of the run to print for a component."""

    def _check(self) -> None:
        if not self.texts:
            raise UserError("Give at least one text, in quotes.")
