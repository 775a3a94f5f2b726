"""Fine-tuning with LoRA on the answers of a task: what the same labels give without components."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from npeff.collect.session import Prepared
from npeff.perturb.lift import Parameters
from npeff.utils import Array, UserError

RANK, ALPHA, RATE, BATCH = 8, 16, 5e-4, 16
"""What LoRA is commonly trained with."""


def fine_tune(
    prepared: Prepared, prompts: Sequence[Sequence[int]], examples: Array, Q: torch.Tensor, epochs: int, seed: int = 0
) -> Iterator[Parameters]:
    """Train low-rank changes of the selected linear layers. The model is as before at every yield and at the end.

    Args:
        prepared: A model whose weights can be changed, and its task.
        prompts: Token ids of m examples.
        examples: Numbers of the examples to train on.
        Q: Probabilities that their answers should have, [m, r].
        epochs: How often to go through the examples.
        seed: Of the first weights and of the order of the examples.

    Yields:
        The change after each epoch: module name → [d_out, columns]; biases stay.

    Raises:
        UserError: The package peft is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError("LoRA needs the package peft: pip install 'npeff[adapters]'") from error
    linear = [module for module in prepared.selection.modules if module.weight and module.expert is None]
    settings: Any = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[module.name for module in linear])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = peft.get_peft_model(prepared.model.network, settings)
    layers = [network.get_submodule(f"base_model.model.{module.name}") for module in linear]
    try:
        optimiser = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], RATE)
        for epoch in range(epochs):
            shuffled = np.random.default_rng([seed, epoch]).permutation(examples)
            for batch in np.array_split(shuffled, -(-len(shuffled) // BATCH)):
                z, _ = prepared.collector.answer_model.logits([prompts[i] for i in batch])
                loss = -(Q[batch].to(z) * z.log_softmax(1)).sum(1).mean()
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            changes = [layer.get_delta_weight("default").detach().float() for layer in layers]
            with network.disable_adapter():
                yield {
                    module.name: pad(change.T if module.transposed else change, (0, int(module.bias)))
                    for module, change in zip(linear, changes, strict=True)
                }
    finally:
        network.unload()
