"""`npeff diff`: what differs between two models on the same examples, and when it came in a series of checkpoints.

Components of two runs are matched by their coefficients over the examples that both have. How alike a component and
its match are says little by itself: other seeds and other halves of the examples give other components of the very same
model, too. So the same decomposition is made again a few times, and a component has changed only if its match in the
other run is farther from it than nine tenths of all components are from those that the same model gives again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import field

import numpy as np
import torch
from scipy.optimize import nnls

from npeff.act.config import DiffConfig
from npeff.analyse.matching import coefficient_similarity, component_similarity
from npeff.analyse.recurrence import again
from npeff.decompose.run import open_decomposition
from npeff.store.examples import accuracy, label_texts, whole_texts
from npeff.store.layout import DIFFS
from npeff.store.rows import SubsetRows
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError, cut, only_one, replace, write_record
from npeff.utils.progress import progress
from npeff.utils.report import Axes, Cell, Column, Table, draw_figure, record_table, write_report

FALSE = 0.1
"""Share of the components of an unchanged model that may be called changed."""
PARTS = 3
"""Most components of the other run that one may be split into."""
FEWEST = 32
"""Examples that two runs must share."""
LISTED = 40
"""Examples with other answers that the report lists."""
CHANGE_FORMATS = {"run": "", "component": "", "status": "", "match": "", "similarity": ".2f", "usual": ".2f"}
CHANGE_FORMATS |= {"direction": ".2f", "answers": ".0%"}
ANSWER_FORMATS = dict.fromkeys(("example", "text", "label", "first", "last", "before", "after"), "")
"""Columns of the report, and how their numbers are read."""


class Change(Record):
    """What has become of a component in another run."""

    run: str
    """Its run."""
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


class OtherAnswer(Record):
    """An example that the two models answer differently."""

    example: int
    """Its number in the last run."""
    text: str
    """Its text, or the beginning of it."""
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


class Appearance(Record):
    """When a component of the last of several runs appears."""

    component: int
    """Its number."""
    appears: str
    """The first run from which on every run has it, as one that is kept until the last run."""
    similarities: list[float]
    """|cos| with the most similar component of each run before the last."""


class Diff(Record):
    """Two runs side by side: diff.json."""

    runs: tuple[str, str]
    """Their names."""
    examples: int
    """Examples that both have."""
    accuracy: tuple[float | None, float | None]
    """Of both on these, where labels are known."""
    chance: float
    """Similarity that a component reaches by chance: 95% quantile for permuted examples."""
    limits: tuple[float, float]
    """How far below the usual similarity a component of either run may be."""
    changes: list[Change]
    """Components of the first run, then of the last run."""
    answers: list[OtherAnswer]
    """Examples with other answers."""
    timeline: list[Appearance] = field(default_factory=list)
    """Of more than two runs: the components of the last run, those that appear first at the beginning."""


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
    """Compare the runs of two models on the same examples; files are in LAST_RUN/diffs/NAME.

    Args:
        config: The runs.

    Returns:
        What has become of the components of both, and whose answers differ.
    """
    names = config.decomposition or (None,) * len(config.runs)
    *before, last = (Side(path, name, config.refits) for path, name in zip(config.runs, names, strict=True))
    found = [compare_sides(side, last) for side in before]
    result = replace(found[0], timeline=timeline(found, len(last.found.components)) if len(before) > 1 else [])
    folder = last.run.path / DIFFS / (config.diff or before[0].run.path.name)
    with only_one(folder):
        counts = Counter(f"{change.status} of {change.run}" for change in result.changes)
        said = f"{result.examples} examples: " + ", ".join(f"{n} {what}" for what, n in counts.most_common())
        table = record_table("What has become of components", result.changes, CHANGE_FORMATS)
        answers = record_table(f"{len(result.answers)} answers differ", result.answers[:LISTED], ANSWER_FORMATS)
        blocks: list[str | Table] = [said, table, answers]
        if result.timeline:
            heads = [Column("component"), Column("appears"), *(Column(each.runs[0], ".2f") for each in found)]
            lines: list[Sequence[Cell]] = [
                (each.component, each.appears, *each.similarities) for each in result.timeline
            ]
            blocks.append(Table("When components of the last run appear", heads, lines))
            draw_figure(folder / "timeline", _draw_timeline, (result.timeline, [each.runs[0] for each in found]))
        print(f"{write_report(folder / 'diff', blocks, csv=table)}in {folder}")
        write_record(folder / "diff.json", result)
    return result


def timeline(found: Sequence[Diff], count: int) -> list[Appearance]:
    """When the components of the last run appear.

    Args:
        found: The last run beside each one before it, in their order.
        count: How many components the last run has.

    Returns:
        One for each component, those that appear first at the beginning.
    """
    names = [*(each.runs[0] for each in found), found[0].runs[1]]
    order, entries = [], []
    for own in zip(*(each.changes[-count:] for each in found), strict=True):
        missing = [place for place, change in enumerate(own) if change.status != "kept"]
        order.append(missing[-1] + 1 if missing else 0)
        entries.append(Appearance(own[0].component, names[order[-1]], [change.similarity for change in own]))
    return [entries[j] for j in np.argsort(order, kind="stable")]


def _draw_timeline(axes: Axes, values: tuple[list[Appearance], list[str]]) -> None:
    appearances, names = values
    image = axes.imshow([each.similarities for each in appearances], aspect="auto", vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(len(names)), names, rotation=45)
    axes.set_ylabel("components of the last run")
    axes.figure.colorbar(image, label="|cos| with the nearest one")


def compare_sides(first: Side, last: Side) -> Diff:
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
        OtherAnswer(pairs[n][1], a.texts[n], a.labels[n], a.answers[n], b.answers[n], *used)
        for n, *used in zip(
            np.flatnonzero(differ), *(view.W[differ].argmax(1).tolist() for view in (a, b)), strict=True
        )
    ]
    changes = a.changes(b, chance, differ, directions, ("split", "lost"))
    changes += b.changes(a, chance, differ, None if directions is None else directions.T, ("merged", "new"))
    return Diff((a.name, b.name), len(pairs), (a.accuracy, b.accuracy), chance, (a.limit, b.limit), changes, other)


class View:
    """A run as far as another one has the same examples."""

    def __init__(self, side: Side, rows: Array) -> None:
        table = side.run.table.take(rows)
        self.name, self.answers = side.run.path.name, table["prediction_text"].to_pylist()
        self.texts = [cut(text, 80) for text in table["text"].to_pylist()]
        self.labels = label_texts(table, side.run.manifest.task.labels)
        self.accuracy = accuracy(table, side.run.manifest.task.labels)
        self.W = side.found.coefficients[rows].float()
        found = [coefficient_similarity(self.W, other[rows]).amax(1) for other in side.refits]
        self.usual = torch.stack(found).mean(0)
        self.limit = float(_drops(torch.stack(found)).quantile(1 - FALSE))

    def changes(
        self, other: "View", chance: float, differ: Array, directions: torch.Tensor | None, words: tuple[str, str]
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
            found.append(
                Change(self.name, j, status, order[0], similarity, float(self.usual[j]), direction, parts, answers)
            )
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
