"""Runs and decompositions that recipes share, made when they are first needed, and how `--scale` shrinks them.

What a recipe needs is known before anything is made.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path

from npeff.analyse.records import Analysis, AnalysisOptions
from npeff.analyse.run import analyse_one
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, Method, PaperConfig, SaeConfig
from npeff.decompose.methods import kind_of
from npeff.decompose.run import decompose
from npeff.models.config import EMBEDDED, ModelConfig
from npeff.paper.config import ReproduceConfig
from npeff.paper.recipe import Changed, Recipe, Setting, Settings, Setup, load_recipe, recipe_names
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils import Record, UserError, replace, to_dict

TOP = 16
"""Top examples of a component, as in the paper."""
DATA_SEED = 0
"""Examples are drawn in this random order, so that a small scale sees all of the data."""
MADE_FOR = "reproduce"
"""Mark of decompositions that recipes make: they do not become a run's default."""
SMALL = 0.25
"""Below this scale the embedded model, the Kronecker sketch and the solver `als` replace the paper's."""
FEWEST_EXAMPLES = 64
EXAMPLES_PER_COMPONENT = 16
FEWEST_COMPONENTS = 4
FEWEST_STEPS = 2000
"""Steps that the autoencoder's optimiser needs, however few examples there are."""
FEWEST = 4
"""Fewest contexts, scored and random examples."""
FEWEST_PERTURBED = 32
"""Fewest perturbed components."""


class Runs(Record):
    """The runs of a reproduction: where they are, and how far they are smaller than the paper's."""

    config: ReproduceConfig
    """Options of the command."""

    def experiment(self, paper: Setup, keep_solver: bool = False) -> Experiment:
        """The experiment that stands for one of the paper's; its run is collected, continued or only opened."""
        here = self.setup(paper, keep_solver)
        run = collect(self.collect_config(here))
        return Experiment(self, paper, self.settle(paper, here, len(run.table)), run)

    def folder(self, here: Setup) -> Path:
        """Directory of a run with these settings. Setups that agree in what is collected share it."""
        model = re.sub(r"[^\w.-]+", "-", here.model.strip("/")).strip("-")[-60:]
        parts = [here.task, model, here.examples, here.directions.replace(":", ""), f"{here.sketch}{here.dim}"]
        parts += [f"rank{here.rank}"] if here.rank else []
        return Path(self.config.out) / "runs" / "_".join(map(str, parts))

    def collect_config(self, here: Setup) -> CollectConfig:
        """Options of the collection.

        Args:
            here: Settings at this scale.

        Returns:
            The config of `npeff collect`.
        """
        file = self.data_file(here.task)
        data = DataConfig(here.task, file, limit=here.examples, shuffle_seed=DATA_SEED, on_bad_example="drop")
        return CollectConfig(
            str(self.folder(here)),
            data=data,
            model=ModelConfig(here.model, device=self.config.device),
            directions=DirectionsConfig(here.directions, rank=here.rank),
            sketch=SketchConfig(here.sketch, here.dim),
        )

    def data_file(self, task: str) -> str | None:
        """The task's file in the data folder.

        Args:
            task: Name of a built-in task.

        Returns:
            The file; None without a folder, for the task's own data.

        Raises:
            UserError: There is no such folder, or no such file in it.
        """
        if not self.config.data:
            return None
        folder = Path(self.config.data)
        if not folder.is_dir():
            raise UserError(f"--data {folder} is not a folder.")
        for kind in ("jsonl", "csv", "tsv", "parquet"):
            if (path := folder / f"{task}.{kind}").is_file():
                return str(path)
        raise UserError(f"{folder} has no {task}.jsonl (or .csv, .tsv, .parquet).")

    def share(self, paper: Setup) -> float:
        """Share of the paper's examples."""
        examples = self.config.task_examples.get(paper.task)
        return self.config.scale if examples is None else min(1.0, examples / paper.examples)

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
        config, small = self.config, self.is_small(paper)
        return replace(
            paper,
            examples=max(min(FEWEST_EXAMPLES, paper.examples), round(paper.examples * self.share(paper))),
            model=config.model or (EMBEDDED if small else paper.model),
            sketch=config.sketch or ("blocks" if small else paper.sketch),
            solver=paper.solver if keep_solver else config.solver or ("als" if small else paper.solver),
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
        ratio, components = paper.examples / examples, paper.components
        if self.share(paper) < 1:
            most = max(FEWEST_COMPONENTS, examples // EXAMPLES_PER_COMPONENT)
            components = self.scaled(paper, components, FEWEST_COMPONENTS, most, root=True)
        return replace(
            here,
            examples=examples,
            components=components,
            frozen_rate=paper.frozen_rate * ratio,
            joint_rate=paper.joint_rate * ratio,
            tau=paper.tau / ratio,
        )

    def scaled(self, paper: Setup, count: int, least: int, most: int, root: bool = False) -> int:
        """What one of the paper's numbers becomes: times the share of examples, or its root, within limits."""
        share = self.share(paper)
        return max(1, min(most, max(least, round(count * (math.sqrt(share) if root else share)))))


class Experiment(Record):
    """One of the paper's experiments, at this scale."""

    runs: Runs
    """Where it is made."""
    paper: Setup
    """The paper's settings."""
    here: Setup
    """The settings at this scale."""
    run: Run
    """Its collection."""

    def varied(self, **settings: Setting) -> Experiment:
        """The same run with other settings of the paper for the decomposition."""
        paper, here = (replace(each, **settings) for each in (self.paper, self.here))  # type: ignore[arg-type]
        return replace(self, paper=paper, here=self.runs.settle(paper, here, len(self.run.table)))

    def fit_config(self, method: Method = "npeff") -> DecomposeConfig:
        """Options of a decomposition.

        Args:
            method: The method.

        Returns:
            The config of `npeff decompose`. Its name tells apart what a run may have more than one of.
        """
        here, components, sae = self.here, self.here.components, SaeConfig()
        if method.startswith("svd"):  # there are no more singular vectors than entries in a row
            components = min(components, self.run.source(kind_of(method)).dim)
        if method == "sae":
            steps = self.runs.scaled(self.paper, sae.sae_steps, FEWEST_STEPS, sae.sae_steps)
            sae = SaeConfig(top_k=sae.active(components), sae_steps=steps)
        factored = method in ("npeff", "gnpeff")
        solver = here.solver if factored else "als"
        paper = PaperConfig(**{item.name: getattr(here, item.name) for item in fields(PaperConfig)})
        parts: list[object] = [method, components, here.seed, *([solver] if solver != "als" else [])]
        parts += [f"tau{here.tau:g}"] if here.tau and factored else []
        parts += [f"k{sae.top_k}"] if method == "sae" else []
        parts += [f"holdout{here.holdout:g}"] if here.holdout else []
        return DecomposeConfig(
            run=str(self.run.path),
            decomposition="-".join(map(str, parts)),
            method=method,
            components=components,
            seed=here.seed,
            solver=solver,
            paper=paper if solver == "paper" else PaperConfig(),
            sae=sae,
            holdout=here.holdout,
            device=self.runs.config.device,
        )

    def fit(self, method: Method = "npeff") -> Decomposition:
        """The decomposition by a method; made, continued or only loaded."""
        return decompose(self.fit_config(method), made_for=MADE_FOR)

    def name(self, method: Method = "npeff") -> str:
        """Name of the decomposition by a method."""
        return str(self.fit_config(method).decomposition)

    def analysis(self, name: str | None = None) -> Analysis:
        """The analysis of the decomposition of this name, or else of that by NPEFF; made if it is missing."""
        name = name or self.name()
        return analyse_one(self.run, name, AnalysisOptions(TOP), quiet=True)

    def tuned_percentages(self, name: str) -> dict[str, float | None]:
        """The paper's names of tunings, and the percentages of components; None if no component has enough examples."""
        rates = self.analysis(name).tunings
        known = {"Pred": rates["prediction"], "LnP": rates["lnp"]}  # there is no rate without labels
        return {key: None if rate.share is None else 100 * rate.share for key, rate in known.items() if rate}

    def settings(self, changed: Changed) -> Settings:
        """The paper's settings and those here, but for those that are `changed`."""
        paper, here = ({name: pair[side] for name, pair in changed.items()} for side in (0, 1))
        return Settings(to_dict(self.paper) | paper, to_dict(self.here) | here)

    def kept(self, folder: str, *about: object) -> Path:
        """Where a result that depends on the run and on `about` is kept, in a folder beside the runs."""
        key = json.dumps([self.run.fingerprint, *about], sort_keys=True)
        return Path(self.runs.config.out) / folder / hashlib.sha256(key.encode()).hexdigest()[:16]


def collections(recipe: Recipe, runs: Runs) -> list[Setup]:
    """The different collections that a recipe needs.

    Args:
        recipe: The recipe.
        runs: The scale to run it at.

    Returns:
        One setup, at this scale, for each collection.
    """
    setups: dict[Path, Setup] = {}
    for step in recipe.steps:
        wanted = [setup for _, setup in step.variations(recipe.setups[step.setup])]
        if "against" in step.options:
            wanted.append(replace(wanted[0], directions=step.options["against"]))
        setups |= {runs.folder(here): here for here in map(runs.setup, wanted)}
    return list(setups.values())


def needs(recipe: Recipe, runs: Runs) -> str:
    """What a recipe collects; decompositions are not included.

    Args:
        recipe: The recipe.
        runs: The scale to run it at.

    Returns:
        Tasks, models and examples, in words.
    """
    if recipe.people:
        return "people"
    setups = collections(recipe, runs)
    tasks, models = (", ".join(dict.fromkeys(getattr(setup, name) for setup in setups)) for name in ("task", "model"))
    count = f"{len(setups)} collections" if len(setups) > 1 else "1 collection"
    return f"{tasks}; {models}; {count}, {sum(setup.examples for setup in setups):,} examples"


def overview(runs: Runs) -> str:
    """All recipes, and the rules of scaling.

    Args:
        runs: The scale to run them at.

    Returns:
        What they need, in words.
    """
    lines = [f"Recipes at scale {runs.config.scale:g} (recipes with the same --out share their collections):", ""]
    for recipe in map(load_recipe, recipe_names()):
        lines += [f"{recipe.name}  ({recipe.label})", f"    {recipe.title}", f"    needs {needs(recipe, runs)}"]
    rules = (resources.files("npeff") / "paper" / "recipes" / "scaling.txt").read_text(encoding="utf-8")
    limits = {name: value for name, value in globals().items() if name.isupper()}
    return "\n".join([*lines, "", "What --scale does:", rules.format(**limits).rstrip()])
