"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from npeff.utils.errors import UserError

ALL = "all"
Direction = Literal["whiten", "reject", "plain"]


@dataclass(frozen=True)
class SensingConfig:
    """Options of compressed sensing; the defaults are the paper's."""

    mu: float = 4e-5
    """Weight of the residual is 1/mu: the smaller, the denser the vector. For a sketch of norm 1 and h of length 1."""
    gamma: float = 0.99
    """Continuation starts where the vector leaves zero, times this."""
    beta: float = 4.0
    """Factor by which mu falls between steps of the continuation."""
    inner_iterations: int = 1
    """Most iterations for each mu; more are slower and fit the sketch more closely."""
    inner_tolerance: float = 1e-3
    """An inner loop ends when the vector changes by less than this share of its length."""
    long_steps: bool = False
    """Lengthen steps where the sketch allows (Barzilai and Borwein's rule, as the authors' later FPC-BB does): what is
    very sparse is found in tens of iterations instead of thousands, given 20 inner iterations."""
    debias: int = 0
    """Conjugate-gradient steps on the entries found, to undo the shrinkage of their sizes; the paper has none."""

    def __post_init__(self) -> None:
        if not (self.mu > 0 and 0 < self.gamma < 1 and self.beta > 1 and self.inner_iterations >= 1):
            raise UserError("Sensing needs mu > 0, gamma between 0 and 1, beta > 1 and at least one inner iteration.")


@dataclass(frozen=True)
class PerturbConfig:
    """Change the model's parameters along components and measure whose predictions change. Resumes by component."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    decomposition: str | None = None
    """Name of the decomposition, not needed if there is only one; `all`: one after another, in one table."""
    components: tuple[int, ...] = ()
    """Components to perturb; without any, --count of them are drawn at random."""
    count: int = 8
    """Components to draw; only those with at least --top examples."""
    way: Literal["lift", "sensing"] = "lift"
    """lift: the exact vector, by a weighted backward pass over the run's examples. sensing: the paper's, from the
    sketch alone."""
    direction: Direction = "whiten"
    """whiten: least effect on other examples. reject: the paper's, orthogonal to other components. plain: neither."""
    threshold: float = 0.5
    """reject: components with a cosine of at least this size are not rejected from."""
    ridge: float | None = None
    """whiten: what is added to the mean Fisher; chosen on held-out examples if not given."""
    background_rows: int = 4096
    """whiten: most Fisher rows of the background; random examples are never in it, nor a component's top examples."""
    carriers: float = 0.3
    """whiten: share of the examples that carry the direction, which is solved anew for them; fewer lift faster."""
    fidelity: float = 0.999
    """lift: use as few examples as give this cosine with the whole sum; 1 uses all. What whitening has cancelled comes
    back with the examples left out, so it needs a high one."""
    top: int = 16
    """Top examples of a component."""
    random: int = 128
    """Random examples to compare with."""
    magnitude: float | None = None
    """Length of the change (20 in the paper); without it, the length that gives top examples --target-kl."""
    target_kl: float = 0.1
    """Mean KL divergence of top examples to reach, so that methods are compared at equal effect."""
    predict: bool = True
    """Also say the ratio that derivatives predict; without it, measuring takes little more than half as long."""
    curve: tuple[float, ...] = ()
    """Also measure the ratio at these multiples of the magnitude, as 0.1 0.3 1 3, for a figure."""
    save: Literal["nothing", "delta", "adapter", "model"] = "nothing"
    """Write the change of the best sign: alone, as a low-rank adapter (PEFT's layout), or in a copy of the model."""
    adapter_share: float = 0.9
    """adapter: share of each matrix's squared length to keep."""
    adapter_rank: int = 64
    """adapter: largest rank it may take."""
    memory_gb: float = 4.0
    """For the vectors that are lifted together: one takes 4 bytes a parameter."""
    seed: int = 0
    """Seed of the components and examples that are drawn."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""
    label: str | None = None
    """Name of the results; made from decomposition, direction and way if not given."""
    overwrite: bool = False
    """Replace results of the same name that were made with other options."""
    sensing: SensingConfig = field(default_factory=SensingConfig)

    def __post_init__(self) -> None:
        if min(self.count, self.top, self.random, self.background_rows, self.adapter_rank) < 1:
            raise UserError("--count, --top, --random, --background-rows and --adapter-rank must be at least 1.")
        for name in ("target_kl", "memory_gb", "magnitude", "ridge"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} should be above 0, not {value}.")
        if any(not factor > 0 for factor in self.curve):
            raise UserError("--curve takes multiples above 0.")
        for name in ("fidelity", "threshold", "carriers", "adapter_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"--{name.replace('_', '-')} should be above 0 and at most 1.")
        if self.label is not None and (not self.label or Path(self.label).name != self.label or self.label[0] == "."):
            raise UserError(f"{self.label!r} cannot be the name of a directory.")
        if self.decomposition == ALL and (self.label is not None or self.components):
            raise UserError(f"--decomposition {ALL} goes without --label and --components, which are for a single one.")
