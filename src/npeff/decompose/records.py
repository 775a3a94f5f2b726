"""What the JSON files of a decomposition hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from npeff.decompose.config import FitConfig, Method


@dataclass(frozen=True)
class Replay:
    """The command that made a decomposition, for `npeff replay`."""

    command: str
    """Always "decompose"."""
    config: dict[str, Any]
    """Its options, as in `DecomposeConfig`; the name and the number of components are those that were chosen."""


@dataclass
class Notes:
    """Where a decomposition comes from, and what is known of held-out examples."""

    run: str | None = None
    """Fingerprint of the run that was decomposed."""
    holdout: float = 0.0
    """Share of examples that were held out."""
    held_out: list[int] = field(default_factory=list)
    """The examples that components were not fitted to, in ascending order."""
    held_in_loss: float | None = None
    """Mean loss of the other usable examples; None if no examples were held out."""
    held_out_loss: float | None = None
    """Mean loss of usable held-out examples; None if there are none."""
    replay: Replay | None = None
    """The command that made it; None if it was fitted in Python."""
    made: str = ""
    """When it was saved (UTC, ISO 8601): the newest decomposition is the run's default."""
    made_for: str | None = None
    """The command that needed it on its way (`compare`, `stability`); None if it is wanted for its own sake."""


@dataclass(frozen=True)
class Outcome:
    """How a fit ended."""

    ending: str
    """As in `History.ending`."""
    reseeded: int
    """Components that died and were started again."""
    loss: float | None
    """Mean loss per example that is not zero; None if nothing was fitted."""


@dataclass(frozen=True)
class SavedDecomposition:
    """config.json of a decomposition: everything but its tensors."""

    npeff: str
    """Version that wrote it."""
    method: Method
    """The method, as in `config`."""
    components: list[int]
    """Shape [C, p] of the components."""
    config: FitConfig
    """Options of the fit."""
    history: Outcome
    """How the fit ended."""
    notes: Notes
    """Where it comes from."""
    sha256: str
    """Hash of tensors.safetensors."""


@dataclass(frozen=True)
class Spread:
    """Least, middle and largest of some counts."""

    min: int
    median: int
    max: int


@dataclass(frozen=True)
class Diagnostics:
    """diagnostics.json: what to look at before trusting the components."""

    verdict: str
    """How the fit ended, in words."""
    passes: int
    """Number of passes."""
    loss: float | None
    """Mean loss per example that is not zero."""
    ending: str
    """As in `History.ending`."""
    reseeded: int
    """Components that died and were started again."""
    unused_components: int
    """Components that no example uses; should be 0."""
    examples_per_component: Spread
    """Number of examples that use a component."""
    components_per_example: float
    """Mean number of components that an example uses."""
    component_energy: list[float]
    """Share of each component in the squared coefficients."""
    worst_examples: list[int]
    """The 16 examples that are explained least, worst first."""
    worst_residuals: list[float]
    """Their residuals."""
    held_in_loss: float | None
    """As in the notes of config.json."""
    held_out_loss: float | None
    """As in the notes of config.json."""
