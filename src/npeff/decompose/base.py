"""One interface for NPEFF and the methods it is compared with."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import save_file

from npeff.decompose.blocks import Blocks, Rotation
from npeff.decompose.checkpoint import Checkpoint, History
from npeff.decompose.config import FitConfig, Method, suggest_components
from npeff.store.rows import RowSource
from npeff.utils import Record, UserError, __version__, remove_partials, sha256, whole_file, write_record
from npeff.utils.device import choose_device

Order = Literal["positive", "negative", "absolute"]

CONFIG = "config.json"
_EXAMPLES = 8192
"""Examples that are looked at together: a copy of all coefficients may not fit in memory."""


class Replay(Record):
    """The command that made a decomposition, for `npeff replay`."""

    command: str
    """Always "decompose"."""
    config: dict[str, Any]
    """Its options, as in `DecomposeConfig`; the name and the number of components are those that were chosen."""


@dataclass
class Notes:
    """Where a decomposition comes from, and what is known of held-out examples."""

    run: str | None = None
    """Fingerprint of the run that was decomposed."""
    holdout: float = 0.0
    """Share of examples that were held out."""
    held_out: list[int] = field(default_factory=list)
    """The examples that components were not fitted to, in ascending order."""
    held_in_loss: float | None = None
    """Mean loss of the other usable examples; None if no examples were held out."""
    held_out_loss: float | None = None
    """Mean loss of usable held-out examples; None if there are none."""
    replay: Replay | None = None
    """The command that made it; None if it was fitted in Python."""
    made: str = ""
    """When it was saved (UTC, ISO 8601): the newest decomposition is the run's default."""
    made_for: str | None = None
    """The command that needed it on its way (`compare`, `stability`); None if it is wanted for its own sake."""


class Outcome(Record):
    """How a fit ended."""

    ending: str
    """As in `History.ending`."""
    reseeded: int
    """Components that died and were started again."""
    loss: float | None
    """Mean loss per example that is not zero; None if nothing was fitted."""


class SavedDecomposition(Record):
    """config.json of a decomposition: everything but its tensors."""

    npeff: str
    """Version that wrote it."""
    method: Method
    """The method, as in `config`."""
    components: list[int]
    """Shape [C, p] of the components."""
    config: FitConfig
    """Options of the fit."""
    history: Outcome
    """How the fit ended."""
    notes: Notes
    """Where it comes from."""
    sha256: str
    """Hash of tensors.safetensors."""


class Spread(Record):
    """Least, middle and largest of some counts."""

    min: int
    median: int
    max: int


class Diagnostics(Outcome):
    """diagnostics.json: what to look at before trusting the components."""

    verdict: str
    """How the fit ended, in words."""
    passes: int
    """Number of passes."""
    unused_components: int
    """Components that no example uses; should be 0."""
    examples_per_component: Spread
    """Number of examples that use a component."""
    components_per_example: float
    """Mean number of components that an example uses."""
    component_energy: list[float]
    """Share of each component in the squared coefficients."""
    worst_examples: list[int]
    """The 16 examples that are explained least, worst first."""
    worst_residuals: list[float]
    """Their residuals."""
    held_in_loss: float | None
    """As in the notes of config.json."""
    held_out_loss: float | None
    """As in the notes of config.json."""


class Decomposition(ABC):
    """Components of a set of examples, and how much of each component is in each example.

    `fit` sets `components` [C, p], and for the examples it was given `coefficients` [m, C], `residuals` [m] (squared
    distance of each unit-norm example from its reconstruction) and `history`.
    """

    kind: ClassVar[str]
    """Rows the method is made of: fisher, gradient or activation."""
    orders: ClassVar[tuple[Order, ...]] = ("positive",)
    """Ways to rank the examples of a component; a method with signed coefficients has three."""

    parts: ClassVar[Literal["matrices", "vectors"] | None] = None
    """What an example is a weighted sum of: the matrices hⱼhⱼᵀ, the vectors hⱼ, or neither of them."""
    tensors: ClassVar[tuple[str, ...]] = ("components", "coefficients", "residuals")
    """Attributes that make up a fitted decomposition, and are saved."""

    components: torch.Tensor
    coefficients: torch.Tensor
    residuals: torch.Tensor

    def __init__(self, config: FitConfig, *, checkpoint: Checkpoint | None = None, quiet: bool = True) -> None:
        self.config, self.checkpoint, self.quiet = config, checkpoint, quiet
        self.history = History()
        self.notes = Notes()
        self._overlap: tuple[torch.Tensor, torch.Tensor] | None = None

    @abstractmethod
    def fit(self, source: RowSource) -> Self:
        """Find the components of the examples of `source`."""

    @abstractmethod
    def _explain_blocks(self, blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Coefficients [n, C] and residuals [n] of every block, components fixed."""

    def explain(self, source: RowSource) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients and residuals of other examples, components fixed.

        Args:
            source: The examples; their rows are sketched as those that were fitted.

        Returns:
            Coefficients [m, C] and residuals [m].

        Raises:
            UserError: The rows have another length than the components.
        """
        if source.dim != self.components.shape[1]:
            raise UserError(
                f"The rows have {source.dim} entries, the components {self.components.shape[1]}: not the same sketch."
            )
        blocks = self._blocks(source)
        return blocks.gather(self._explain_blocks(blocks), self.config.components)

    def transform(self, source: RowSource) -> torch.Tensor:
        """Coefficients [m, C] of other examples, components fixed."""
        return self.explain(source)[0]

    def scores(self, order: Order = "positive", coefficients: torch.Tensor | None = None) -> torch.Tensor:
        """What examples of a component are ranked by, largest first.

        Args:
            order: One of `orders`.
            coefficients: Of other examples, [m, C]; of those that were decomposed if not given.

        Returns:
            Scores [m, C]; an example with 0 or less does not belong to a component.

        Raises:
            UserError: The method does not have this order.
        """
        if order not in self.orders:
            raise UserError(f"Examples of {self.config.method} can be ranked by {', '.join(self.orders)}, not {order}.")
        W = self.coefficients if coefficients is None else coefficients
        if order == "positive":
            return W
        return -W if order == "negative" else W.abs()

    @property
    def energy(self) -> torch.Tensor:
        """Share of each component in the squared coefficients, float64 [C]."""
        squares = self._total(lambda chunk: chunk.square().sum(dim=0, dtype=torch.float64))
        return squares / squares.sum().clamp(min=1e-300)

    @property
    def used(self) -> torch.Tensor:
        """Number of examples in which the coefficient of each component is not zero, int64 [C]."""
        return self._total(lambda chunk: (chunk != 0).sum(dim=0))

    def _total(self, count: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Sum of what `count` gives for the coefficients [n, C] of some examples at a time."""
        return functools.reduce(torch.add, map(count, torch.split(self.coefficients, _EXAMPLES)))

    def overlap(self) -> torch.Tensor | None:
        """Inner products of components as parts of an example.

        For (G-)NPEFF the parts are the matrices hⱼhⱼᵀ, so it is (hⱼᵀhₗ)²; for an SVD the vectors themselves.

        Returns:
            ⟨component j, component l⟩, [C, C]; None if the method does not add components up.
        """
        if self.parts is None:
            return None
        if self._overlap is None or self._overlap[0] is not self.components:
            products = self.components @ self.components.T
            self._overlap = self.components, products.square() if self.parts == "matrices" else products
        return self._overlap[1]

    def shares(self, coefficients: torch.Tensor, component: int | None = None) -> torch.Tensor | None:
        """How much of each example each component explains.

        The share of component j in example i is Wᵢⱼ · ⟨reconstruction of i, component j⟩. The shares of an example add
        up to the squared norm of its reconstruction. Where coefficients are a least-squares fit (non-negative or not),
        the unit-norm example itself may stand in for its reconstruction, and they add up to 1 − residual.

        Args:
            coefficients: Coefficients of some examples, [n, C].
            component: The only component that is asked for, if not all are.

        Returns:
            Shares [n, C], or [n] of one component; None if the method does not add components up.
        """
        overlap = self.overlap()
        if overlap is None:
            return None
        if component is not None:
            return coefficients[:, component] * (coefficients @ overlap[component])
        return coefficients * (coefficients @ overlap)

    def save(self, directory: Path | str) -> None:
        """Write tensors.safetensors, history.csv, .png and .svg, diagnostics.json and, last, config.json.

        A directory without config.json is not a decomposition, so one that was not finished is never read.

        Args:
            directory: Where to write; made if it is missing.
        """
        directory = Path(directory)
        (directory / CONFIG).unlink(missing_ok=True)
        remove_partials(directory)
        with whole_file(directory / "tensors.safetensors") as temporary:
            save_file({name: getattr(self, name).cpu().contiguous() for name in self.tensors}, temporary)
        self.history.write_csv(directory / "history.csv")
        self.history.plot(directory / "history")
        write_record(directory / "diagnostics.json", self.diagnostics())
        saved = SavedDecomposition(
            npeff=__version__,
            method=self.config.method,
            components=list(self.components.shape),
            config=self.config,
            history=self._outcome,
            notes=self.notes,
            sha256=sha256(directory / "tensors.safetensors"),
        )
        write_record(directory / CONFIG, saved, sealed=True)

    def diagnostics(self) -> Diagnostics:
        """What to look at before trusting the components.

        Returns:
            The record that `save` writes.
        """
        worst, used = self.residuals.argsort(descending=True)[:16], self.used
        return Diagnostics(
            verdict=self.history.verdict(self.config.tolerance),
            passes=max(len(self.history.steps) - 1, 0),
            **vars(self._outcome),
            unused_components=int((used == 0).sum()),
            examples_per_component=Spread(int(used.min()), int(used.median()), int(used.max())),
            components_per_example=float(used.sum()) / max(len(self.coefficients), 1),
            component_energy=[round(share, 6) for share in self.energy.tolist()],
            worst_examples=worst.tolist(),
            worst_residuals=[round(value, 4) for value in self.residuals[worst].tolist()],
            held_in_loss=self.notes.held_in_loss,
            held_out_loss=self.notes.held_out_loss,
        )

    @property
    def _outcome(self) -> Outcome:
        history = self.history
        return Outcome(history.ending, history.reseeded, history.loss if history.steps else None)

    # What fits of all methods share.

    @property
    def _device(self) -> torch.device:
        return choose_device(self.config.device, double=True)

    @property
    def _memory(self) -> float:
        """Bytes that may be kept between passes."""
        return self.config.memory_gb * 1e9

    def _rotation(self, source: RowSource) -> Rotation | None:
        pays = Rotation.pays(source, self._memory)
        return Rotation(source, self.config.chunk, self._device) if pays else None

    def _blocks(self, source: RowSource, keep_bytes: float = 0.0, shard: bool = True) -> Blocks:
        return Blocks(source, self.config.chunk, self._device, keep_bytes, shard)

    def _check_examples(self, blocks: Blocks, dim: int) -> None:
        """Refuse to look for more components than there are examples."""
        examples, components, reason = blocks.nonzero, self.config.components, ""
        if examples == 0:
            raise UserError("Every example is zero: there is nothing to decompose.")
        if examples < components:
            zero = blocks.total_examples - examples
            besides = f" (and {zero} that {'is' if zero == 1 else 'are'} zero)" if zero else ""
            reason = f"{components} components need as many examples; there are {examples}{besides}."
        elif self.parts == "vectors" and components > dim:
            reason = f"An SVD of rows with {dim} entries has at most {dim} components, not {components}."
        if reason:
            suggestion = suggest_components(examples, self.config.method, dim)
            raise UserError(f"{reason} Take fewer, for example {suggestion}.")
