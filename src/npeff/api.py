"""npeff in Python: the names that `import npeff` offers.

Options are those of the command line, as keyword arguments with underscores, with the same defaults. A run is given as
a `Run` or as a path, a decomposition as a `Decomposition`, by its name, or not at all: then the run's default is meant,
the newest that `npeff decompose` has made. m is the number of examples, C of components, p the length of a sketched
row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from npeff.act.config import DiffConfig, SteerConfig
from npeff.act.diff import Diff, diff
from npeff.act.steer import Steered, Steering, component_vector, steer
from npeff.analyse import probe as probing
from npeff.analyse import ranking
from npeff.analyse.compare import Comparison, compare
from npeff.analyse.config import AnalyseConfig, CompareConfig, StabilityConfig, SweepConfig
from npeff.analyse.probe import Probe
from npeff.analyse.records import Analysis, Stability
from npeff.analyse.run import analyse, read_analysis
from npeff.analyse.stability import stability
from npeff.analyse.sweep import Sweep, sweep
from npeff.collect.config import CollectConfig
from npeff.collect.estimate import Estimate, estimate_collection
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.base import Decomposition, Order
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.decompose.run import open_decomposition as _open_decomposition
from npeff.explain.casestudy import casestudy
from npeff.explain.config import CaseStudyConfig, ExplainConfig
from npeff.explain.names import Name
from npeff.explain.records import CaseStudy, Explanation, WeighedText
from npeff.explain.run import explain, name_all, weigh_text
from npeff.explain.words import LeaveOut
from npeff.explore.inside import Insides, is_found
from npeff.explore.themes import Themes
from npeff.models.load import LoadedModel
from npeff.perturb.config import ALL, Direction, PerturbConfig
from npeff.perturb.lift import Parameters
from npeff.perturb.records import Results
from npeff.perturb.run import perturb
from npeff.share.config import PullConfig, PushConfig
from npeff.share.run import pull, push
from npeff.store.examples import label_texts
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.utils import Record, UserError
from npeff.utils.configs import from_options

if TYPE_CHECKING:
    import pandas as pd

# What users get, room by room.
__all__ = ["Analysis", "Component", "Decomposition", "Estimate", "Example", "Probe", "Run", "UserError"]
__all__ += ["collect_run", "open_run", "pull_run", "push_run"]
__all__ += ["decompose_run", "open_decomposition"]
__all__ += ["analyse_run", "compare_run", "list_components", "list_examples", "probe_texts", "stability_run"]
__all__ += ["sweep_run", "top_examples"]
__all__ += ["casestudy_component", "explain_components", "find_components", "name_components", "weigh_words"]
__all__ += ["diff_runs", "hold_component", "lift_component", "perturb_components", "steer_text"]

T = TypeVar("T")
AnyPath = str | os.PathLike[str]
AnyRun = Run | AnyPath
AnyDecomposition = Decomposition | str | None


class Records(list[T]):
    """A list of dataclasses that pandas can take as a table."""

    def to_pandas(self) -> pd.DataFrame:
        """One line per record, one column per field.

        Returns:
            The table, with the records' numbers as its index.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UserError("This needs pandas: pip install 'npeff[pandas]'.") from error
        return (pd.DataFrame(self) if self else pd.DataFrame(columns=["number"])).set_index("number")


class Example(Record):
    """An example of a run, and of a component where it was asked for as one."""

    number: int
    """Which of the run's examples it is."""
    text: str
    """What the task asks about."""
    label: str | None
    """The right answer, where it is known."""
    prediction: str
    """The model's answer."""
    probability: float
    """What the model gives its answer, among the task's answers."""
    component: int | None
    """The component, or of an example by itself the one that explains most of it."""
    coefficient: float | None
    """How much of the component is in it."""
    share: float | None
    """How much of the example the component explains; None for methods that do not add up components."""


class Component(Record):
    """A component of a decomposition."""

    number: int
    """Which component it is."""
    theme: str | None
    """What people called it, if they did."""
    energy: float
    """Its share in the squared coefficients of all components."""
    density: float
    """Share of the examples that use it."""
    recurrence: float | None
    """Share of other fits that find it again; None if `analyse_run` has not measured it."""
    group: list[int] | None
    """The smallest group of components that it belongs to, if any."""
    prediction_purity: float | None
    """Share of the commonest prediction among its top examples."""
    label_purity: float | None
    """Share of the commonest label among its top examples."""
    lnp_tuned: bool | None
    """Whether its top examples have one label and not one prediction."""
    labels: dict[str, int]
    """Labels of its top examples, commonest first."""
    predictions: dict[str, int]
    """Predictions of its top examples, commonest first."""
    top: list[str]
    """Texts of its top examples, best first."""
    shares: list[float] | None
    """How much of each of them it explains."""
    argues_for: str | None
    """The answer that rises along it; None where the run does not tell."""


def open_run(path: AnyRun) -> Run:
    """A finished run. `run.table` is its example table (PyArrow), `run.source("fisher")` gives its rows."""
    return path if isinstance(path, Run) else Run.open(Path(path))


@overload
def collect_run(path: AnyPath, *, dry_run: Literal[True], **options: Any) -> Estimate: ...
@overload
def collect_run(path: AnyPath, *, dry_run: Literal[False] = ..., **options: Any) -> Run: ...
def collect_run(path: AnyPath, *, dry_run: bool = False, **options: Any) -> Run | Estimate:
    """Collect per-example Fishers into a directory, or continue there.

    For example `collect_run("runs/x", model="gpt2", task="sst2", data="reviews.csv", limit=1000)`.

    Args:
        path: Run directory.
        dry_run: Measure a few batches instead, and write nothing.
        **options: Those of `npeff collect`.

    Returns:
        The run or, with `dry_run`, what collecting it would cost.
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
    """A decomposition that the run keeps, by name; without one, the run's default."""
    return name if isinstance(name, Decomposition) else _open_decomposition(open_run(run), name)


def analyse_run(run: AnyRun, decomposition: str | None = None, **options: Any) -> Analysis:
    """What the components of a decomposition are tuned to. Options are those of `npeff analyse`.

    The result is what analysis.json holds: `tunings` is about all components, `component` is a list with one entry of
    top examples, purities and correlated components for each.
    """
    name = choose_decomposition(open_run(run).path, decomposition)
    (analysis,) = analyse(from_options(AnalyseConfig, {"run": _path(run), "decomposition": name, **options}))
    return analysis


def compare_run(run: AnyRun, **options: Any) -> Comparison:
    """All methods side by side on one run. Options and result are those of `npeff compare`."""
    return compare(from_options(CompareConfig, {"run": _path(run), **options}))


def stability_run(run: AnyRun, **options: Any) -> Stability:
    """Whether other seeds find the same components. Options and result are those of `npeff stability`."""
    return stability(from_options(StabilityConfig, {"run": _path(run), **options}))


def sweep_run(run: AnyRun, **options: Any) -> Sweep:
    """Held-out loss and tunings for several numbers of components. Options and result are those of `npeff sweep`."""
    return sweep(from_options(SweepConfig, {"run": _path(run), **options}))


def list_components(run: AnyRun, decomposition: str | None = None, count: int = 8) -> Records[Component]:
    """The components of a decomposition.

    Args:
        run: The run.
        decomposition: Name of the decomposition; without it, the run's default.
        count: Top examples of each, at most.

    Returns:
        All components in their order; `to_pandas()` makes a table of them.
    """
    run = open_run(run)
    name = choose_decomposition(run.path, decomposition)
    themes, texts = Themes(run, name).current(), run.table["text"]
    analysis = read_analysis(run, name)
    return Records(
        Component(
            number=each.number,
            theme=themes[each.number].theme if each.number in themes else None,
            energy=each.energy,
            density=each.density,
            recurrence=each.recurrence,
            group=next((group.members for group in analysis.groups if each.number in group.members), None),
            prediction_purity=each.prediction_purity,
            label_purity=each.label_purity,
            lnp_tuned=each.lnp_tuned,
            labels=first.labels,
            predictions=first.predictions,
            top=[texts[i].as_py() for i in first.top[:count]],
            shares=first.shares and first.shares[:count],
            argues_for=each.argues_for,
        )
        for each in analysis.component
        for first in each.orderings[:1]
    )


def find_components(run: AnyRun, query: str, decomposition: str | None = None, count: int = 8) -> Records[Component]:
    """Components that the filter of the page's overview finds.

    Args:
        run: The run.
        query: Words of theme, name, first example, commonest label or prediction; `argues:Positive`; `head:3.5` (head 5
            of layer 3); `like:17` (the nearest to component 17). All of several must fit.
        decomposition: Name of the decomposition; without it, the run's default.
        count: Top examples of each, at most.

    Returns:
        The components in their order; `to_pandas()` makes a table of them.
    """
    run = open_run(run)
    name = choose_decomposition(run.path, decomposition)
    components = _open_decomposition(run, name)
    name_all(run, name, components)
    columns, themes = Insides(run, name, components).columns, Themes(run, name).current()
    assert columns is not None  # they have names now
    found = []
    for each in list_components(run, name, count):
        j = each.number
        said = [str(j), *((themes[j].theme, themes[j].note) if j in themes else ()), *list(each.labels)[:1]]
        said += [*list(each.predictions)[:1], *each.top[:1], columns.names[j], columns.terms[j]]
        if is_found(query, " ".join(said)):
            found.append(each)
    return Records(found)


def list_examples(run: AnyRun, decomposition: AnyDecomposition = None) -> Records[Example]:
    """The examples of a run, each with the component that explains most of it.

    Args:
        run: The run.
        decomposition: Which decomposition; without it, the run's default.

    Returns:
        All usable examples in their order; `to_pandas()` makes a table of them.
    """
    run, components = open_run(run), open_decomposition(run, decomposition)
    usable = run.usable.nonzero()[0].tolist()
    shares = components.shares(components.coefficients)
    strongest = (components.coefficients.abs() if shares is None else shares).argmax(dim=1).tolist()
    return _examples(run, components, usable, [strongest[i] for i in usable])


def top_examples(
    run: AnyRun, component: int, decomposition: AnyDecomposition = None, count: int = 8, order: Order = "positive"
) -> Records[Example]:
    """The examples that use a component most.

    Args:
        run: The run.
        component: Number of the component.
        decomposition: Which decomposition; without it, the run's default.
        count: How many examples, at most.
        order: What to rank by: `positive` coefficients, or for methods with signs also `negative` or `absolute`.

    Returns:
        The examples, best first; `to_pandas()` makes a table of them.

    Raises:
        UserError: There is no such component.
    """
    run, components = open_run(run), open_decomposition(run, decomposition)
    if not 0 <= component < len(components.components):
        raise UserError(f"There are components 0 to {len(components.components) - 1}, not {component}.")
    scores = components.scores(order)[:, component].numpy()
    best = ranking.top_examples(scores, run.usable, count).tolist()
    return _examples(run, components, best, [component] * len(best))


def _examples(run: Run, components: Decomposition, chosen: list[int], of: list[int]) -> Records[Example]:
    """The examples `chosen`, each with one component."""
    table = run.table.take(chosen)
    coefficients = components.coefficients[chosen]
    shares = components.shares(coefficients)
    columns = (
        chosen,
        table["text"].to_pylist(),
        label_texts(table, run.manifest.task.labels),
        table["prediction_text"].to_pylist(),
        table["probability"].to_pylist(),
        of,
        [float(coefficients[i, j]) for i, j in enumerate(of)],
        [None if shares is None else float(shares[i, j]) for i, j in enumerate(of)],
    )
    return Records(Example(*values) for values in zip(*columns, strict=True))


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
    seed: int = 0,
    device: str | None = None,
) -> Parameters:
    """A component as a vector of the model's parameters.

    Args:
        run: The run.
        component: Number of the component.
        decomposition: Which decomposition; without it, the run's default.
        direction: `plain`: the exact vector whose sketch is the component. `reject`: without what it shares with other
            components. `whiten`: the direction with the least effect on other examples.
        seed: Of what is drawn at random.
        device: Where to compute; where the run was collected, if not given.

    Returns:
        A vector of length 1: module name → float32 [d_out, columns].
    """
    run, components = open_run(run), open_decomposition(run, decomposition)
    prepared = prepare_run(run, device)
    config = PerturbConfig(str(run.path), component=(component,), direction=direction, seed=seed)
    return component_vector(run, components, prepared, read_prompts(run, prepared), config)[0]


@contextlib.contextmanager
def hold_component(
    run: AnyRun, component: int, strength: float = 1.0, decomposition: AnyDecomposition = None, device: str = "auto"
) -> Iterator[LoadedModel]:
    """A run's model to work with, a component of it turned up or down: a context manager.

    Args:
        run: The run.
        component: Number of the component.
        strength: As for `npeff steer`.
        decomposition: Which decomposition; without it, the run's default.
        device: Where to compute.

    Yields:
        The run's model: `network`, as transformers has it, and `tokenizer`. Its weights come back bit for bit.
    """
    run, components = open_run(run), open_decomposition(run, decomposition)
    with Steering(run, components, component, device=device).hold(strength) as model:
        yield model


def diff_runs(*runs: AnyRun, **options: Any) -> Diff:
    """What differs between two models, or a series, on the same examples. Options and result: `npeff diff`."""
    return diff(from_options(DiffConfig, {"runs": tuple(map(_path, runs)), **options}))


def steer_text(run: AnyRun, text: str, component: int, **options: Any) -> list[Steered]:
    """Answers to a text and how the model goes on with it, a component turned up or down. Options: `npeff steer`."""
    return steer(from_options(SteerConfig, {"run": _path(run), "text": text, "component": component, **options}))


def perturb_components(run: AnyRun, component: Iterable[int] = (), **options: Any) -> Results:
    """Change the model along components and measure whose predictions change. Options are those of `npeff perturb`.

    The result's `summary.kl_ratio` says how much more the answers of a component's top examples change than those of
    random ones (geometric mean over components); `components` has a record of each that was measured so far.
    """
    config = from_options(PerturbConfig, {"run": _path(run), "component": tuple(component), **options})
    if config.decomposition == ALL:
        raise UserError(f"perturb_components takes one decomposition at a time, not {ALL!r}.")
    (results,) = perturb(config).values()
    return results


def explain_components(run: AnyRun, component: Iterable[int] = (), **options: Any) -> list[Explanation]:
    """What is inside components: words, answers, heads and neurons. Options and result are those of `npeff explain`."""
    return explain(from_options(ExplainConfig, {"run": _path(run), "component": tuple(component), **options}))


def name_components(run: AnyRun, decomposition: str | None = None) -> list[Name]:
    """Names of all components by the words of their examples, each checked on held-out examples; needs no model."""
    run = open_run(run)
    name = choose_decomposition(run.path, decomposition)
    return name_all(run, name, _open_decomposition(run, name)).names


def weigh_words(
    run: AnyRun, texts: Sequence[str], component: Iterable[int] = (), decomposition: AnyDecomposition = None
) -> list[WeighedText]:
    """How much of the coefficients of texts each of their words carries: what is lost without it.

    Args:
        run: The run.
        texts: Any texts.
        component: Numbers of components; without any, the strongest of each text.
        decomposition: Which decomposition; without it, the run's default.

    Returns:
        One for each text.

    Raises:
        UserError: texts is one text and not a list.
    """
    if isinstance(texts, str):
        raise UserError("texts is a list of texts, not one text.")
    run, chosen = open_run(run), tuple(component)
    leave_out = LeaveOut(run, open_decomposition(run, decomposition), prepare_run(run))
    return [weigh_text(leave_out, text, None, chosen) for text in texts]


def casestudy_component(run: AnyRun, component: int, **options: Any) -> CaseStudy:
    """A component's examples with carrying words removed and swapped. Options and result: `npeff casestudy`."""
    return casestudy(from_options(CaseStudyConfig, {"run": _path(run), "component": component, **options}))


def push_run(run: AnyRun, to: AnyPath, rows: bool = False, public: bool = False) -> str:
    """Share a run in a folder, a zip file or on the Hub (`hf://owner/name`); returns a hash to pull just this by."""
    return push(PushConfig(_path(run), os.fspath(to), rows, public))


def pull_run(source: AnyPath, path: AnyPath, revision: str | None = None, sha256: str | None = None) -> Run:
    """Get a shared run from a folder, a zip file or the Hub into the new directory `path`, checked by hash."""
    return pull(PullConfig(os.fspath(source), os.fspath(path), revision, sha256))


def _path(run: AnyRun) -> str:
    return str(run.path if isinstance(run, Run) else Path(run))
