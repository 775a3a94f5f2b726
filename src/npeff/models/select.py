"""Which parameters of a model a Fisher is taken of, and the linear layers that they belong to."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from npeff.models.experts import PROJECTIONS, holds_experts, is_router
from npeff.utils import Record, UserError, percent


class CapturedModule(Record):
    """A matrix whose gradient is taken: d_out rows and d_in columns (+1 for the bias) of a linear layer.

    That is all of a layer, or what one expert has in a layer of many.
    """

    name: str
    """Name of the layer in the model; of an expert, that of the parameter and then its number."""
    module: nn.Module
    """The layer itself: nn.Linear, GPT-2's Conv1D, a router, or what holds the experts."""
    weight: bool
    """Whether its weight is selected."""
    bias: bool
    """Whether its bias is."""
    expert: int | None = None
    """Number of the expert, if the layer holds many."""

    @property
    def transposed(self) -> bool:
        """GPT-2's Conv1D and some experts keep their weight as d_in × d_out."""
        return type(self.module).__name__ == "Conv1D" if self.expert is None else bool(self.module.is_transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, columns): the columns are d_in of them if the weight is used, and one for the bias if it is."""
        if isinstance(self.module, nn.Linear):  # not its weight, which may be packed
            return self.module.out_features, self.module.in_features * self.weight + int(self.bias)
        weight = getattr(self.module, self._attributes[0])
        d_out, d_in = reversed(weight.shape[-2:]) if self.transposed else weight.shape[-2:]
        return int(d_out), int(d_in) * self.weight + int(self.bias)

    @property
    def size(self) -> int:
        """Number of parameters."""
        d_out, columns = self.shape
        return d_out * columns

    @property
    def _attributes(self) -> tuple[str, str]:
        """What the module calls the weight and the bias."""
        if self.expert is None:
            return "weight", "bias"
        name = self.name.split(".")[-2]
        return name, f"{name}_bias"

    @property
    def parameters(self) -> dict[str, str]:
        """Names in the model of the selected parameters → what the module calls them."""
        owner = self.name if self.expert is None else self.name.rsplit(".", 2)[0]
        chosen = zip(self._attributes, (self.weight, self.bias), strict=True)
        return {f"{owner}.{attribute}": attribute for attribute, selected in chosen if selected}

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        """What of a parameter, or of a tensor of its shape, belongs to this matrix: a view."""
        return parameter if self.expert is None else parameter[self.expert]

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

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pack what belongs to this matrix of tensors in the shape of parameters.

        Args:
            tensors: Name of each selected parameter → tensor in the parameter's own shape.

        Returns:
            [d_out, columns].
        """
        parts = [self.part(tensors[name]) for name in self.parameters]
        return self.matrix(parts[0] if self.weight else None, parts[-1] if self.bias else None)

    def unpack(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """Undo `pack`.

        Args:
            matrix: [d_out, columns].

        Returns:
            Name of each selected parameter → tensor in the shape of its `part`.
        """
        columns = matrix[:, : matrix.shape[1] - self.bias]
        weight = [columns.T if self.transposed else columns] if self.weight else []
        return dict(zip(self.parameters, [*weight, matrix[:, -1]], strict=False))


class Selection(Record):
    """The parameters that a Fisher is taken of."""

    modules: tuple[CapturedModule, ...]
    """Layers with selected parameters."""
    left_out: tuple[str, ...]
    """Parameters that are not selected."""
    whole: int = 0
    """Number of all parameters of the model."""
    excluded: int = 0
    """How many of those that are selected by default the patterns leave out."""

    @property
    def size(self) -> int:
        """Number n of selected parameters."""
        return sum(module.size for module in self.modules)

    def describe(self) -> str:
        """How much of the model is looked at, in words."""
        gone = f"; --include and --exclude leave out {percent(self.excluded / self.whole, 3)}" if self.excluded else ""
        return f"{self.size:,} parameters, {percent(self.size / self.whole, 3)} of the model{gone}"


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
    parameters = [name for name, _ in network.named_parameters()]
    matches = {pattern: set(fnmatch.filter(parameters, pattern)) for pattern in (*include, *exclude)}
    for pattern, names in matches.items():
        if not names:
            hint = f"Names look like: {', '.join(parameters[:3])}. `npeff params MODEL` lists them."
            raise UserError(f"Pattern {pattern!r} matches no parameter. {hint}")
    default = _default_parameters(network)
    chosen = set[str]().union(*(matches[pattern] for pattern in include)) if include else default
    chosen = chosen.difference(*(matches[pattern] for pattern in exclude))
    kinds_of: dict[str, set[str]] = defaultdict(set)
    for owner, _, kind in (name.rpartition(".") for name in parameters if name in chosen):
        kinds_of[owner].add(kind)
    captured, refused = [], []
    for owner, kinds in kinds_of.items():
        module = network.get_submodule(owner)
        captured += (matrices := _matrices(owner, module, kinds))
        refused += [] if matrices else [f"{owner}.{kind} ({type(module).__name__})" for kind in sorted(kinds)]
    if refused:
        some = ", ".join(refused[:6]) + (", …" if len(refused) > 6 else "")
        hint = f"Leave them out with --exclude {' '.join(sorted({_pattern(name) for name in refused})[:6])}"
        raise UserError(f"Cannot take per-example gradients of {len(refused)} parameters: {some}. {hint}")
    if not captured:
        raise UserError("No parameters are selected. Change --include or --exclude; `npeff params MODEL` lists them.")
    sizes = parameter_sizes(network)
    excluded = sum(sizes.get(name, 0) for name in default - chosen)  # a tied head has no size of its own
    left_out = tuple(name for name in parameters if name not in chosen)
    return Selection(tuple(captured), left_out, sum(sizes.values()), excluded)


def parameter_sizes(network: nn.Module) -> dict[str, int]:
    """How many numbers each parameter stands for, however it is packed."""
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    linear = ((f"{name}.weight", each) for name, each in network.named_modules() if isinstance(each, nn.Linear))
    return sizes | {name: each.in_features * each.out_features for name, each in linear if name in sizes}


def _matrices(owner: str, module: nn.Module, kinds: set[str]) -> list[CapturedModule]:
    """The matrices that hold a module's parameters of these names; none if it is not known how it uses them."""
    from transformers.pytorch_utils import Conv1D

    if (isinstance(module, nn.Linear | Conv1D) or is_router(module)) and kinds <= {"weight", "bias"}:
        return [CapturedModule(owner, module, "weight" in kinds, "bias" in kinds)]
    stacks = {name: (name in kinds, f"{name}_bias" in kinds) for name in PROJECTIONS if holds_experts(module)}
    if not kinds <= {f"{name}{ending}" for name in stacks for ending in ("", "_bias")}:
        return []
    return [
        CapturedModule(f"{owner}.{name}.{expert}", module, weight, bias, expert)
        for name, (weight, bias) in stacks.items()
        if weight or bias
        for expert in range(len(getattr(module, name)))
    ]


def _pattern(refused: str) -> str:
    """A pattern that names a refused parameter in every block."""
    name = refused.split(" ")[0]
    return "'" + ".".join("*" if part.isdigit() else part for part in name.split(".")) + "'"


CLASSIFIER = "ForSequenceClassification"
"""How the names of classes end that classify texts."""
_EXCLUDED = re.compile("norm|embedding", re.IGNORECASE)
"""In the names of classes whose parameters are not selected by default."""


def _default_parameters(network: Any) -> set[str]:
    """The paper's choice: no embeddings, no norms; and no head, which is tied to the embedding in its models.

    Nor the attention sinks of gpt-oss: one number for each head, which is no matrix of a layer.
    """
    heads = {network.get_input_embeddings(), network.get_output_embeddings(), _class_head(network)}
    return {
        name
        for owner, module in network.named_modules()
        if not (isinstance(module, nn.Embedding) or module in heads or _EXCLUDED.search(type(module).__name__))
        for name, _ in module.named_parameters(prefix=owner, recurse=False)
        if not name.endswith(".sinks")
    }


def _class_head(network: Any) -> nn.Module | None:
    """What maps to the classes of a classifier; what it sees was pooled by others, which are selected."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    classes = getattr(network, "num_labels", 0) if type(network).__name__.endswith(CLASSIFIER) else 0
    return linear[-1] if linear and linear[-1].out_features == classes else None


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
