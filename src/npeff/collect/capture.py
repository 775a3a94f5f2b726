"""Per-example gradients without weight gradients.

Hooks keep what a sketch needs of each selected module's inputs; a backward pass through the activations alone then
delivers the module's output gradients, which go straight into the sketch. Models run unmodified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from npeff.collect.directions import split_length
from npeff.collect.sketch.base import Sketch
from npeff.models.select import CapturedModule
from npeff.utils.errors import UserError

Fold = Callable[[CapturedModule, torch.Tensor], torch.Tensor]
"""Called with a module and its inputs [B, T, d_in]; gives what to keep of them."""
Consumer = Callable[[CapturedModule, torch.Tensor, torch.Tensor], None]
"""Called with a module, its output gradients [B, T, d_out] and what was kept of its inputs."""


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
        self._shape = (0, 0, 0)
        self._consumer: Consumer | None = None
        self._called: set[str] = set()

    def __enter__(self) -> Capture:
        self._handles = [each.module.register_forward_hook(partial(self._keep, each)) for each in self.modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self, examples: int, sequences: int, length: int) -> None:
        """Expect a forward pass over `sequences` of `length` tokens, the same number for each of `examples`."""
        self._shape = (examples, sequences, length)
        self._called.clear()

    def _keep(self, module: CapturedModule, _: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """In the forward pass: keep what the sketch needs of a module's inputs, until its output gradients arrive."""
        self._called.add(module.name)
        with torch.no_grad():
            folded = self.fold_input(module, self._by_example(module, arguments[0].detach()))
        output.requires_grad_(True)  # the graph begins at the first module whose gradient is wanted, not below it
        output.register_hook(partial(self._deliver, module, folded))  # type: ignore[no-untyped-call]

    def _deliver(self, module: CapturedModule, folded: torch.Tensor, delta: torch.Tensor) -> None:
        """In a backward pass: hand a module's output gradients on."""
        if self._consumer is not None:
            self._consumer(module, self._by_example(module, delta), folded)

    def _by_example(self, module: CapturedModule, tensor: torch.Tensor) -> torch.Tensor:
        """[examples, T, d], an example's sequences one after another; some models flatten batch and time."""
        examples, sequences, length = self._shape
        if tuple(tensor.shape[:-1]) in ((sequences, length), (sequences * length,)):
            return tensor.reshape(examples, -1, tensor.shape[-1])
        raise UserError(
            f"Module {module.name} mixes the examples of a batch (it saw a tensor of shape {tuple(tensor.shape)}), "
            f"so its gradients cannot be told apart. Leave it out with --exclude '{module.name}.*'"
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

    def rows(self, z: torch.Tensor, directions: torch.Tensor, sketch: Sketch) -> torch.Tensor:
        """Sketched rows G = V J of every example.

        Args:
            z: Answer logits, [B, r].
            directions: V, [B, k, r].
            sketch: The map to p entries.

        Returns:
            The rows, float32 [B, k, p].
        """
        batch, count, _ = directions.shape
        rows = torch.empty(batch, count, sketch.dim, device=z.device)
        directions, lengths = split_length(directions)
        for row in range(count):
            total = sketch.accumulator(batch)
            self.backward(z, directions[:, row], partial(sketch.accumulate, total=total), keep_graph=row + 1 < count)
            rows[:, row] = sketch.finish(total) * lengths[:, row, None]
        return rows
