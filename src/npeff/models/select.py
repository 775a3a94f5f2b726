"""Which parameters of a model a Fisher is taken of, and the linear layers that they belong to."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npeff.utils.errors import UserError


@dataclass(frozen=True)
class CapturedModule:
    """A linear layer whose gradient is taken, seen as a matrix of d_out rows and d_in columns (+1 for the bias)."""

    name: str
    """Name of the layer in the model."""
    module: nn.Module
    """The layer itself: nn.Linear, or GPT-2's Conv1D."""
    weight: bool
    """Whether its weight is selected."""
    bias: bool
    """Whether its bias is."""

    @property
    def transposed(self) -> bool:
        """GPT-2's Conv1D keeps its weight as d_in × d_out."""
        return not isinstance(self.module, nn.Linear)

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, columns): the columns are d_in of them if the weight is used, and one for the bias if it is."""
        weight = self.module.weight
        d_out, d_in = reversed(weight.shape) if self.transposed else weight.shape  # type: ignore[arg-type, misc]
        return int(d_out), int(d_in) * self.weight + int(self.bias)

    @property
    def size(self) -> int:
        """Number of parameters."""
        d_out, columns = self.shape
        return d_out * columns

    def matrix(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Pack a weight-shaped and a bias-shaped tensor as one matrix.

        Args:
            weight: Needed if the weight is selected.
            bias: [d_out], needed if the bias is.

        Returns:
            [d_out, columns].
        """
        parts = []
        if self.weight:
            assert weight is not None
            parts.append(weight.T if self.transposed else weight)
        if self.bias:
            assert bias is not None
            parts.append(bias[:, None])
        return torch.cat(parts, 1)

    def unpack(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """Undo `matrix`.

        Args:
            matrix: [d_out, columns].

        Returns:
            Name of each selected parameter → tensor in the parameter's own shape.
        """
        parts: dict[str, torch.Tensor] = {}
        if self.weight:
            columns = matrix[:, : matrix.shape[1] - self.bias]
            parts[f"{self.name}.weight"] = columns.T if self.transposed else columns
        if self.bias:
            parts[f"{self.name}.bias"] = matrix[:, -1]
        return parts


@dataclass(frozen=True)
class Selection:
    """The parameters that a Fisher is taken of."""

    modules: tuple[CapturedModule, ...]
    """Layers with selected parameters."""
    left_out: tuple[str, ...]
    """Parameters that are not selected."""

    @property
    def size(self) -> int:
        """Number n of selected parameters."""
        return sum(module.size for module in self.modules)


def select_parameters(network: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Choose the modules whose gradients are captured.

    Args:
        network: A causal language model.
        include: Patterns of parameter names. By default every parameter but embeddings, norms and the head, as in the
            paper.
        exclude: Patterns of those to leave out of these.

    Returns:
        The selection.

    Raises:
        UserError: A pattern matches nothing, nothing is selected, or a selected parameter cannot be captured.
    """
    from transformers.pytorch_utils import Conv1D

    parameters = [name for name, _ in network.named_parameters()]
    matches = {pattern: set(fnmatch.filter(parameters, pattern)) for pattern in (*include, *exclude)}
    for pattern, names in matches.items():
        if not names:
            hint = f"Names look like: {', '.join(parameters[:3])}. `npeff params MODEL` lists them."
            raise UserError(f"Pattern {pattern!r} matches no parameter. {hint}")
    chosen = set[str]().union(*(matches[pattern] for pattern in include)) if include else _default_parameters(network)
    chosen = chosen.difference(*(matches[pattern] for pattern in exclude))
    kinds_of: dict[str, set[str]] = defaultdict(set)
    for owner, _, kind in (name.rpartition(".") for name in parameters if name in chosen):
        kinds_of[owner].add(kind)
    captured, refused = [], []
    for owner, kinds in kinds_of.items():
        module = network.get_submodule(owner)
        if isinstance(module, nn.Linear | Conv1D) and kinds <= {"weight", "bias"}:
            captured.append(CapturedModule(owner, module, "weight" in kinds, "bias" in kinds))
        else:
            refused += [f"{owner}.{kind} ({type(module).__name__})" for kind in sorted(kinds)]
    if refused:
        some = ", ".join(refused[:6]) + (", …" if len(refused) > 6 else "")
        hint = f"Leave them out with --exclude {' '.join(sorted({_pattern(name) for name in refused})[:6])}"
        raise UserError(f"Cannot take per-example gradients of {len(refused)} parameters: {some}. {hint}")
    if not captured:
        raise UserError("No parameters are selected. Change --include or --exclude; `npeff params MODEL` lists them.")
    return Selection(tuple(captured), tuple(name for name in parameters if name not in chosen))


def _pattern(refused: str) -> str:
    """A pattern that names a refused parameter in every block."""
    name = refused.split(" ")[0]
    return "'" + ".".join("*" if part.isdigit() else part for part in name.split(".")) + "'"


_EXCLUDED = re.compile("norm|embedding", re.IGNORECASE)
"""In the names of classes whose parameters are not selected by default."""


def _default_parameters(network: Any) -> set[str]:
    """The paper's choice: no embeddings, no norms; and no head, which is tied to the embedding in its models."""
    heads = {network.get_input_embeddings(), network.get_output_embeddings()}
    return {
        name
        for owner, module in network.named_modules()
        if not (isinstance(module, nn.Embedding) or module in heads or _EXCLUDED.search(type(module).__name__))
        for name, _ in module.named_parameters(prefix=owner, recurse=False)
    }


def blocks(network: nn.Module) -> nn.ModuleList:
    """Find the transformer blocks of a model.

    Args:
        network: A causal language model.

    Returns:
        The list of as many modules as the model's config has layers, or else the longest list.

    Raises:
        UserError: There is no list of modules.
    """
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError("Cannot find the model's blocks, so there is no residual activation. Use --no-activation.")
    depth = getattr(network.config, "num_hidden_layers", None)
    return next((item for item in lists if len(item) == depth), max(lists, key=len))
