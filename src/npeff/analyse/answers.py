"""What moving along a component does to the answers of its examples, from the rows that the run keeps.

A stored row is v J / √c with an output direction v, J = ∂z/∂θ and c the norm of the example's Fisher. For a change of
the parameters whose sketch is h, V J δ = √c · G h, and exact directions V span all changes of the logits but the
constant one, which changes no probability. So the change of logits is V⁺ (√c G h) and that of log p_a is its difference
from the mean under p. Nothing passes through the model.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from npeff.collect.config import CollectConfig
from npeff.collect.directions import make_directions
from npeff.decompose.base import Decomposition
from npeff.decompose.config import LIFTABLE_METHODS
from npeff.store.rows import SubsetRows
from npeff.store.run import Run
from npeff.utils import Array, Record, from_dict, rounded

LISTED = 8
"""Answers that are listed for a component: those that change most."""


class Answers(Record):
    """How log-probabilities of answers change, for a step of length 1 along a component."""

    names: list[str]
    """The answers that change most, in the order of the mean change: those that rise come first."""
    signature: list[float]
    """Mean change of log p of each over the examples."""
    coherence: float
    """How alike the examples are: length of the mean change ÷ mean length. 1: all the same, 0: they cancel."""
    sign: int
    """What the component was multiplied with, so that + makes its examples' own predictions likelier on average."""
    argues_for: str
    """The answer whose probability rises most along +."""
    examples: list[int]
    """The examples."""
    changes: list[list[float]]
    """Change of log p of each answer in each example."""


def can_read(run: Run, decomposition: Decomposition) -> bool:
    """Whether a run has the rows that changes of answers are read from."""
    return decomposition.config.method in LIFTABLE_METHODS and "fisher" in run.manifest.collected and run.has_rows


def change_of_answers(
    run: Run, examples: Sequence[int], vectors: torch.Tensor, p: torch.Tensor | None = None
) -> torch.Tensor:
    """Change of log-probabilities along vectors of the sketch, to first order.

    Args:
        run: A run with Fisher rows.
        examples: Numbers of n examples, ascending.
        vectors: J vectors, [J, p]; a step along one has its length.
        p: Probabilities of the answers [n, r]; as they were collected if not given.

    Returns:
        float64 [n, J, r].
    """
    config = from_dict(CollectConfig, run.manifest.config)
    p = run.tensor("probabilities")[list(examples)].double() if p is None else p.double()
    p = p / p.sum(1, keepdim=True)
    V, _ = make_directions(config.directions, p, list(examples))
    if config.directions.rank is not None:  # rows were mixed after the sketch
        V = run.tensor("mixture")[list(examples)][:, :, : V.shape[1]].to(V) @ V
    rows = SubsetRows(run.source("fisher"), np.asarray(examples))
    norms = torch.from_numpy(run.table["pef_norm"].to_numpy().copy())[list(examples)].double().sqrt()
    products = torch.zeros(len(p), V.shape[1], len(vectors), dtype=torch.float64)
    owners = np.repeat(np.arange(len(p)), rows.ranks)
    places = np.concatenate([np.arange(rank) for rank in rows.ranks]) if len(owners) else owners
    products[owners, places] = (rows.read(0, len(p)) @ vectors.float().T).double() * norms[owners, None]
    inverse = V.mT @ torch.linalg.pinv(V @ V.mT, hermitian=True, rtol=1e-10)
    change = (inverse @ products).mT
    return change - (change * p[:, None]).sum(2, keepdim=True)


def signatures(run: Run, decomposition: Decomposition, examples: Sequence[Array]) -> list[Answers | None]:
    """What components do to the answers of their examples, where the run keeps what that is read from.

    Args:
        run: The run.
        decomposition: Its components, C of them.
        examples: For each component, its examples, best first.

    Returns:
        [C]; None for a component without examples, and for all where answers are not those of the task's labels.
    """
    names = run.manifest.task.labels
    if not names or not can_read(run, decomposition) or not run.has_tensor("probabilities"):
        return [None] * len(examples)
    p, pairs = run.tensor("probabilities"), zip(decomposition.components, examples, strict=True)
    return [signature(run, each, top, names.__getitem__, p[np.sort(top)]) if len(top) else None for each, top in pairs]


def signature(
    run: Run, component: torch.Tensor, examples: Array, name: Callable[[int], str], p: torch.Tensor | None = None
) -> Answers:
    """What a component does to the answers of its examples.

    Args:
        run: The run.
        component: The component, [p].
        examples: Its examples, best first.
        name: What an answer is called, by its number.
        p: Probabilities of the answers of these examples in ascending order [n, r]; as collected if not given.

    Returns:
        The changes, with the component's sign fixed by them.
    """
    order = np.argsort(examples)
    chosen = examples[order].tolist()
    probabilities = (run.tensor("probabilities")[chosen] if p is None else p).double()
    changes = change_of_answers(run, chosen, component[None], probabilities)[np.argsort(order), 0]
    probabilities = probabilities[np.argsort(order)]
    own = changes.gather(1, probabilities.argmax(1, keepdim=True))
    sign = -1 if float(own.mean()) < 0 else 1
    changes = changes * sign
    mean = changes.mean(0)
    listed = sorted(mean.abs().topk(min(LISTED, len(mean))).indices.tolist(), key=lambda a: -float(mean[a]))
    return Answers(
        names=[name(a) for a in listed],
        signature=rounded(mean[listed].tolist()),
        coherence=round(float(_coherence(changes)), 4),
        sign=sign,
        argues_for=name(int((changes * probabilities).mean(0).argmax())),
        examples=examples.tolist(),
        changes=[rounded(row) for row in changes[:, listed].tolist()],
    )


def coherence_by_chance(run: Run, decomposition: Decomposition, count: int) -> float:
    """Coherence of as many examples as components have, drawn at random and the same for all components.

    Args:
        run: A run whose answers `signatures` can read.
        decomposition: Its components.
        count: How many examples.

    Returns:
        Mean over components.
    """
    drawn = np.sort(np.random.default_rng(0).permutation(np.flatnonzero(run.usable))[:count])
    return float(_coherence(change_of_answers(run, drawn.tolist(), decomposition.components)).mean())


def _coherence(changes: torch.Tensor) -> torch.Tensor:
    """Length of the mean change ÷ mean length, of changes [n, ..., r]."""
    return changes.mean(0).norm(dim=-1) / changes.norm(dim=-1).mean(0).clamp_min(1e-300)
