"""Mixtures of experts as transformers 5 keeps them: one 3-D parameter holds a matrix of every expert of a layer."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from npeff.utils import Record

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the 3-D parameters; a bias beside one is called as it is, with _bias."""
_OURS = "npeff"

Look = Callable[[str, torch.Tensor, torch.Tensor, "Routing"], None]
"""Called with the name of a 3-D parameter, its inputs [S, d_in] and outputs [S, d_out], a line for each pair of token
and expert, and which pair each line is."""
Experts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A way to compute a module of experts: of the module, hidden states [N, d], experts of each token and their weights
[N, k]."""


class Routing(Record):
    """Which token goes to which expert: S = N k lines, one for each pair of them, sorted by expert."""

    order: torch.Tensor
    """For each line the number of its pair, token · k + choice: int64 [S]."""
    counts: torch.Tensor
    """Lines of each expert, int64 [experts]."""

    @cached_property
    def ends(self) -> torch.Tensor:
        """Where the lines of each expert end, int32 [experts]."""
        return self.counts.cumsum(0).int()

    @cached_property
    def back(self) -> torch.Tensor:
        """For each pair the number of its line, int64 [S]."""
        return self.order.argsort()

    def lines(self, tensors: torch.Tensor) -> torch.Tensor:
        """What every line has of something that experts have, [experts, ...] → [S, ...]."""
        return tensors.repeat_interleave(self.counts, 0)


def holds_experts(module: nn.Module) -> bool:
    """Whether a module has fused experts whose computation transformers lets others define."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def is_router(module: nn.Module) -> bool:
    """Whether a module has a linear map to the logits of experts, and gives these logits first."""
    weight = getattr(module, "weight", None)
    return "topkrouter" in type(module).__name__.lower() and weight is not None and weight.dim() == 2


@contextlib.contextmanager
def computing_experts(modules: Iterable[nn.Module], how: Experts | None) -> Iterator[None]:
    """Inside, modules of experts are computed in another way.

    Args:
        modules: Those that hold experts.
        how: The way; None for the plain loop of transformers, an operation for each expert.

    Yields:
        Nothing.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    if how is not None:
        ALL_EXPERTS_FUNCTIONS[_OURS] = how
    try:
        for config, _ in before:
            config._experts_implementation_internal = "eager" if how is None else _OURS
        yield
    finally:
        for config, name in before:
            config._experts_implementation_internal = name
        if how is not None:
            del ALL_EXPERTS_FUNCTIONS[_OURS]


def run_experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, look: Look
) -> torch.Tensor:
    """A layer's experts, all at once, with a look at what goes through their matrices.

    Args:
        module: Holds the experts.
        hidden: States of N tokens, [N, d].
        index: Experts of each token, [N, k].
        weights: Of these experts, [N, k].
        look: Called for both matrices.

    Returns:
        The weighted sum over experts, [N, d].
    """
    pairs = index.reshape(-1)
    routing = Routing(pairs.argsort(stable=True), torch.bincount(pairs, minlength=module.num_experts))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        matrices = getattr(module, name)
        y = grouped(x, matrices if module.is_transposed else matrices.mT, routing)
        y = y + routing.lines(getattr(module, f"{name}_bias")) if module.has_bias else y
        look(name, x, y, routing)
        return y

    x = hidden[routing.order // index.shape[1]]
    y = module._apply_gate(linear("gate_up_proj", x)) if module.has_gate else module.act_fn(linear("up_proj", x))
    y = linear("down_proj", y)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * weights.reshape(-1)[routing.order, None]
    return y[routing.back].view(*index.shape, -1).sum(1).to(hidden.dtype)


def grouped(x: torch.Tensor, matrices: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Multiply each line with the matrix of its expert.

    Args:
        x: Lines of all experts in order, [S, d].
        matrices: Of the experts, [experts, d, d'].
        routing: How many lines each expert has.

    Returns:
        [S, d'].
    """
    x = x.to(matrices.dtype).contiguous()
    # it takes only lines that begin at multiples of 16 bytes; blocks of a sketch may be of any width
    steps = x.shape[1], *sorted(matrices.stride())[1:]
    aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    if aligned and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.device.type == "cpu")):
        return F.grouped_mm(x, matrices, offs=routing.ends)
    parts = torch.split(x, routing.counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
