"""Options of a decomposition. The command line, the Python call and the replay file are made from these classes."""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import ClassVar, Literal, get_args

import tyro

from npeff.store.layout import check_name
from npeff.utils import Record, UserError

Method = Literal["npeff", "gnpeff", "clusters", "sae", "svd-gradients", "svd-activations"]
METHODS: tuple[Method, ...] = get_args(Method)
LIFTABLE_METHODS: tuple[Method, ...] = ("npeff", "gnpeff", "clusters", "svd-gradients")
"""Methods whose components are directions in parameter space."""
METHOD_TITLES: dict[Method, str] = {
    "npeff": "NPEFF",
    "gnpeff": "G-NPEFF",
    "clusters": "GC",
    "sae": "SAE",
    "svd-gradients": "SVD-G",
    "svd-activations": "SVD-A",
}
"""What the paper calls the methods."""


HOLDOUT = 0.3
"""Share of the examples that is held out, if nobody says."""
FEWEST_TO_HOLD_OUT = 160
"""With fewer examples, none are held out: components and what is measured of them would both be worth little."""


class PaperConfig(Record):
    """The solver `paper`: the algorithm as printed.

    Its learning rates are for sums over all examples.
    """

    frozen_steps: int = 1000
    """First steps, in which the coefficients are frozen."""
    joint_steps: int = 3000
    """Steps after them, in which coefficients and components move."""
    frozen_rate: float = 1e-5
    """Learning rate while the coefficients are frozen."""
    joint_rate: float = 3e-4
    """Learning rate after that."""
    tau: float = 0.0
    """A stage ends early when ten steps lower the summed loss by less than this; with 0 it never does."""

    least: ClassVar[dict[str, int]] = {"frozen_steps": 0, "joint_steps": 1, "tau": 0}
    above: ClassVar[dict[str, int]] = {"frozen_rate": 0, "joint_rate": 0}


class SaeConfig(Record):
    """The sparse autoencoder."""

    top_k: int | None = None
    """Latents that may be active in an example (all of them if there are fewer). If not given, one for every 16
    components, at least 1 and at most 32, as in the paper (32 of 512 and of 2,048); or what an earlier command took
    under the same name."""
    sae_rate: float = 1e-3
    """Learning rate of Adam."""
    sae_batch: int = 4096
    """Examples per step of the autoencoder (all of them if there are fewer)."""
    sae_steps: int = 51_200
    """Most steps of the autoencoder."""
    sae_patience: int = 500
    """Stop when the loss of the autoencoder improves by less than the tolerance in this many steps."""

    least: ClassVar[dict[str, int]] = dict.fromkeys(("top_k", "sae_batch", "sae_steps", "sae_patience"), 1)
    above: ClassVar[dict[str, int]] = {"sae_rate": 0}

    def active(self, components: int) -> int:
        """Latents that may be active in an example when there are so many components: see `top_k`."""
        return self.top_k or min(32, max(1, round(components / 16)))


class SolverConfig(Record, kw_only=True):
    """How to decompose, for any number of components."""

    least: ClassVar[dict[str, int]] = dict.fromkeys(("max_passes", "chunk", "checkpoint_passes", "components"), 1)
    least |= {"seed": 0, "tolerance": 0, "memory_gb": 0}

    method: Method = "npeff"
    """What to compute: NPEFF of Fishers, NPEFF of gradients, k-means, a TopK autoencoder, or an SVD."""
    seed: int = 0
    """Seed of everything that is drawn at random."""
    solver: Literal["als", "paper"] = "als"
    """For NPEFF: `als` has no learning rate, `paper` is gradient descent with multiplicative updates."""
    init: Literal["kmeans++", "random"] = "kmeans++"
    """Where components start (`als` and `clusters`): spread-out examples, or random examples."""
    max_passes: int = 500
    """Most iterations; each reads all rows twice (`clusters`, `svd-gradients`: once)."""
    tolerance: float = 1e-4
    """Stop when ten passes lower the loss by less than this share of it."""
    chunk: int = 1024
    """Rows read at a time."""
    memory_gb: float = 2.0
    """Most memory for a cache between passes (rows, and their products with the components), which saves time. With 0
    everything is read and computed again in every pass; the result is the same up to rounding."""
    checkpoint_passes: int = 20
    """Passes between checkpoints; a killed run continues from the last one."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes CUDA if it is there."""
    paper: PaperConfig = field(default_factory=PaperConfig)
    sae: SaeConfig = field(default_factory=SaeConfig)

    def with_components(self, components: int) -> FitConfig:
        """These options for so many components."""
        options = {item.name: getattr(self, item.name) for item in fields(SolverConfig)}
        if self.method == "sae":  # said in full, so that it stays what it is if the default changes
            options["sae"] = replace(self.sae, top_k=self.sae.active(components))
        return FitConfig(components=components, **options)


class FitConfig(SolverConfig, kw_only=True):
    """How to decompose, whatever the rows come from."""

    components: int
    """Number of components C."""

    @property
    def name(self) -> str:
        """What the decomposition is called if nobody gives it a name."""
        return f"{self.method}-{self.components}-{self.seed}"


class DecomposeConfig(SolverConfig, kw_only=True):
    """Decompose the examples of a run into components. A killed run continues when the same command is given again."""

    common: ClassVar[tuple[str, ...]] = ("components", "method", "seed", "decomposition", "holdout", "overwrite")
    renamed: ClassVar[dict[str, str]] = {"name": "decomposition"}

    run: tyro.conf.Positional[str]
    """Run directory."""
    components: int | None = None
    """Number of components. If not given, one for every 15 examples that components are fitted to, at least 8 and at
    most 512, but never more than one for every two examples."""
    decomposition: str | None = None
    """Name of the decomposition; made from method, number of components and seed if not given."""
    holdout: float | None = None
    """Share of examples that components are not fitted to, so that `npeff perturb` can measure on them. If not given,
    0.3; 0 where there are fewer than 160 examples, and what an earlier command took under the same name."""
    overwrite: bool = False
    """Replace a decomposition of the same name that was made with other options."""

    def _check(self) -> None:
        if self.holdout is not None and not 0 <= self.holdout < 1:
            raise UserError(f"holdout is a share of the examples, at least 0 and below 1, not {self.holdout}.")
        check_name(self.decomposition, "--decomposition")


def suggest_holdout(examples: int) -> float:
    """Which share of so many examples to hold out, if nobody says: see `DecomposeConfig.holdout`."""
    return HOLDOUT if examples >= FEWEST_TO_HOLD_OUT else 0.0


def suggest_fitted(examples: int) -> int:
    """How many of so many examples components are fitted to, if nobody says."""
    return round(examples * (1 - suggest_holdout(examples)))


def suggest_components(examples: int, method: Method = "npeff", dim: int = 512) -> int:
    """How many components to take of so many examples, if nobody says: see `DecomposeConfig.components`.

    Args:
        examples: Number of usable examples to fit.
        method: Method; an SVD has no more components than a row has entries.
        dim: Entries of a row.

    Returns:
        The number of components.
    """
    count = min(max(8, examples // 15), 512, max(1, examples // 2))
    return min(count, dim) if method.startswith("svd") else count
