"""Who is measured: which components, and which examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npeff.analyse.ranking import top_examples
from npeff.decompose.base import Decomposition, Order
from npeff.perturb.lift import check_component
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.types import Array


@dataclass(frozen=True)
class Tops:
    """Examples of a component under one order of its coefficients."""

    component: int
    """Its number."""
    order: Order
    """What the examples are ranked by."""
    top: Array
    """The first ones, best first."""
    related: Array
    """As many behind them, or fewer."""


@dataclass(frozen=True)
class Plan:
    """Components to perturb and examples to look at."""

    tops: dict[int, list[Tops]]
    """Component → its examples under every order of the method."""
    random: Array
    """Examples to compare with, drawn from all that are usable, ascending."""
    background: Array
    """Examples that whitening may use: none of the random ones."""

    @property
    def components(self) -> list[int]:
        return list(self.tops)

    def top_examples(self, component: int) -> Array:
        """Top examples of a component under any order, ascending."""
        return np.unique(np.concatenate([tops.top for tops in self.tops[component]]))


def make_plan(
    run: Run, decomposition: Decomposition, components: Sequence[int], count: int, top: int, random: int, seed: int
) -> Plan:
    """Choose components and examples. The random examples do not depend on the components.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        components: Numbers of components; without any, `count` of those with at least `top` examples are drawn.
        count: How many to draw.
        top: Top examples of a component.
        random: Random examples to compare with.
        seed: Seed of what is drawn.

    Returns:
        The plan.

    Raises:
        UserError: There are too few examples, or a component does not exist or is not used.
    """
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
