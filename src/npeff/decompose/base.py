"""One interface for NPEFF and the methods it is compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from safetensors.torch import save_file

from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import FitConfig
from npeff.decompose.history import History
from npeff.store.rows import RowSource
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import remove_partials, sha256, whole_file, write_json
from npeff.utils.version import __version__

Order = Literal["positive", "negative", "absolute"]

_EXAMPLES = 8192
"""Examples that are looked at together: a copy of all coefficients may not fit in memory."""


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

    components: torch.Tensor
    coefficients: torch.Tensor
    residuals: torch.Tensor

    def __init__(
        self, config: FitConfig | None = None, *, checkpoint: Checkpoint | None = None, quiet: bool = True
    ) -> None:
        self.config = config or FitConfig()
        self.checkpoint, self.quiet = checkpoint, quiet
        self.history = History()
        self._overlap: tuple[torch.Tensor, torch.Tensor] | None = None
        self.notes: dict[str, Any] = {}
        """What else is worth keeping beside the tensors: the run's fingerprint, held-out examples, ..."""

    @abstractmethod
    def fit(self, source: RowSource) -> Self:
        """Find the components of the examples of `source`."""

    @abstractmethod
    def explain(self, source: RowSource) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients [m, C] and residuals [m] of other examples, components fixed."""

    def transform(self, source: RowSource) -> torch.Tensor:
        """Coefficients [m, C] of other examples, components fixed."""
        return self.explain(source)[0]

    def scores(self, order: Order = "positive") -> torch.Tensor:
        """What to rank examples by, largest first, [m, C]; an example with 0 or less does not belong to a component."""
        if order not in self.orders:
            raise UserError(f"Examples of {self.config.method} can be ranked by {', '.join(self.orders)}, not {order}.")
        return {"positive": self.coefficients, "negative": -self.coefficients, "absolute": self.coefficients.abs()}[
            order
        ]

    @property
    def energy(self) -> torch.Tensor:
        """Share of each component in the squared coefficients, float64 [C]."""
        squares = torch.zeros(self.coefficients.shape[1], dtype=torch.float64)
        for chunk in torch.split(self.coefficients, _EXAMPLES):
            squares += chunk.square().sum(dim=0, dtype=torch.float64)
        return squares / squares.sum().clamp(min=1e-300)

    @property
    def used(self) -> torch.Tensor:
        """Number of examples in which the coefficient of each component is not zero, int64 [C]."""
        used = torch.zeros(self.coefficients.shape[1], dtype=torch.int64)
        for chunk in torch.split(self.coefficients, _EXAMPLES):
            used += (chunk != 0).sum(dim=0)
        return used

    def overlap(self) -> torch.Tensor | None:
        """⟨component j, component l⟩ as parts of an example, [C, C]; None if the method does not add components up.

        For (G-)NPEFF the parts are the matrices hⱼhⱼᵀ, so it is (hⱼᵀhₗ)²; for an SVD the vectors themselves.
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

    def extra(self) -> dict[str, torch.Tensor]:
        """Further tensors that `explain` needs."""
        return {}

    def restore(self, extra: dict[str, torch.Tensor]) -> None:
        """Take back what `extra` gave."""
        if extra:
            raise ValueError(f"this method has no {', '.join(extra)}")

    def save(self, directory: Path | str) -> None:
        """Write tensors.safetensors, history.csv, history.png, diagnostics.json and, last, config.json.

        A directory without config.json is not a decomposition, so one that was not finished is never read.
        """
        directory = Path(directory)
        (directory / "config.json").unlink(missing_ok=True)
        remove_partials(directory)
        tensors = {
            "components": self.components,
            "coefficients": self.coefficients,
            "residuals": self.residuals,
            **self.extra(),
        }
        with whole_file(directory / "tensors.safetensors") as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        self.history.write_csv(directory / "history.csv")
        self.history.plot(directory / "history.png")
        write_json(directory / "diagnostics.json", self.diagnostics())
        values = {
            "npeff": __version__,
            "method": self.config.method,
            "components": list(self.components.shape),
            "config": to_dict(self.config),
            "history": {"ending": self.history.ending, "reseeded": self.history.reseeded, "loss": self.history.loss},
            "notes": self.notes,
            "sha256": sha256(directory / "tensors.safetensors"),
        }
        write_json(directory / "config.json", values, sealed=True)

    def diagnostics(self) -> dict[str, Any]:
        """What a user should look at before trusting the components."""
        worst = self.residuals.argsort(descending=True)[:16]
        used = self.used
        return {
            "verdict": self.history.verdict(self.config.tolerance),
            "passes": max(len(self.history.steps) - 1, 0),
            "loss": self.history.loss,
            "ending": self.history.ending,
            "reseeded": self.history.reseeded,
            "unused_components": int((used == 0).sum()),
            "examples_per_component": {"min": int(used.min()), "median": int(used.median()), "max": int(used.max())},
            "components_per_example": float(used.sum()) / max(len(self.coefficients), 1),
            "component_energy": [round(share, 6) for share in self.energy.tolist()],
            "worst_examples": worst.tolist(),
            "worst_residuals": [round(value, 4) for value in self.residuals[worst].tolist()],
            **{key: value for key, value in self.notes.items() if key in ("held_in_loss", "held_out_loss")},
        }
