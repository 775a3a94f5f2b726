"""Who takes part in what: the one place that says on which examples an effect is measured.

A direction that is made of some examples acts on these examples more than on others that use the same component. So the
examples are divided into parts, and each does one thing:

    fit     components, background and carriers of directions are made of these
    tune    ridge, order of the examples, sign and length of a change are chosen on these
    test    what a change does is measured on these, once

`heldout` takes tune and test from the examples that the decomposition has held out, or from another run. `paper` is the
paper's protocol: all three parts are all examples, so its ratios are in-sample.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from npeff.analyse.groups import group_scores, groups
from npeff.analyse.ranking import top_examples
from npeff.decompose.base import Decomposition, Order
from npeff.perturb.config import PerturbConfig
from npeff.perturb.lift import check_component, fitted_coefficients
from npeff.store.examples import whole_texts
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError

TUNE = 1 / 3
"""Share of the held-out examples that choices are made on."""
TUNE_RANDOM = 32
"""Random examples that a sign is chosen on, at most."""
MOST_TOP = 1 / 4
"""Share of a part that may count as top examples of one component."""
FEWEST = 4
"""Top examples that a component must have in each part."""
USES = 0.1
"""An example uses a component if its coefficient is at least this share of the component's largest."""
MOST_USERS = 0.25
"""Share of the fitted examples that may count as users: those with the largest coefficients."""


class Ranked(Record):
    """Examples of a component in one part, under one order of its coefficients."""

    order: Order
    """What the examples are ranked by."""
    top: Array
    """The first ones, best first."""
    related: Array
    """As many behind them, or fewer."""


class Part(Record):
    """Some of the examples, and those of them that all components are compared with."""

    examples: Array
    """All of them, ascending."""
    top: int
    """How many count as top examples of a component."""
    random: Array
    """Random ones to compare with, ascending. A component's own top examples among them do not count."""

    def rank(self, order: Order, scores: Array) -> Ranked:
        """The examples of a component.

        Args:
            order: What the scores are.
            scores: Scores of all examples of the run, [m].

        Returns:
            The top and the related examples of this part.
        """
        ranking = self.examples[top_examples(scores[self.examples])]
        return Ranked(order, ranking[: self.top], ranking[self.top : 2 * self.top])

    def draw(self, generator: np.random.Generator) -> Ranked:
        """As many examples at random in place of a component's."""
        shuffled = generator.permutation(self.examples)
        return Ranked("positive", shuffled[: self.top], shuffled[self.top : 2 * self.top])


class Subject(Record):
    """Something that the model is changed along, with the examples that are looked at."""

    kind: str
    """`component`, or `null`: a random group of examples in place of a component's."""
    number: int
    """Number of the component, or of the null."""
    tune: list[Ranked]
    """What choices are made on, for every order of the method."""
    test: list[Ranked]
    """What is measured, in the same orders."""
    group: Array | None = None
    """Of a null: the examples of the fit that the direction is made of."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


class Plan(Record):
    """Components to perturb and examples to look at."""

    protocol: str
    """heldout or paper."""
    run: Run
    """The run whose examples are measured: the one that was decomposed, or another."""
    fit: Array
    """Examples of the decomposed run that directions may be made of, ascending."""
    tune: Part
    """Examples that choices are made on."""
    test: Part
    """Examples that are measured."""
    scores: Mapping[Order, Array]
    """Scores of all examples of `run` for every order, [m, C], or [m, groups]."""
    components: list[int]
    """Numbers of the components, ascending; of the groups where groups take their place."""
    members: list[list[int]]
    """The components that each of them is made of: itself alone, or the members of a group."""

    def component(self, number: int) -> Subject:
        """A component with its examples."""
        tune, test = (
            [part.rank(order, score[:, number]) for order, score in self.scores.items()]
            for part in (self.tune, self.test)
        )
        return Subject("component", number, tune, test)

    def null(self, number: int, seed: int) -> Subject:
        """A random group in the place of a component's top examples, in every part.

        Args:
            number: Number of the null.
            seed: Seed of all of them.

        Returns:
            The null, with as many examples as a component has.
        """
        generator = np.random.default_rng([seed, 4, number])
        group = np.sort(generator.permutation(self.fit)[: self.test.top])
        return Subject("null", number, [self.tune.draw(generator)], [self.test.draw(generator)], group)


def make_plan(run: Run, decomposition: Decomposition, config: PerturbConfig, evaluate_on: Run | None = None) -> Plan:
    """Choose components and examples. The parts and their random examples do not depend on the components.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        config: Which components or groups, how many examples, and by which protocol.
        evaluate_on: Another run, collected with the same model and sketch, to take the held-out examples from.

    Returns:
        The plan.

    Raises:
        UserError: There are too few examples, or a component does not exist or is not used.
    """
    usable, top, random, seed = run.usable, config.top, config.random, config.seed
    fit = np.setdiff1d(np.flatnonzero(usable), decomposition.notes.held_out)
    coefficients = decomposition.coefficients
    if config.protocol == "paper":
        fit = np.flatnonzero(usable)
        if len(fit) < random + top:
            raise UserError(
                f"{run.path} has {len(fit)} usable examples: too few for {top} top and {random} random ones. "
                f"Lower --random or collect more."
            )
        tune = test = _part(fit, top, random, np.random.default_rng([seed, 1]))
        fit = np.setdiff1d(fit, test.random)
    else:
        other = evaluate_on or run
        if evaluate_on is not None:
            coefficients = decomposition.transform(other.source(decomposition.kind))
        pool = _unseen(run, fit, other, decomposition, evaluate_on is not None)
        shuffled = np.random.default_rng([seed, 1]).permutation(pool)
        at = round(TUNE * len(pool))
        drawn = np.random.default_rng([seed, 2])
        parts = [_part(shuffled[:at], top, min(random, TUNE_RANDOM), drawn), _part(shuffled[at:], top, random, drawn)]
        if min(part.top for part in parts) < min(FEWEST, top):
            raise UserError(
                f"{len(pool)} held-out examples are too few: a third of them is needed to choose sign and length of a "
                f"change, and {FEWEST} top examples are at most a quarter of each part. Hold out at least "
                f"{round(FEWEST / MOST_TOP / TUNE)}."
            )
        tune, test = parts
    members = [[j] for j in range(coefficients.shape[1])]
    scores = {order: decomposition.scores(order, coefficients).float().cpu() for order in decomposition.orders}
    if config.group:
        members = [group.members for group in groups(decomposition)]
        sums = [group_scores(coefficients.float(), each) for each in members]
        scores = {decomposition.orders[-1]: torch.stack(sums, dim=1) if sums else coefficients[:, :0]}
    arrays = {order: values.numpy() for order, values in scores.items()}
    plan = Plan(config.protocol, evaluate_on or run, fit, tune, test, arrays, [], members)
    return replace(plan, components=_choose(plan, decomposition, config))


def _part(examples: Array, top: int, random: int, generator: np.random.Generator) -> Part:
    drawn = np.sort(generator.permutation(np.sort(examples))[:random])
    return Part(np.sort(examples), min(top, int(MOST_TOP * len(examples))), drawn)


def _unseen(run: Run, fit: Array, other: Run, decomposition: Decomposition, elsewhere: bool) -> Array:
    """Usable examples that took no part in the fit, nor have the same text as one that did."""
    usable = np.flatnonzero(other.usable)
    candidates = usable if elsewhere else np.intersect1d(usable, decomposition.notes.held_out)
    if not len(candidates):
        raise UserError(
            f"All examples of {run.path} took part in the fit of this decomposition: none is left to measure an effect "
            f"on. Decompose with --holdout 0.3, give another run with --evaluate-on, or take the paper's in-sample "
            f"ratio with --protocol paper."
        )
    seen = set(whole_texts(run.table).take(fit).to_pylist())
    texts = whole_texts(other.table).take(candidates).to_pylist()
    unseen = candidates[[text not in seen for text in texts]]
    if len(unseen) < len(candidates):
        print(f"{len(candidates) - len(unseen)} held-out examples have a text that was fitted: they are not measured.")
    return unseen


def _choose(plan: Plan, decomposition: Decomposition, config: PerturbConfig) -> list[int]:
    """The components that are asked for, or some of those that enough examples of every part use."""
    least = plan.test.top if plan.protocol == "paper" else min(FEWEST, plan.test.top)

    def used(number: int) -> int:
        subject = plan.component(number)
        return min(len(ranked.top) for ranked in (*subject.tune, *subject.test))

    chosen = list(dict.fromkeys(config.group or config.component))
    for number in chosen:
        if not config.group:
            check_component(decomposition, number)
        elif not 0 <= number < len(plan.members):
            have = (
                f"the decomposition has 0 to {len(plan.members) - 1}" if plan.members else "the decomposition has none"
            )
            raise UserError(f"There is no group {number}: {have}. `npeff analyse` lists them.")
        if plan.protocol != "paper" and used(number) < least:
            raise UserError(
                f"Component {number} is used by fewer than {least} of the {len(plan.tune.examples)} examples to choose "
                f"on or of the {len(plan.test.examples)} to measure: too few to tell. Hold out more examples."
            )
    if not chosen:
        shuffled = np.random.default_rng([config.seed, 0]).permutation(len(plan.members)).tolist()
        chosen = list(itertools.islice((number for number in shuffled if used(number) >= least), config.count))
        if not chosen:
            raise UserError(
                f"No component has {least} examples in every part. Lower --top, hold out more examples, or decompose "
                f"into fewer components."
            )
    return sorted(chosen)


def users(decomposition: Decomposition, members: list[int]) -> Array:
    """Fitted examples that use a component or a group; they do not belong to what its direction should leave alone.

    Args:
        decomposition: A decomposition.
        members: Number of the component, or of the group's components.

    Returns:
        Their numbers, ascending.
    """
    sizes = group_scores(fitted_coefficients(decomposition), members).numpy()
    order = np.argsort(-sizes, kind="stable")[: int(MOST_USERS * len(sizes))]
    return np.sort(order[sizes[order] >= max(USES * sizes.max(), 1e-30)])
