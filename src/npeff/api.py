"""npeff in Python: the names that `import npeff` offers.

Options are those of the command line, as keyword arguments with underscores. A run is given as a `Run` or as a path. m
is the number of examples, C of components, p the length of a sketched row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from npeff.analyse import probe as probing
from npeff.analyse import ranking
from npeff.analyse.config import AnalyseConfig
from npeff.analyse.probe import Probe
from npeff.analyse.records import Analysis
from npeff.analyse.run import analyse
from npeff.collect.config import CollectConfig
from npeff.collect.estimate import Estimate, estimate_collection
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.base import Decomposition, Order
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.decompose.run import open_decomposition as _open_decomposition
from npeff.perturb.config import Direction, PerturbConfig
from npeff.perturb.lift import Lifter, Parameters, scale_to_unit
from npeff.perturb.protocol import make_plan, plan_directions
from npeff.perturb.run import perturb
from npeff.share.config import PullConfig, PushConfig
from npeff.share.run import pull, push
from npeff.store.run import Run
from npeff.utils.configs import from_options
from npeff.utils.errors import UserError

__all__ = [
    "Analysis",
    "Decomposition",
    "Estimate",
    "Example",
    "Probe",
    "Run",
    "UserError",
    "analyse_run",
    "collect_run",
    "decompose_run",
    "lift_component",
    "open_decomposition",
    "open_run",
    "perturb_components",
    "probe_texts",
    "pull_run",
    "push_run",
    "top_examples",
]

AnyRun = Run | str | os.PathLike[str]
AnyDecomposition = Decomposition | str | None


@dataclass(frozen=True)
class Example:
    """An example of a component."""

    number: int
    """Which of the run's examples it is."""
    text: str
    label: str | None
    prediction: str
    coefficient: float
    """How much of the component is in it."""


def open_run(path: AnyRun) -> Run:
    """A finished run. `run.table` is its example table (PyArrow), `run.source("fisher")` gives its rows."""
    return path if isinstance(path, Run) else Run.open(Path(path))


@overload
def collect_run(path: str | os.PathLike[str], *, dry_run: Literal[True], **options: Any) -> Estimate: ...
@overload
def collect_run(path: str | os.PathLike[str], *, dry_run: Literal[False] = ..., **options: Any) -> Run: ...
def collect_run(path: str | os.PathLike[str], *, dry_run: bool = False, **options: Any) -> Run | Estimate:
    """Collect per-example Fishers into the directory `path`, or continue there. Options are those of `npeff collect`.

    For example `collect_run("runs/x", model="gpt2", task="sst2", data="reviews.csv", limit=1000)`. With `dry_run` a few
    batches are measured and the cost of the collection is returned; nothing is written.
    """
    config = from_options(CollectConfig, {"run": path, "dry_run": dry_run, **options})
    return estimate_collection(config) if dry_run else collect(config)


def decompose_run(run: AnyRun, **options: Any) -> Decomposition:
    """Find the components of a run, and keep them in it. Options are those of `npeff decompose`.

    The result has `components` [C, p], `coefficients` [m, C] and `residuals` [m], the share of each example that is
    not explained.
    """
    return decompose(from_options(DecomposeConfig, {"run": _path(run), **options}))


def open_decomposition(run: AnyRun, name: AnyDecomposition = None) -> Decomposition:
    """A decomposition that the run keeps, by name; without one, the only one there is."""
    return name if isinstance(name, Decomposition) else _open_decomposition(open_run(run), name)


def analyse_run(run: AnyRun, decomposition: str, **options: Any) -> Analysis:
    """What the components of a decomposition are tuned to. Options are those of `npeff analyse`.

    The result is what analysis.json holds: `tunings` is about all components, `component` is a list with one entry of
    top examples, purities and correlated components for each.
    """
    (analysis,) = analyse(from_options(AnalyseConfig, {"run": _path(run), "decomposition": decomposition, **options}))
    return analysis


def top_examples(
    run: AnyRun,
    component: int,
    decomposition: AnyDecomposition = None,
    count: int = 8,
    order: Order = "positive",
) -> list[Example]:
    """The examples that use a component most, at most `count`."""
    run, found = open_run(run), open_decomposition(run, decomposition)
    if not 0 <= component < len(found.components):
        raise UserError(f"There are components 0 to {len(found.components) - 1}, not {component}.")
    scores = found.scores(order)[:, component].numpy()
    best = ranking.top_examples(scores, run.usable, count).tolist()
    table, labels = run.table.take(best), run.manifest["task"]["labels"]
    texts, predictions = table["text"].to_pylist(), table["prediction_text"].to_pylist()
    known = [
        answer if label is None or not labels else labels[label]
        for label, answer in zip(table["label"].to_pylist(), table["answer"].to_pylist(), strict=True)
    ]
    coefficients = found.coefficients[best, component].tolist()
    return [Example(*values) for values in zip(best, texts, known, predictions, coefficients, strict=True)]


def probe_texts(run: AnyRun, texts: Sequence[str], decomposition: AnyDecomposition = None, top: int = 8) -> list[Probe]:
    """The strongest components of new texts, collected with the run's own model, task and sketch."""
    if isinstance(texts, str):
        raise UserError("texts is a list of texts, not one text.")
    run = open_run(run)
    return probing.probe_texts(run, open_decomposition(run, decomposition), texts, top)


def lift_component(
    run: AnyRun,
    component: int,
    decomposition: AnyDecomposition = None,
    direction: Direction = "whiten",
    top: int = 16,
    random: int = 128,
    seed: int = 0,
    device: str | None = None,
) -> Parameters:
    """A component as a vector of the model's parameters, of length 1: module name → float32 [d_out, columns].

    It is the exact vector whose sketch is the component (`plain`), the component without what it shares with others
    (`reject`), or the direction with the least effect on other examples (`whiten`).
    """
    run, found = open_run(run), open_decomposition(run, decomposition)
    plan = make_plan(run, found, [component], 1, top, random, seed)
    directions = plan_directions(run, found, plan, direction, seed=seed)
    prepared = prepare_run(run, device)
    (vector,) = Lifter(run, prepared, read_prompts(run, prepared)).lift(directions.sums)
    scale_to_unit(vector)
    return vector


def perturb_components(run: AnyRun, components: Iterable[int] = (), **options: Any) -> dict[str, Any]:
    """Change the model along components and measure whose predictions change. Options are those of `npeff perturb`.

    The result has `kl_ratio`, how much more the top examples of a component notice than random ones (geometric mean
    over components), and `norm_ratio`. Everything else is in RUN/perturbations.
    """
    return perturb(from_options(PerturbConfig, {"run": _path(run), "components": tuple(components), **options}))


def push_run(run: AnyRun, to: str | os.PathLike[str], rows: bool = False, public: bool = False) -> str:
    """Share a run in a folder, a zip file or on the Hub (`hf://owner/name`); returns a hash to pull just this by."""
    return push(PushConfig(_path(run), os.fspath(to), rows, public))


def pull_run(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    revision: str | None = None,
    sha256: str | None = None,
) -> Run:
    """Get a shared run from a folder, a zip file or the Hub into the new directory `path`, checked by hash."""
    return pull(PullConfig(os.fspath(source), os.fspath(path), revision, sha256))


def _path(run: AnyRun) -> str:
    return str(run.path if isinstance(run, Run) else Path(run))
