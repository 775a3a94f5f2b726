"""Where recipes work: runs and decompositions that recipes share, made when they are first needed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.records import Analysis
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
from npeff.utils.errors import UserError

TOP = 16
DATA_SEED = 0
"""Examples are drawn in this random order, so that a small scale sees all of the data."""


@dataclass(frozen=True)
class Bench:
    """A run, ready to be measured."""

    paper: Setup
    here: Setup
    run: Run


@dataclass(frozen=True)
class Workshop:
    """Makes what steps ask for, under `out`."""

    out: Path
    scale: Scale
    data: Path | None = None
    device: str = "auto"

    def bench(self, paper: Setup, keep_solver: bool = False) -> Bench:
        """The run of a setup at this scale; collected, continued or only opened."""
        here = self.scale.setup(paper, keep_solver)
        run = collect(self.collect_config(here))
        return Bench(paper, self.scale.settle(paper, here, len(run.table)), run)

    def collect_config(self, here: Setup) -> CollectConfig:
        """What `npeff collect` is asked for; runs with the same settings are the same run for all recipes."""
        model = re.sub(r"[^\w.-]+", "-", here.model.strip("/")).strip("-")[-60:]
        parts = [here.task, model, here.examples, here.directions.replace(":", ""), f"{here.sketch}{here.dim}"]
        if here.rank:
            parts.append(f"rank{here.rank}")
        return CollectConfig(
            str(self.out / "runs" / "_".join(map(str, parts))),
            data=DataConfig(
                task=here.task,
                data=self._file(here.task),
                limit=here.examples,
                shuffle_seed=DATA_SEED,
                on_bad_example="drop",
            ),
            model=ModelConfig(here.model, device=self.device),
            directions=DirectionsConfig(here.directions, rank=here.rank),
            sketch=SketchConfig(here.sketch, here.dim),
        )

    def check_data(self, setups: Iterable[Setup]) -> None:
        """Find what is missing before the first hour of work, not after it."""
        for setup in setups:
            self._file(setup.task)

    def _file(self, task: str) -> str | None:
        """The task's file in the data folder; without a folder, the task's own data."""
        if self.data is None:
            return None
        found = [
            path for kind in ("jsonl", "csv", "tsv", "parquet") if (path := self.data / f"{task}.{kind}").is_file()
        ]
        if not found:
            raise UserError(f"{self.data} has no {task}.jsonl (or .csv, .tsv, .parquet).")
        return str(found[0])

    def fit_config(self, bench: Bench, method: Method = "npeff", name: str | None = None) -> DecomposeConfig:
        """What `npeff decompose` is asked for."""
        here = bench.here
        components = here.components
        if method.startswith("svd"):  # there are no more singular vectors than numbers in a row
            components = min(components, bench.run.source(kind_of(method)).dim)
        factored = method in ("npeff", "gnpeff")
        solver = here.solver if factored else "als"
        parts: list[object] = [method, components, here.seed, *([solver] if solver != "als" else [])]
        parts += [f"tau{here.tau:g}"] if here.tau and factored else []
        parts += [f"holdout{here.holdout:g}"] if here.holdout else []
        sae = SaeConfig()
        if method == "sae":
            sae = SaeConfig(
                top_k=min(sae.top_k, components), sae_steps=self.scale.sae_steps(bench.paper, sae.sae_steps)
            )
        paper = PaperConfig(here.frozen_steps, here.joint_steps, here.frozen_rate, here.joint_rate, here.tau)
        return DecomposeConfig(
            run=str(bench.run.path),
            decomposition=name or "-".join(map(str, parts)),
            method=method,
            components=components,
            seed=here.seed,
            solver=solver,
            paper=paper if solver == "paper" else PaperConfig(),
            sae=sae,
            holdout=here.holdout,
            device=self.device,
        )

    def fit(self, bench: Bench, method: Method = "npeff") -> Decomposition:
        """The decomposition of a run; made, continued or only loaded."""
        return decompose(self.fit_config(bench, method))

    def analysis(self, bench: Bench, method: Method = "npeff", name: str | None = None) -> Analysis:
        """The analysis of a method's decomposition, both made if need be; or of the one that has this name."""
        if name is None:
            config = self.fit_config(bench, method)
            decompose(config)
            name = str(config.decomposition)
        return analyse_one(bench.run, name, AnalyseConfig(str(bench.run.path), name, TOP), quiet=True)
