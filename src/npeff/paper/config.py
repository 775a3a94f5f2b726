"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import ClassVar, Literal

import tyro

from npeff.collect.config import SketchKind
from npeff.tasks.config import BUILTIN
from npeff.utils import Record, UserError


class IclConfig(Record):
    """Find a good few-shot context, and compare its predictions with a classifier made of 0-shot components.

    Continues if stopped.
    """

    common: ClassVar[tuple[str, ...]] = ("decomposition", "shots", "sets", "scored")
    renamed: ClassVar[dict[str, str]] = {"names": "decomposition"}
    least: ClassVar[dict[str, int]] = {"shots": 1, "sets": 1, "scored": 1, "top": 1, "seed": 0, "batch_tokens": 1}

    run: tyro.conf.Positional[str]
    """Directory of a run without a few-shot prefix, with labels and at least one decomposition."""
    decomposition: tuple[str, ...] = ()
    """Names of the decompositions to use; without any, every finished one of the run."""
    shots: int = 6
    """Worked examples in a context."""
    sets: int = 50
    """Random contexts to try."""
    scored: int = 1024
    """Examples that each context is scored on."""
    seed: int = 0
    """Seed of the random contexts."""
    top: int = 16
    """Top examples that say which label a component votes for; components with fewer active ones do not vote."""
    purity: float = 0.75
    """Share of the top examples that must have the label."""
    batch_tokens: int | None = None
    """Tokens per batch; as in the collection if not given."""
    device: str | None = None
    """Where to compute; as in the collection if not given."""

    def _check(self) -> None:
        if not 0.5 < self.purity <= 1:
            raise UserError("--purity is a share above 0.5 and at most 1, so that no component votes for two labels.")


class ReproduceConfig(Record):
    """Measure a table or figure of the paper again and put both numbers side by side. Continues if stopped."""

    common: ClassVar[tuple[str, ...]] = ("scale", "examples", "tasks", "data", "out")
    removed: ClassVar[dict[str, str]] = {"list": "`npeff reproduce list` shows all recipes."}

    table: tyro.conf.Positional[str] = "list"
    """Name of a recipe, the label of its table in the paper's source, `all` for every recipe in turn, or `list`: the
    recipes, and what they collect at this scale (`npeff collect --dry-run` measures what a collection takes)."""
    scale: float = 1.0
    """Share of the paper's examples to use; `npeff reproduce list` says how all else shrinks with it."""
    examples: tuple[str, ...] = ()
    """Number of examples of single tasks, as sst2=4000 clinc150=500; it sets the scale of that task."""
    tasks: tuple[str, ...] = ()
    """Only the parts of a table that are about these tasks."""
    data: str | None = None
    """Folder with the examples: sst2.jsonl, yat.jsonl, clinc150.jsonl, triviaqa.jsonl. From the Hub if not given."""
    out: str = "reproduced"
    """Directory of the results, and of runs that recipes share."""
    model: str | None = None
    """Model instead of the paper's."""
    sketch: SketchKind | None = None
    """Sketch instead of the paper's."""
    solver: Literal["als", "paper"] | None = None
    """Solver of NPEFF instead of the paper's."""
    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    def _check(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"--scale is a share of the paper's examples, above 0 and at most 1, not {self.scale}.")
        self.task_examples  # noqa: B018 - refuses what cannot be read

    @property
    def task_examples(self) -> dict[str, int]:
        """Number of examples of each task that `examples` names.

        Returns:
            Task → number of examples.

        Raises:
            UserError: An entry is not TASK=NUMBER.
        """
        counts = {}
        for given in self.examples:
            task, _, count = given.partition("=")
            if task not in BUILTIN or not count.isdigit() or int(count) < 1:
                raise UserError(f"--examples {given!r}: write TASK=NUMBER, as sst2=4000, of {', '.join(BUILTIN)}.")
            counts[task] = int(count)
        return counts
