"""Which components, which examples, and which directions of the sketch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from npeff.analyse.ranking import top_examples
from npeff.decompose.als import gram
from npeff.decompose.base import Decomposition, Order
from npeff.perturb.config import Direction
from npeff.perturb.row_weights import RowSums, check_component, component_sums, example_sizes
from npeff.perturb.whitening import FisherRows, choose_ridge, read_fishers, rejection_mix, whiten, whiten_within
from npeff.store.run import Run
from npeff.utils.errors import UserError


@dataclass(frozen=True)
class Tops:
    """Examples of a component under one order of its coefficients."""

    component: int
    order: Order
    top: np.ndarray
    """The first ones, best first."""
    related: np.ndarray
    """As many behind them, or fewer."""


@dataclass(frozen=True)
class Plan:
    """Components to perturb and examples to look at."""

    tops: dict[int, list[Tops]]
    """Component → its examples under every order of the method."""
    random: np.ndarray
    """Examples to compare with, drawn from all that are usable, ascending."""
    background: np.ndarray
    """Examples that whitening may use: none of the random ones."""

    @property
    def components(self) -> list[int]:
        return list(self.tops)

    def top_examples(self, component: int) -> np.ndarray:
        """Top examples of a component under any order, ascending."""
        return np.unique(np.concatenate([tops.top for tops in self.tops[component]]))


def make_plan(
    run: Run, decomposition: Decomposition, components: Sequence[int], count: int, top: int, random: int, seed: int
) -> Plan:
    """Use `components`, or without any draw `count` of those that have `top` examples; draw the random examples."""
    usable = np.flatnonzero(run.usable)
    if len(usable) < random + top:
        raise UserError(
            f"{run.path} has {len(usable)} usable examples: too few for {top} top and {random} random ones. "
            f"Lower --random or collect more."
        )
    chosen = list(dict.fromkeys(components))
    for number in chosen:
        check_component(decomposition, number)
    scores = {order: decomposition.scores(order).float().cpu().numpy() for order in decomposition.orders}
    if not chosen:
        shuffled = np.random.default_rng([seed, 0]).permutation(len(decomposition.components))
        fit = [j for j in shuffled.tolist() if all((score[:, j] > 0).sum() >= top for score in scores.values())]
        chosen = sorted(fit[:count])
        if not chosen:
            raise UserError(f"No component has {top} examples. Lower --top, or decompose into fewer components.")
    tops = {}
    for number in chosen:
        orders = [(order, top_examples(score[:, number])) for order, score in scores.items()]
        tops[number] = [
            Tops(number, order, ranking[:top], ranking[top : 2 * top]) for order, ranking in orders if len(ranking)
        ]
    drawn = np.sort(np.random.default_rng([seed, 1]).permutation(usable)[:random])
    return Plan(tops, drawn, np.setdiff1d(usable, drawn))


@dataclass(frozen=True)
class Whitening:
    """A background to whiten against, and the ridge."""

    background: FisherRows
    gram: torch.Tensor
    """GGᵀ of its rows, float64 [R, R]."""
    ridge: float
    table: list[dict[str, float]]
    """Second-order ratios of the ridges that were tried; empty if the ridge was given."""

    @staticmethod
    def prepare(
        run: Run, plan: Plan, vectors: torch.Tensor, ridge: float | None, most_rows: int, seed: int
    ) -> Whitening:
        """Read the background, at most `most_rows` rows, and choose the ridge for vectors [J, p] of plan.components."""
        ranks = run.source("fisher").ranks
        shuffled = np.random.default_rng([seed, 2]).permutation(plan.background)
        kept = shuffled[np.cumsum(ranks[shuffled]) <= most_rows]
        background = read_fishers(run, kept)
        table: list[dict[str, float]] = []
        if ridge is None:
            top = [read_fishers(run, plan.top_examples(number)) for number in plan.components]
            ridge, table = choose_ridge(background, top, vectors, seed)
        return Whitening(background, (background.rows @ background.rows.T).double(), ridge, table)

    def apply(self, sums: RowSums, excluded: Sequence[np.ndarray], total_rows: int) -> RowSums:
        """Whiten every vector against the background without the examples that are `excluded` for it."""
        vectors = sums.vectors.clone()
        weights = {kind: values.clone() for kind, values in sums.weights.items()}
        fisher = weights.setdefault("fisher", torch.zeros(len(vectors), total_rows))
        for j, without in enumerate(excluded):
            inside = ~np.isin(self.background.examples, without)
            keep = torch.from_numpy(inside[self.background.owner].nonzero()[0])
            G = self.background.rows[keep]
            products = (G @ sums.vectors[j, :, None]).double()
            a = whiten(self.gram[keep][:, keep], products, int(inside.sum()), self.ridge)[:, 0]
            vectors[j] -= a.float() @ G
            fisher[j, self.background.places[keep.numpy()]] -= (a * self.background.scales[keep]).float()
        return RowSums(vectors, weights)

    def carry(self, run: Run, whole: RowSums, h: torch.Tensor, excluded: Sequence[np.ndarray], share: float) -> RowSums:
        """Whitened vectors anew, carried by a share of the examples: those that weigh most in `whole`, from `apply`.

        `h` [J, p] is what is whitened. Examples that are neither in the background nor excluded (a component's top
        examples are the one, random ones the other) carry nothing.
        """
        sizes = example_sizes(whole, {kind: run.source(kind) for kind in whole.weights})
        vectors = torch.zeros_like(whole.vectors)
        weights = torch.zeros_like(whole.weights["fisher"])
        for j, without in enumerate(excluded):
            allowed = np.union1d(self.background.examples, without)
            order = allowed[np.argsort(-sizes[j, allowed], kind="stable")]
            span = read_fishers(run, order[: max(1, round(share * len(order)))])
            inside = ~np.isin(self.background.examples, without)
            G = self.background.rows[torch.from_numpy(inside[self.background.owner])]
            c = whiten_within(span.rows, G, h[j], int(inside.sum()), self.ridge)
            vectors[j] = c.float() @ span.rows
            weights[j, span.places] = (c * span.scales).float()
        return RowSums(vectors, {"fisher": weights})


@dataclass(frozen=True)
class Directions:
    """Directions of the sketch for a plan's components."""

    sums: RowSums
    """The directions as sums of rows."""
    targets: torch.Tensor
    """What they should be: made of the components as they are stored, float32 [J, p]."""
    notes: dict[str, Any]
    """What was chosen on the way; stationarity is the cosine of each component with the sum that stands for it."""


def plan_directions(
    run: Run,
    decomposition: Decomposition,
    plan: Plan,
    direction: Direction,
    threshold: float = 0.5,
    ridge: float | None = None,
    background_rows: int = 4096,
    carriers: float = 1.0,
    seed: int = 0,
) -> Directions:
    """The directions of a plan's components."""
    C = len(decomposition.components)
    mix = torch.eye(C, dtype=torch.float64)[plan.components]
    if direction == "reject":
        mix = rejection_mix(gram(decomposition.components.float()), plan.components, threshold)
    sums = component_sums(decomposition, run.source(decomposition.kind), mix)
    targets = (mix @ decomposition.components.double()).float()
    cosines = torch.nn.functional.cosine_similarity(sums.vectors, targets, dim=1)
    notes: dict[str, Any] = {"stationarity": [round(value, 6) for value in cosines.tolist()]}
    if direction == "whiten":
        if "fisher" not in run.manifest["identity"]["collected"]:
            raise UserError(f"{run.path} has no Fisher rows to whiten with. Collect with --fisher, or use reject.")
        whitening = Whitening.prepare(run, plan, sums.vectors, ridge, background_rows, seed)
        excluded = [plan.top_examples(number) for number in plan.components]
        h = sums.vectors
        sums = whitening.apply(sums, excluded, int(run.source("fisher").ranks.sum()))
        if carriers < 1:
            sums = whitening.carry(run, sums, h, excluded, carriers)
        notes |= {
            "ridge": whitening.ridge,
            "ridges": whitening.table,
            "background_examples": len(whitening.background.examples),
        }
        targets = sums.vectors
    return Directions(sums, targets, notes)
