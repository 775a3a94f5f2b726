"""The rules by which `--scale` shrinks an experiment, and what it roughly costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from npeff.collect.config import parse_directions
from npeff.models.config import EMBEDDED
from npeff.paper.recipe import Recipe, Setup
from npeff.utils.configs import replace

SMALL = 0.25
"""Below this scale the embedded model, the Kronecker sketch and the solver `als` replace the paper's."""
FEWEST_EXAMPLES = 64
EXAMPLES_PER_COMPONENT = 16
FEWEST_COMPONENTS = 4
FEWEST_STEPS = 2000
"""Steps that the autoencoder's optimiser needs, however few examples there are."""

RULES = f"""\
examples    times scale, at least {FEWEST_EXAMPLES} (and no more than the data have)
            --examples TASK=N sets the scale of a task by its examples
components  times √scale, at most one per {EXAMPLES_PER_COMPONENT} examples, at least {FEWEST_COMPONENTS}
contexts, scored and random examples   times √scale, at least 4, within what the run has
steps of the autoencoder   times scale, at least {FEWEST_STEPS:,}: as often through the examples as in the paper
perturbed components   times scale, at least 4: each costs passes over all of its top and random examples
below {SMALL}  the embedded model ({EMBEDDED}), the sketch kron of the same length, the solver als (except where the
            table is about the paper's solver), perturbations lifted exactly and compared at a KL of 0.1
the paper's learning rates and τ are for sums over all examples: they grow by the ratio of the
paper's examples to those here, and τ shrinks by it
all else stays as in the paper; --model, --sketch and --solver override"""

# Rough numbers for estimates only.
_TOKENS = {"sst2": 20, "yat": 110, "clinc150": 250, "triviaqa": 30}
_ANSWERS = {"sst2": 2, "yat": 10}
_MILLIONS = {EMBEDDED: 106, "HuggingFaceTB/SmolLM2-360M": 315, "HuggingFaceTB/SmolLM2-1.7B": 1610}
_TWO_CORES = 100e9
"""Useful floating-point operations a second of two CPU cores: 80 to 120 were measured for the four tasks."""


@dataclass(frozen=True)
class Scale:
    """How far to shrink, and what to replace."""

    scale: float = 1.0
    """Share of the paper's examples."""
    model: str | None = None
    """Model instead of the paper's."""
    sketch: Literal["kron", "sparse", "dense"] | None = None
    """Sketch instead of the paper's."""
    solver: Literal["als", "paper"] | None = None
    """Solver of NPEFF instead of the paper's."""
    examples: Mapping[str, int] = field(default_factory=dict)
    """Task → number of examples, which then sets the scale of that task."""

    def share(self, paper: Setup) -> float:
        """Share of the paper's examples."""
        return min(1.0, self.examples[paper.task] / paper.examples) if paper.task in self.examples else self.scale

    def is_small(self, paper: Setup) -> bool:
        """Whether the embedded model and faster methods replace the paper's."""
        return self.share(paper) < SMALL

    def setup(self, paper: Setup, keep_solver: bool = False) -> Setup:
        """The paper's settings at this scale, before it is known how many examples there are.

        Args:
            paper: The paper's settings.
            keep_solver: Whether no other solver may replace the paper's.

        Returns:
            The settings here; those that depend on the number of examples are still the paper's.
        """
        small = self.is_small(paper)
        return replace(
            paper,
            examples=max(min(FEWEST_EXAMPLES, paper.examples), round(paper.examples * self.share(paper))),
            model=self.model or (EMBEDDED if small else paper.model),
            sketch=self.sketch or ("kron" if small else paper.sketch),
            solver=paper.solver if keep_solver else self.solver or ("als" if small else paper.solver),
        )

    def settle(self, paper: Setup, here: Setup, examples: int) -> Setup:
        """The settings once the number of examples of the run is known.

        Args:
            paper: The paper's settings.
            here: What `setup` made of them.
            examples: Examples of the run.

        Returns:
            All settings here.
        """
        ratio = paper.examples / examples
        return replace(
            here,
            examples=examples,
            components=self.components(paper, examples),
            frozen_rate=paper.frozen_rate * ratio,
            joint_rate=paper.joint_rate * ratio,
            tau=paper.tau / ratio,
        )

    def components(self, paper: Setup, examples: int) -> int:
        """What the paper's number of components becomes in a run of so many examples."""
        if self.share(paper) >= 1:
            return paper.components
        most = max(FEWEST_COMPONENTS, examples // EXAMPLES_PER_COMPONENT)
        return max(FEWEST_COMPONENTS, min(round(paper.components * math.sqrt(self.share(paper))), most))

    def count(self, paper: Setup, count: int, most: int) -> int:
        """What a number of contexts, scored examples or random examples becomes, at most `most`."""
        return max(1, min(most, max(4, round(count * math.sqrt(self.share(paper))))))

    def sae_steps(self, paper: Setup, steps: int) -> int:
        """What the steps of the autoencoder become: its batches hold all examples of a small run."""
        return min(steps, max(FEWEST_STEPS, round(steps * self.share(paper))))

    def perturbed(self, paper: Setup, count: int, most: int) -> int:
        """What a number of components to perturb becomes: each costs passes over all of its examples."""
        return max(1, min(most, max(4, round(count * self.share(paper)))))


def passes(setup: Setup) -> int:
    """Backward passes that an example takes."""
    kind, amount = parse_directions(setup.directions)
    return _ANSWERS.get(setup.task, 2) - 1 if kind in ("exact", "auto") else max(1, int(amount)) + 1


def collections(recipe: Recipe, scale: Scale) -> list[Setup]:
    """The different collections that a recipe needs.

    Args:
        recipe: The recipe.
        scale: The scale to run it at.

    Returns:
        One setup, at this scale, for each collection.
    """
    setups: dict[tuple[object, ...], Setup] = {}
    for step in recipe.steps:
        wanted = [setup for _, setup in step.variations(recipe.setups[step.setup])]
        if step.options.against:
            wanted.append(replace(wanted[0], directions=step.options.against))
        for setup in (scale.setup(each) for each in wanted):
            key = (setup.task, setup.model, setup.examples, setup.directions, setup.rank, setup.sketch, setup.dim)
            setups.setdefault(key, setup)
    return list(setups.values())


def estimate(recipe: Recipe, scale: Scale) -> float:
    """Seconds that the collections of a recipe take on two CPU cores, very roughly; decompositions are not included."""
    total = 0.0
    for setup in collections(recipe, scale):
        parameters = 1e6 * _MILLIONS.get(setup.model, 300)
        total += setup.examples * 2 * parameters * _TOKENS.get(setup.task, 50) * (1 + 1.6 * passes(setup)) / _TWO_CORES
    return total
