"""Per-example gradients without weight gradients.

Hooks keep what a sketch needs of each selected module's inputs; a backward pass through the activations alone then
delivers the module's output gradients, which go straight into the sketch. Models run unmodified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from npeff.collect.directions import split_length
from npeff.collect.sketch.base import Captured, RoutedExperts, Sketch
from npeff.models.devices import mesh_of, put_together
from npeff.models.experts import Routing, computing_experts, is_router, run_experts
from npeff.models.select import CapturedModule
from npeff.utils import UserError

ROUTER_TOLERANCE = (0.02, 0.02)
"""Relative and absolute, of logits that may have been computed in half precision."""

Fold = Callable[[Captured, torch.Tensor], torch.Tensor]
"""Called with a module and its inputs [B, T, d_in], or experts and theirs [S, d_in]; gives what to keep of them."""
Consumer = Callable[[Captured, torch.Tensor, torch.Tensor], None]
"""Called with a module or experts, their output gradients, and what was kept of their inputs."""
_Shape = tuple[int, int, int, int]
"""Examples, sequences, tokens of a sequence, and tokens before them, as `Capture.start` takes them."""


class Capture:
    """Context manager around forward passes of a batch.

    with Capture(modules, sketch.fold_input) as capture:
        capture.start(examples, sequences, length)
        z = answer logits                       # [B, r]
        rows = capture.rows(z, V, sketch)       # [B, k, p]
    """

    def __init__(self, modules: Iterable[CapturedModule], fold_input: Fold) -> None:
        self.modules = tuple(modules)
        self.fold_input = fold_input
        self._shape: _Shape = (0, 0, 0, 0)
        self._consumer: Consumer | None = None
        self._called: set[str] = set()
        # processes that share a model take turns in sketching its layers
        self._mesh = next((mesh for each in self.modules if (mesh := mesh_of(each.module)) is not None), None)
        own = slice(self._mesh.get_local_rank(), None, self._mesh.size()) if self._mesh is not None else slice(0)
        self._mine = {each.name for each in self.modules[own]}
        self._experts: dict[nn.Module, dict[str, list[CapturedModule]]] = defaultdict(lambda: defaultdict(list))
        for each in self.modules:
            if each.expert is not None:
                self._experts[each.module][each.name.split(".")[-2]].append(each)

    def __enter__(self) -> Capture:
        with ExitStack() as stack:  # undone, too, if it does not get to its end
            for each in self.modules:
                if each.expert is None:
                    stack.enter_context(each.module.register_forward_hook(partial(self._keep, each)))
                if is_router(each.module):
                    stack.enter_context(each.module.register_forward_pre_hook(_begin_graph))
            if self._experts:
                stack.enter_context(computing_experts(self._experts, self._run_experts))
            self._hooks = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def start(self, examples: int, sequences: int, length: int, before: int = 0) -> None:
        """Expect a forward pass over a batch, or over a part of its tokens.

        Args:
            examples: Of the batch.
            sequences: The same number for each example.
            length: Tokens of a sequence.
            before: Tokens of a sequence that are in a cache already.
        """
        self._shape = (examples, sequences, length, before)
        self._called.clear()

    def _keep(self, module: CapturedModule, _: Any, arguments: tuple[Any, ...], output: Any) -> None:
        """In the forward pass: keep what the sketch needs of a module's inputs, until its output gradients arrive."""
        if isinstance(output, tuple):
            output = output[0]
            _check_router(module, arguments[0], output)
        self._called.add(module.name)
        mine = self._mesh is None or module.name in self._mine
        shape = self._shape  # another part of the same prompts may run before gradients arrive
        with torch.no_grad():
            x = put_together(module.module, 1, arguments[0].detach())
            folded = self.fold_input(module, self._by_example(module.name, x, shape)) if mine else None

        def deliver(delta: torch.Tensor) -> None:
            delta = put_together(module.module, 0, delta)
            if folded is not None:
                self._deliver(module, folded, self._by_example(module.name, delta, shape))

        output.requires_grad_(True)  # the graph begins at the first module whose gradient is wanted, not below it
        output.register_hook(deliver)

    def _run_experts(
        self, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """A layer's experts, in place of the model's own way to compute them, which shows nothing of what it does."""

        def keep(parameter: str, x: torch.Tensor, output: torch.Tensor, routing: Routing) -> None:
            matrices = self._experts[module].get(parameter)
            if matrices is None:
                return
            self._called.update(each.name for each in matrices)
            experts = RoutedExperts(tuple(matrices), routing, self._shape[0])
            with torch.no_grad():
                folded = self.fold_input(experts, x.detach())
            output.requires_grad_(True)
            output.register_hook(partial(self._deliver, experts, folded))  # type: ignore[no-untyped-call]

        self._by_example(next(iter(self._experts[module].values()))[0].name, hidden, self._shape)
        return run_experts(module, hidden, index, weights, keep)

    def _deliver(self, module: Captured, folded: torch.Tensor, delta: torch.Tensor) -> None:
        """In a backward pass: hand a module's output gradients on."""
        if self._consumer is not None:
            self._consumer(module, delta, folded)

    def _by_example(self, name: str, tensor: torch.Tensor, shape: _Shape) -> torch.Tensor:
        """[examples, T, d], an example's sequences one after another; some models flatten the axes, or add some."""
        examples, sequences, length, before = shape
        sizes = [size for size in tensor.shape[:-1] if size != 1]
        # what was pooled has one token; what is made of a cache has those before, too
        known = [[size for size in (sequences, tokens) if size != 1] for tokens in (length, before + length, 1)]
        if sizes in (*known, [sequences * length]) or examples == 1:
            return tensor.reshape(examples, -1, tensor.shape[-1])
        raise UserError(
            f"Module {name} mixes the examples of a batch (it saw a tensor of shape {tuple(tensor.shape)}), "
            f"so its gradients cannot be told apart. Leave it out with --exclude '{name}.*'"
        )

    def backward(self, z: torch.Tensor, directions: torch.Tensor, consumer: Consumer, keep_graph: bool) -> None:
        """One backward pass of Σ_i ⟨directions_i, z_i⟩.

        Args:
            z: Answer logits, [B, r].
            directions: One direction per example, [B, r].
            consumer: Sees every module's output gradients as they arrive.
            keep_graph: Whether another pass follows.

        Raises:
            UserError: The forward pass has not called one of the modules.
        """
        missing = [module.name for module in self.modules if module.name not in self._called]
        if missing:
            some = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
            hint = f"Leave it out with --exclude '{missing[0]}.*'"
            raise UserError(f"The model never calls {some}, so there is no gradient to take. {hint}")
        self._consumer = consumer
        try:
            torch.autograd.backward(z, directions.to(z.dtype), retain_graph=keep_graph)
        finally:
            self._consumer = None

    def rows(self, z: torch.Tensor, directions: torch.Tensor, sketch: Sketch, keep_graph: bool = False) -> torch.Tensor:
        """Sketched rows G = V J of every example.

        Args:
            z: Answer logits, [B, r].
            directions: V, [B, k, r].
            sketch: The map to p entries.
            keep_graph: Whether rows of other places of the same prompts follow.

        Returns:
            The rows, float32 [B, k, p].
        """
        batch, count, _ = directions.shape
        rows = torch.zeros(batch, count, sketch.dim, device=z.device)
        directions, lengths = split_length(directions)
        for row in range(count):
            if not directions[:, row].any():  # no example has so many rows
                continue
            total, keep = sketch.accumulator(batch), keep_graph or row + 1 < count
            self.backward(z, directions[:, row], partial(sketch.accumulate, total=total), keep)
            if self._mesh is not None:
                torch.distributed.all_reduce(total, group=self._mesh.get_group())
            rows[:, row] = sketch.finish(total) * lengths[:, row, None]
        return rows


def _begin_graph(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A router uses its logits before a hook sees them, so a graph that would begin at them begins at its inputs."""
    hidden = arguments[0]
    return None if hidden.requires_grad else (hidden.detach().requires_grad_(True), *arguments[1:])


def _check_router(module: CapturedModule, x: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuse a router that does more than a linear map before it gives its logits."""
    weight: Any = module.module.weight
    bias: Any = getattr(module.module, "bias", None)
    if weight.is_meta:  # it was only there for the call
        return
    with torch.no_grad():
        expected = F.linear(x.to(logits), weight.to(logits), None if bias is None else bias.to(logits))
    expected = expected.view(-1, expected.shape[-1])
    if expected.shape != logits.shape or not torch.allclose(expected, logits, *ROUTER_TOLERANCE, equal_nan=True):
        hint = f"Leave it out with --exclude '{module.name}.*'"
        raise UserError(f"The router {module.name} is not a linear map with a choice behind it. {hint}")
