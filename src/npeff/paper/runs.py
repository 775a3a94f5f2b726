"""Runs and decompositions that recipes share, made when they are first needed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from npeff.analyse.records import Analysis, AnalysisOptions
from npeff.analyse.run import analyse_one
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.base import Decomposition
from npeff.decompose.config import DecomposeConfig, Method, PaperConfig, SaeConfig
from npeff.decompose.methods import kind_of
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.paper.recipe import Setup
from npeff.paper.scaling import Scale
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.configs import replace
from npeff.utils.errors import UserError

TOP = 16
"""Top examples of a component, as in the paper."""
DATA_SEED = 0
"""Examples are drawn in this random order, so that a small scale sees all of the data."""
MADE_FOR = "reproduce"
"""Mark of decompositions that recipes make: they do not become a run's default."""


@dataclass(frozen=True)
class Runs:
    """The runs under a directory."""

    out: Path
    """The directory."""
    scale: Scale
    """How far to shrink the paper's experiments."""
    data: Path | None = None
    """Folder with a file of examples for each task; without it, the tasks' own data."""
    device: str = "auto"
    """Where to compute."""

    def experiment(self, paper: Setup, keep_solver: bool = False) -> Experiment:
        """The experiment that stands for one of the paper's; its run is collected, continued or only opened."""
        here = self.scale.setup(paper, keep_solver)
        run = collect(self.collect_config(here))
        return Experiment(self, paper, self.scale.settle(paper, here, len(run.table)), run)

    def collect_config(self, here: Setup) -> CollectConfig:
        """Options of the collection. Setups that agree in them share one run.

        Args:
            here: Settings at this scale.

        Returns:
            The config of `npeff collect`.
        """
        model = re.sub(r"[^\w.-]+", "-", here.model.strip("/")).strip("-")[-60:]
        parts = [here.task, model, here.examples, here.directions.replace(":", ""), f"{here.sketch}{here.dim}"]
        if here.rank:
            parts.append(f"rank{here.rank}")
        data = DataConfig(
            task=here.task,
            data=self._file(here.task),
            limit=here.examples,
            shuffle_seed=DATA_SEED,
            on_bad_example="drop",
        )
        return CollectConfig(
            str(self.out / "runs" / "_".join(map(str, parts))),
            data=data,
            model=ModelConfig(here.model, device=self.device),
            directions=DirectionsConfig(here.directions, rank=here.rank),
            sketch=SketchConfig(here.sketch, here.dim),
        )

    def check_data(self, setups: Iterable[Setup]) -> None:
        """Refuse a missing file before the first hour of work, not after it."""
        for setup in setups:
            self._file(setup.task)

    def _file(self, task: str) -> str | None:
        """The task's file in the data folder; without a folder, the task's own data."""
        if self.data is None:
            return None
        for kind in ("jsonl", "csv", "tsv", "parquet"):
            if (path := self.data / f"{task}.{kind}").is_file():
                return str(path)
        raise UserError(f"{self.data} has no {task}.jsonl (or .csv, .tsv, .parquet).")


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments, at this scale."""

    runs: Runs
    """Where it is made."""
    paper: Setup
    """The paper's settings."""
    here: Setup
    """The settings at this scale."""
    run: Run
    """Its collection."""

    def varied(self, components: int | None = None, seed: int | None = None) -> Experiment:
        """The same run with another of the paper's numbers of components, or another seed."""
        here = self.here if seed is None else replace(self.here, seed=seed)
        if components is not None:
            paper = replace(self.paper, components=components)
            here = replace(here, components=self.runs.scale.components(paper, len(self.run.table)))
        return replace(self, here=here)

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
            steps = self.runs.scale.sae_steps(self.paper, sae.sae_steps)
            sae = SaeConfig(top_k=min(sae.top_k, components), sae_steps=steps)
        factored = method in ("npeff", "gnpeff")
        solver = here.solver if factored else "als"
        paper = PaperConfig(here.frozen_steps, here.joint_steps, here.frozen_rate, here.joint_rate, here.tau)
        parts: list[object] = [method, components, here.seed, *([solver] if solver != "als" else [])]
        parts += [f"tau{here.tau:g}"] if here.tau and factored else []
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
            device=self.runs.device,
        )

    def fit(self, method: Method = "npeff") -> Decomposition:
        """The decomposition by a method; made, continued or only loaded."""
        return decompose(self.fit_config(method), made_for=MADE_FOR)

    def name(self, method: Method = "npeff") -> str:
        """Name of the decomposition by a method."""
        return str(self.fit_config(method).decomposition)

    def analysis(self, name: str | None = None) -> Analysis:
        """The analysis of the decomposition of this name, or else of that by NPEFF; made if it is missing."""
        if name is None:
            self.fit()
        name = name or self.name()
        return analyse_one(self.run, name, AnalysisOptions(TOP), quiet=True)

    def tuned_percentages(self, name: str) -> Iterator[tuple[str, float | None]]:
        """The paper's names of tunings, and the percentages of components; None if no component has enough examples."""
        rates = self.analysis(name).tunings
        for measure, rate in (("Pred", rates["prediction"]), ("LnP", rates["lnp"])):
            if rate is not None:  # there is none without labels
                yield measure, None if rate.share is None else 100 * rate.share

    def kept(self, folder: str, *about: object) -> Path:
        """Where a result that depends on the run and on `about` is kept, in a folder beside the runs."""
        key = json.dumps([self.run.fingerprint, *about], sort_keys=True)
        return self.runs.out / folder / hashlib.sha256(key.encode()).hexdigest()[:16]
