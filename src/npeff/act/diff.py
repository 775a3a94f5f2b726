"""`npeff diff`: what differs between two models, or along a series of them, on the same examples.

Components of two runs are matched by their coefficients over the examples that both have. How alike a component and
its match are says little by itself: other seeds and other halves of the examples give other components of the very same
model, too. So the same decomposition is made again a few times, and a component has changed only if its match in the
other run is farther from it than nine tenths of all components are from those that the same model gives again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from npeff.act.config import DiffConfig
from npeff.analyse.matching import coefficient_similarity, component_similarity
from npeff.analyse.recurrence import again
from npeff.decompose.run import open_decomposition
from npeff.store.examples import label_texts, whole_texts
from npeff.store.layout import DIFFS
from npeff.store.rows import SubsetRows
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import only_one
from npeff.utils.progress import progress
from npeff.utils.report import BLUE, RED, Column, Table, write_result
from npeff.utils.text import cut
from npeff.utils.types import Array

FALSE = 0.1
"""Share of the components of an unchanged model that may be called changed."""
PARTS = 3
"""Most components of the other run that one may be split into."""
FEWEST = 32
"""Examples that two runs must share."""
LISTED = 40
"""Examples with other answers that the report lists."""


@dataclass(frozen=True)
class Change:
    """What has become of a component in another run."""

    component: int
    """Its number."""
    status: str
    """kept; split (merged, of the last run): a few of the other's components together are what it is; lost (new):
    none of the other's is like it more than by chance; changed: anything else."""
    match: int
    """The most similar component of the other run."""
    similarity: float
    """|cos| of their coefficients over the shared examples."""
    usual: float
    """Mean similarity with the most similar component of other fits of its own run."""
    direction: float | None
    """|cos| of the two directions; None if sketch or shapes differ."""
    parts: list[int]
    """Components of the other run that it is split into."""
    answers: float
    """Share of its coefficients that lies on examples whose answers differ."""


@dataclass(frozen=True)
class OtherAnswer:
    """An example that the two models answer differently."""

    text: str
    """Its text."""
    label: str | None
    """The right answer, where it is known."""
    first: str
    """Answer of the first model."""
    last: str
    """Answer of the last model."""
    before: int
    """Component of the first run with the largest coefficient."""
    after: int
    """Component of the last run with the largest coefficient."""


@dataclass(frozen=True)
class Difference:
    """A run beside the last one."""

    run: str
    """The earlier run."""
    examples: int
    """Examples that both have."""
    accuracy: tuple[float, float] | None
    """Of both on these, where labels are known."""
    chance: float
    """Similarity that a component reaches by chance: 95% quantile for permuted examples."""
    limits: tuple[float, float]
    """How far below the usual similarity a component of the earlier and of the last run may be."""
    first: list[Change]
    """Components of the earlier run."""
    last: list[Change]
    """Components of the last run."""
    answers: list[OtherAnswer]
    """Examples with other answers."""


@dataclass(frozen=True)
class Diff:
    """diff.json."""

    runs: list[str]
    """The runs, in the order of time."""
    differences: list[Difference]
    """Each run but the last beside the last."""
    since: list[str]
    """Run from which on each component of the last one is there."""


class Side:
    """A run with its decomposition, and what other fits of it give."""

    def __init__(self, path: str, decomposition: str | None, refits: int) -> None:
        self.run = Run.open(path)
        self.found = open_decomposition(self.run, decomposition)
        self.texts = whole_texts(self.run.table).to_pylist()
        source = self.run.source(self.found.kind)
        fitted = np.setdiff1d(np.flatnonzero(self.run.usable), self.found.notes.held_out)
        fits = again(SubsetRows(source, fitted), self.found, refits)
        bar = progress(fits, desc=f"Fits of {self.run.path.name}", unit="fit", total=refits)
        self.refits = [fit.transform(source) for fit in bar]


def diff(config: DiffConfig) -> Diff:
    """Compare runs of several models on the same examples; files are in LAST_RUN/diffs/NAME.

    Args:
        config: The runs.

    Returns:
        Every run but the last beside the last.
    """
    names = config.decomposition or (None,) * len(config.runs)
    sides = [Side(path, name, config.refits) for path, name in zip(config.runs, names, strict=True)]
    last = sides[-1]
    found = [compare_sides(side, last) for side in sides[:-1]]
    paths = [side.run.path.name for side in sides]
    since = []
    for j in range(len(last.found.components)):
        there = [difference.last[j].status == "kept" for difference in found]
        since.append(paths[len(there) - next((n for n, kept in enumerate(there[::-1]) if not kept), len(there))])
    result = Diff(paths, found, since)
    folder = last.run.path / DIFFS / (config.diff or "-".join(paths[:-1]))
    with only_one(folder):
        print(f"{write_result(folder / 'diff', result, _blocks(result), _draw)}in {folder}")
    return result


def compare_sides(first: Side, last: Side) -> Difference:
    """Match the components of two runs.

    Args:
        first: The one.
        last: The other.

    Returns:
        What has become of the components of both, and whose answers differ.

    Raises:
        UserError: The runs share too few examples.
    """
    places = {text: i for i, text in enumerate(last.texts) if last.run.usable[i]}
    pairs = [(i, places[text]) for i, text in enumerate(first.texts) if text in places and first.run.usable[i]]
    if len(pairs) < FEWEST:
        raise UserError(f"{first.run.path} and {last.run.path} share {len(pairs)} examples: too few to compare them.")
    a, b = (View(side, np.array(rows)) for side, rows in zip((first, last), zip(*pairs, strict=True), strict=True))
    differ = np.array([one != two for one, two in zip(a.answers, b.answers, strict=True)])
    shuffled = b.W[torch.randperm(len(differ), generator=torch.Generator().manual_seed(0))]
    chance = float(coefficient_similarity(a.W, shuffled).amax(1).quantile(0.95))
    directions = _directions(first, last)
    other = [
        OtherAnswer(a.texts[n], a.labels[n], a.answers[n], b.answers[n], int(a.W[n].argmax()), int(b.W[n].argmax()))
        for n in np.flatnonzero(differ)
    ]
    changes = a.changes(b, chance, differ, directions, ("split", "lost"))
    turned = None if directions is None else directions.T
    accuracy = None if a.accuracy is None or b.accuracy is None else (a.accuracy, b.accuracy)
    last_changes = b.changes(a, chance, differ, turned, ("merged", "new"))
    limits = (a.limit, b.limit)
    return Difference(first.run.path.name, len(pairs), accuracy, chance, limits, changes, last_changes, other)


class View:
    """A run as far as another one has the same examples."""

    def __init__(self, side: Side, rows: Array) -> None:
        table = side.run.table.take(rows)
        self.texts, self.answers = table["text"].to_pylist(), table["prediction_text"].to_pylist()
        self.labels = label_texts(table, side.run.manifest.task.labels)
        right = [answer == label for answer, label in zip(self.answers, self.labels, strict=True) if label is not None]
        self.accuracy = float(np.mean(right)) if right else None
        self.W = side.found.coefficients[rows].float()
        found = [coefficient_similarity(self.W, other[rows]).amax(1) for other in side.refits]
        self.usual = torch.stack(found).mean(0)
        self.limit = float(_drops(torch.stack(found)).quantile(1 - FALSE))

    def changes(
        self, other: View, chance: float, differ: Array, directions: torch.Tensor | None, words: tuple[str, str]
    ) -> list[Change]:
        """What has become of every component in another run.

        Args:
            other: The other run.
            chance: Similarity that chance gives.
            differ: Examples whose answers differ, bool [n].
            directions: |cos| of the components of both [C, D], if they can be compared.
            words: What a component is called that is split, and one that is lost.

        Returns:
            One for each component.
        """
        found = []
        for j, own in enumerate(coefficient_similarity(self.W, other.W)):
            order, w = own.argsort(descending=True)[:PARTS].tolist(), self.W[:, j].double().abs().numpy()
            similarity, enough = float(own.max()), float(self.usual[j]) - self.limit
            weights, missed = nnls(other.W[:, order].double().abs().numpy(), w)
            together = max(0.0, 1 - missed**2 / max(float(w @ w), 1e-300)) ** 0.5
            parts = [k for k, weight in zip(order, weights, strict=True) if weight > 0]
            status = "kept" if similarity >= enough else words[1] if similarity <= chance else "changed"
            status = words[0] if status != "kept" and together >= enough and len(parts) > 1 else status
            direction = None if directions is None else float(directions[j, order[0]])
            answers = float(w @ differ / max(w.sum(), 1e-300))
            parts = parts if status == words[0] else []
            found.append(Change(j, status, order[0], similarity, float(self.usual[j]), direction, parts, answers))
        return found


def _drops(usual: torch.Tensor) -> torch.Tensor:
    """How far every fit is below the mean of the other fits, for every component: what an unchanged model gives."""
    others = (usual.sum(0) - usual) / (len(usual) - 1)
    return (others - usual).flatten()


def _directions(first: Side, last: Side) -> torch.Tensor | None:
    """|cos| of the components of two runs [C, D], if their models and sketches have the same shapes."""
    manifests = [side.run.manifest for side in (first, last)]
    if len({(m.parameters, str(m.config.get("sketch"))) for m in manifests}) > 1 or first.found.kind != last.found.kind:
        return None
    return component_similarity(first.found.components, last.found.components)


def _blocks(result: Diff) -> list[str | Table]:
    """The report: components of the last run, then every run beside the last."""
    columns = [Column("run"), Column("component"), Column("status"), Column("match"), Column("similarity", ".2f")]
    columns += [Column("usual", ".2f"), Column("direction", ".2f"), Column("parts"), Column("answers", ".0%")]
    table = Table("What has become of components; those that are kept only in the CSV and JSON", columns)
    blocks: list[str | Table] = []
    for each in result.differences:
        counts = [Counter(change.status for change in changes) for changes in (each.first, each.last)]
        said = "; ".join(", ".join(f"{n} {status}" for status, n in count.most_common()) for count in counts)
        right = f" Accuracy {each.accuracy[0]:.1%} and {each.accuracy[1]:.1%}." if each.accuracy else ""
        blocks.append(
            f"{each.run} beside {result.runs[-1]}, {each.examples} examples: components of the first {said} (of the "
            f"last). {len(each.answers)} answers differ.{right}"
        )
        for run, changes in ((each.run, each.first), (result.runs[-1], each.last)):
            table.rows += [
                (run, c.component, c.status, c.match, c.similarity, c.usual, c.direction, " ".join(map(str, c.parts)),
                 c.answers) for c in changes
            ]  # fmt: skip
    answers = Table(
        "Examples with other answers", [Column(n) for n in ("text", "label", "first", "last", "before", "after")]
    )
    for other in result.differences[0].answers[:LISTED]:
        answers.rows.append((cut(other.text, 80), other.label, other.first, other.last, other.before, other.after))
    timeline = Table("Since when", [Column("run"), Column("components that are there from it on")])
    timeline.rows += [(run, result.since.count(run)) for run in result.runs]
    return [table, *blocks, answers, timeline]


def _draw(axes: Any, result: Diff) -> None:
    """Similarity with the match in the other run against what the same model gives again."""
    for changes, colour, name in ((result.differences[0].first, BLUE, 0), (result.differences[0].last, RED, -1)):
        axes.scatter(
            [c.usual for c in changes], [c.similarity for c in changes], s=9, c=colour, label=result.runs[name]
        )
    axes.plot([0, 1], [0, 1], c="grey", lw=0.5)
    axes.set(xlabel="similarity with other fits of the same run", ylabel="similarity with the other run")
    axes.legend(frameon=False)
