"""Directions that act on one component and on little else: rejection (the paper's) and Fisher whitening."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
import torch

from npeff.analyse.groups import group_mix
from npeff.collect.session import Prepared
from npeff.decompose.base import Decomposition
from npeff.decompose.solver import gram
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import background_rows
from npeff.perturb.lift import RowSums, component_sums, example_sizes, group_sum
from npeff.perturb.protocol import Plan, Subject, users
from npeff.perturb.statistics import ratio
from npeff.store.rows import RowSource, SubsetRows
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError

RIDGES = tuple(10.0 ** (power / 2) for power in range(-10, -2))
"""Ridges that are tried, as shares of the largest eigenvalue of the mean Fisher."""
JITTER = 1e-9
"""Added to a diagonal, as a share of its mean: rows may depend on each other."""
CARRIED_RIDGE = 1e-6
"""The same where carriers come as close as they can to a sum: rows of alike examples should not cancel each other."""
BACKGROUND_ROWS = 4096
"""Most Fisher rows of a background."""
TRIED = 12
"""Components that a ridge is chosen with; which ones does not depend on those that are perturbed."""
GOOD = 0.55
"""Share of the best ratio that a larger ridge must reach to be preferred. In the model large ridges lose less than the
sketch says, since shorter changes stay where second order holds, and they halve the damage elsewhere (docs/perturb.md).
"""


class RidgeTrial(Record):
    """A ridge that was tried."""

    ridge: float
    """What is added to the mean Fisher."""
    ratio: float
    """Second-order KL ratio on the examples that choices are made on, geometric mean over components."""


class Notes(Record):
    """What was chosen before the first component was perturbed; components that are added later use the same."""

    ridge: float | None = None
    """whiten: what is added to the mean Fisher."""
    ridges: list[RidgeTrial] = field(default_factory=list)
    """whiten: the ridges that were tried; empty if the ridge was given."""
    background_examples: int | None = None
    """whiten: examples of the mean Fisher, without the users of a component."""
    background_text: int = 0
    """whiten: Fisher rows of running text beside them."""
    key: str | None = None
    """Which settings of which run and decomposition this belongs to."""

    removed: ClassVar[dict[str, str]] = {"stationarity": "it is in the records of the components."}


def rejection_mix(gram: torch.Tensor, chosen: Sequence[int], threshold: float) -> torch.Tensor:
    """What the paper's sequential rejection makes of components, as mixtures of all of them.

    One component after another, those with |cosine| below `threshold` to what is left are projected out. A component is
    never rejected from itself.

    Args:
        gram: HHᵀ [C, C].
        chosen: The J components to keep.
        threshold: Largest |cosine| of a component that is projected out.

    Returns:
        The mixtures, float64 [J, C].
    """
    K = gram.double()
    lengths = K.diagonal().sqrt()
    mixes = torch.zeros(len(chosen), len(K), dtype=torch.float64)
    for mix, j in zip(mixes, chosen, strict=True):
        mix[j] = 1
        for other in range(len(K)):
            if other == j or lengths[other] == 0:
                continue
            inner = float(K[other] @ mix)
            length = float(mix @ K @ mix) ** 0.5
            if length > 0 and abs(inner) < threshold * length * float(lengths[other]):
                mix[other] -= inner / float(K[other, other])
    return mixes


class FisherRows(Record):
    """Rows of some examples at their own length: G_iᵀG_i is the Fisher of example i, not one of unit norm."""

    examples: Array
    """Numbers of the examples, ascending, [n]."""
    owner: Array
    """Position in `examples` of each row, [R]."""
    places: Array
    """Place of each row among all rows of the run, [R]."""
    scales: torch.Tensor
    """What a stored row was multiplied with, float64 [R]."""
    rows: torch.Tensor
    """float32 [R, p]."""

    def part(self, inside: Array) -> torch.Tensor:
        """Positions of the rows of some of the examples; `inside` is bool [n]."""
        return torch.from_numpy(inside[self.owner].nonzero()[0])


def read_fishers(run: Run, examples: Array) -> FisherRows:
    """The Fisher rows of some examples.

    Args:
        run: The run.
        examples: Numbers of the examples in any order, none of them twice, [n].

    Returns:
        Their rows; memory 4 · rows · p.
    """
    source = run.source("fisher")
    examples = np.sort(np.asarray(examples, dtype=np.int64))
    owner, places = _rows_of(source, examples)
    norms = torch.from_numpy(run.table["pef_norm"].to_numpy().astype(np.float64))
    scales = norms[torch.from_numpy(examples)].sqrt()[torch.from_numpy(owner)]
    rows = SubsetRows(source, examples).read(0, len(examples))
    return FisherRows(examples, owner, places, scales, rows * scales[:, None].float())


def _rows_of(source: RowSource, examples: Array) -> tuple[Array, Array]:
    """Owners (positions in `examples`, which ascend) and places of the rows of some examples, both [R]."""
    ranks = source.ranks[examples]
    starts = (np.cumsum(source.ranks) - source.ranks)[examples]
    owner = np.repeat(np.arange(len(examples)), ranks)
    return owner, starts[owner] + np.arange(len(owner)) - (np.cumsum(ranks) - ranks)[owner]


def whiten(gram: torch.Tensor, products: torch.Tensor, examples: int, ridge: float) -> torch.Tensor:
    """Weights a with (F̄ + λI)⁻¹h ∝ h − Gᵀa, for F̄ = GᵀG / examples.

    By Woodbury's identity the inverse of a p × p matrix needs only an R × R one:
    (F̄ + λI)⁻¹ = (I − Gᵀ(GGᵀ + λ·examples·I)⁻¹G) / λ.

    Args:
        gram: GGᵀ, float64 [R, R].
        products: GHᵀ, float64 [R, J].
        examples: How many examples the rows G belong to.
        ridge: λ.

    Returns:
        The weights, float64 [R, J].
    """
    system = gram.clone()
    system.diagonal().add_(ridge * examples)
    return torch.cholesky_solve(products, torch.linalg.cholesky(system))


def whiten_within(
    span: torch.Tensor, background: torch.Tensor, h: torch.Tensor, examples: int, ridge: float, jitter: float = JITTER
) -> torch.Tensor:
    """Weights c of the rows of a span for which δ = spanᵀc comes closest to (F̄ + λI)⁻¹h.

    That is the minimum of ½ δᵀ(F̄ + λI)δ − δᵀh over the span, with F̄ = GᵀG / examples of the background G: few rows
    carry the direction, but their weights make up for those left out.

    Args:
        span: Rows that may carry the direction, [S, p].
        background: Rows of the mean Fisher, [R, p].
        h: What is whitened, [p], or several [p, J].
        examples: How many examples the background belongs to.
        ridge: λ.
        jitter: Added to the diagonal of the system, as a share of its mean.

    Returns:
        The weights, float64 [S], or [S, J].
    """
    cross = (span @ background.T).double()
    system = cross @ cross.T / examples + ridge * (span @ span.T).double()
    system.diagonal().add_(jitter * float(system.diagonal().mean()))
    products = (span @ h).double()
    return torch.cholesky_solve(products.view(len(span), -1), torch.linalg.cholesky(system)).view_as(products)


def read_background(run: Run, fit: Array, seed: int) -> FisherRows:
    """Rows of the mean Fisher: those of random fitted examples, at most `BACKGROUND_ROWS`.

    Args:
        run: The run.
        fit: Examples that may be part of it, ascending.
        seed: Seed of the draw, where there are too many.

    Returns:
        The rows.

    Raises:
        UserError: The run has no Fisher rows.
    """
    if "fisher" not in run.manifest.collected:
        raise UserError(f"{run.path} has no Fisher rows to whiten with. Collect with --fisher, or use reject.")
    shuffled = np.random.default_rng([seed, 2]).permutation(fit)
    ranks = run.source("fisher").ranks[shuffled]
    return read_fishers(run, shuffled[np.cumsum(ranks) <= BACKGROUND_ROWS])


class Background(Record):
    """What directions should leave alone: fitted examples, and running text."""

    task: FisherRows
    """Rows of fitted examples."""
    text: torch.Tensor
    """T [n, p], for which TᵀT is the mean Fisher of a position of running text; no rows if text does not count."""

    @functools.cached_property
    def products(self) -> torch.Tensor:
        """Inner products of all rows, those of running text last, float64."""
        rows = torch.cat([self.task.rows, self.text])
        return (rows @ rows.T).double()

    def without(self, examples: Array) -> Shown:
        """The background of a direction that some examples use.

        Args:
            examples: Numbers of these examples, which do not belong to it.

        Returns:
            What is left, with the running text.
        """
        inside = ~np.isin(self.task.examples, examples)
        keep = self.task.part(inside)
        text = torch.arange(len(self.text)) + len(self.task.rows)
        count = int(inside.sum())
        scales = torch.cat([torch.ones(len(keep)), torch.full((len(text),), float(count) ** 0.5)])
        every = torch.cat([keep, text])
        rows = torch.cat([self.task.rows[keep], self.text * float(count) ** 0.5])
        gram = self.products[every][:, every] * scales[:, None] * scales
        return Shown(keep, rows, gram, count)


class Shown(Record):
    """A background without the users of one component."""

    keep: torch.Tensor
    """Positions of its task rows among those of the whole background, [K]."""
    rows: torch.Tensor
    """G [R, p], the task rows first: GᵀG ÷ `examples` is the mean Fisher of an example plus that of a text position."""
    gram: torch.Tensor
    """GGᵀ, float64 [R, R]."""
    examples: int
    """How many examples the task rows belong to."""


def choose_ridge(
    background: Background,
    outside: Sequence[Array],
    vectors: torch.Tensor,
    tops: Sequence[FisherRows],
    rest: FisherRows,
) -> tuple[float, list[RidgeTrial]]:
    """A ridge with a good second-order KL ratio on examples that carry nothing of the directions.

    Among ridges whose ratios hardly differ, the largest is taken: its directions are shorter for the same effect, so
    they change less that nobody has measured.

    Args:
        background: What directions should leave alone.
        outside: For each vector, the examples that do not belong to its background.
        vectors: Components to whiten, [J, p].
        tops: For each vector, the rows of its top examples among those that choices are made on.
        rest: Rows of other such examples; top examples of a vector among them are not counted for it.

    Returns:
        The ridge, and all that were tried.
    """
    task = len(background.task.rows)
    largest = float(torch.linalg.eigvalsh(background.products[:task, :task])[-1]) / len(background.task.examples)
    logs = np.zeros((len(RIDGES), len(vectors)))
    for j, (without, h, top) in enumerate(zip(outside, vectors, tops, strict=True)):
        shown = background.without(without)
        others = rest.rows[rest.part(~np.isin(rest.examples, top.examples))]
        beside = len(np.setdiff1d(rest.examples, top.examples))
        for place, share in enumerate(RIDGES):
            products = (shown.rows @ h[:, None]).double()
            a = whiten(shown.gram, products, shown.examples, share * largest)[:, 0]
            white = h - a.float() @ shown.rows
            effects = [float((rows @ white).double().square().sum()) for rows in (top.rows, others)]
            logs[place, j] = np.log(ratio(effects[0] / len(top.examples), effects[1] / beside))
    trials = [RidgeTrial(share * largest, float(np.exp(log))) for share, log in zip(RIDGES, logs.mean(1), strict=True)]
    enough = GOOD * max(trial.ratio for trial in trials)
    return max(trial.ridge for trial in trials if trial.ratio >= enough), trials


def whiten_sums(
    run: Run, sums: RowSums, background: Background, outside: Sequence[Array], ridge: float, carriers: float
) -> RowSums:
    """Whiten vectors, and solve for them again within the span of those examples that weigh most in the result.

    Args:
        run: The run.
        sums: J vectors.
        background: What they should leave alone.
        outside: For each vector, the examples that do not belong to its background.
        ridge: What is added to the mean Fisher.
        carriers: Share of the examples that may carry a vector. Rows of running text never do.

    Returns:
        The whitened vectors, as sums of rows.
    """
    vectors, task = sums.vectors.clone(), background.task
    weights = {kind: values.clone() for kind, values in sums.weights.items()}
    fisher = weights.setdefault("fisher", torch.zeros(len(vectors), int(run.source("fisher").ranks.sum())))
    for j, without in enumerate(outside):
        shown = background.without(without)
        on_vector = (shown.rows @ sums.vectors[j, :, None]).double()
        a = whiten(shown.gram, on_vector, shown.examples, ridge)[:, 0]
        vectors[j] -= a.float() @ shown.rows
        fisher[j, task.places[shown.keep.numpy()]] -= (a[: len(shown.keep)] * task.scales[shown.keep]).float()
    whole = RowSums(vectors, weights)
    if carriers >= 1 and not len(background.text):
        return whole
    sizes = example_sizes(whole, {kind: run.source(kind) for kind in weights})
    carried = RowSums(torch.zeros_like(vectors), {"fisher": torch.zeros_like(fisher)})
    for j, without in enumerate(outside):
        allowed = np.union1d(task.examples, without)
        order = allowed[np.argsort(-sizes[j, allowed], kind="stable")]
        span = read_fishers(run, order[: max(1, round(carriers * len(order)))])
        shown = background.without(without)
        c = whiten_within(span.rows, shown.rows, sums.vectors[j], shown.examples, ridge)
        carried.vectors[j] = c.float() @ span.rows
        carried.weights["fisher"][j, span.places] = (c * span.scales).float()
    return carried


def carry(source: RowSource, sums: RowSums, carriers: float) -> RowSums:
    """Vectors that few examples carry: those that weigh most, with the weights that come closest to the whole sum.

    Args:
        source: Rows of the one kind that the vectors are sums of.
        sums: J vectors.
        carriers: Share of the examples of a sum that may carry it.

    Returns:
        The closest vectors within the span of their carriers' rows.
    """
    ((kind, weights),) = sums.weights.items()
    sizes = example_sizes(sums, {kind: source})
    carried = RowSums(torch.zeros_like(sums.vectors), {kind: torch.zeros_like(weights)})
    for j, h in enumerate(sums.vectors):
        count = max(1, round(carriers * int((sizes[j] > 0).sum())))
        examples = np.sort(np.argsort(-sizes[j], kind="stable")[:count])
        rows = SubsetRows(source, examples).read(0, count).float()
        c = whiten_within(rows, rows[:0], h, 1, 1.0, CARRIED_RIDGE).float()  # no background: only as near as it can
        carried.vectors[j] = c @ rows
        carried.weights[kind][j, _rows_of(source, examples)[1]] = c
    return carried


# --- the directions of a plan -------------------------------------------------------------------------------


class Directions(Record):
    """Directions of the sketch for some subjects of a plan."""

    sums: RowSums
    """The directions as sums of rows."""
    targets: torch.Tensor
    """What they should be: made of the components as they are stored, float32 [J, p]."""
    stationarity: list[float]
    """Cosine of each component with the sum of rows that stands for it."""


class DirectionMaker:
    """Makes the directions of a decomposition's components and of nulls, all in the same way."""

    def __init__(
        self, run: Run, decomposition: Decomposition, plan: Plan, config: PerturbConfig, model: Prepared | None = None
    ) -> None:
        """Read the background and choose a ridge, where the direction needs them.

        Args:
            run: The run that was decomposed.
            decomposition: The decomposition.
            plan: Who takes part in what.
            config: How directions are made.
            model: The run's model, for rows of running text that whitening leaves alone, too; no text if not given.
        """
        self.run, self.decomposition, self.plan, self.config = run, decomposition, plan, config
        self.notes = Notes()
        if config.direction == "whiten":
            task = read_background(run, plan.fit, config.seed)
            text = background_rows(run, model, config.seed) if model else torch.zeros(0, task.rows.shape[1])
            self._background = Background(task, text)
            ridge, trials = (config.ridge, []) if config.ridge else self._choose_ridge()
            self.notes = Notes(ridge, trials, len(task.examples), len(text))

    def _choose_ridge(self) -> tuple[float, list[RidgeTrial]]:
        plan = self.plan
        shuffled = np.random.default_rng([self.config.seed, 3]).permutation(len(plan.members)).tolist()
        ranked = ((j, plan.component(j).tune[0].top) for j in shuffled)
        chosen = dict(itertools.islice(((j, top) for j, top in ranked if len(top)), TRIED))
        outside = [users(self.decomposition, plan.members[j]) for j in chosen]
        tops = [read_fishers(plan.run, top) for top in chosen.values()]
        mixes = torch.stack([group_mix(self.decomposition, plan.members[j]) for j in chosen])
        vectors = (mixes @ self.decomposition.components.double()).float()
        return choose_ridge(self._background, outside, vectors, tops, read_fishers(plan.run, plan.tune.examples))

    def make(self, subjects: Sequence[Subject]) -> Directions:
        """The directions of some components and nulls.

        Args:
            subjects: J of them.

        Returns:
            One direction for each.
        """
        decomposition, kind = self.decomposition, self.decomposition.kind
        source = self.run.source(kind)
        groups = {j: group_sum(source, s.group) for j, s in enumerate(subjects) if s.group is not None}
        mix = torch.stack([self._mix(s, groups[j][0] if j in groups else None) for j, s in enumerate(subjects)])
        sums = component_sums(decomposition, source, mix)
        targets = (mix @ decomposition.components.double()).float()
        for j, (vector, weights) in groups.items():
            sums.vectors[j] += vector
            sums.weights[kind][j] += weights
            targets[j] += vector
        cosines = torch.nn.functional.cosine_similarity(sums.vectors, targets, dim=1)
        stationarity = [round(value, 6) for value in cosines.tolist()]
        if self.config.direction == "reject" and self.config.carriers < 1:
            sums = carry(source, sums, self.config.carriers)
        if self.config.direction != "whiten":
            return Directions(sums, targets, stationarity)
        members = self.plan.members
        outside = [users(decomposition, members[s.number]) if s.group is None else s.group for s in subjects]
        white = whiten_sums(self.run, sums, self._background, outside, self.notes.ridge or 0.0, self.config.carriers)
        return Directions(white, white.vectors, stationarity)

    def _mix(self, subject: Subject, group: torch.Tensor | None) -> torch.Tensor:
        """What a direction takes of every component, float64 [C]; a null takes only what is rejected from its own."""
        H = self.decomposition.components.float()
        mix, own = torch.zeros(len(H), dtype=torch.float64), list[int]()
        if group is None:
            own = self.plan.members[subject.number]
            mix = group_mix(self.decomposition, own)
            group = (mix @ H.double()).float()
        if self.config.direction == "reject":
            others = [j for j in range(len(H)) if j not in own]
            K = gram(torch.cat([H[others], group[None]]))
            mix[others] += rejection_mix(K, [len(others)], self.config.threshold)[0, :-1]
        return mix
