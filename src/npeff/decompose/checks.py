"""What every method refuses."""

from __future__ import annotations

import torch

from npeff.decompose.blocks import Blocks
from npeff.store.rows import RowSource
from npeff.utils.errors import UserError


def check_examples(blocks: Blocks, components: int) -> None:
    """Refuse to look for more components than there are examples."""
    if blocks.nonzero == 0:
        raise UserError("Every example is zero: there is nothing to decompose.")
    if blocks.nonzero < components:
        zero = blocks.total_examples - blocks.nonzero
        besides = f" (and {zero} that are zero)" if zero else ""
        raise UserError(f"{components} components need as many examples; there are {blocks.nonzero}{besides}.")


def check_dim(source: RowSource, components: torch.Tensor) -> None:
    """Refuse rows of another length than the components."""
    if source.dim != components.shape[1]:
        raise UserError(
            f"The rows have {source.dim} numbers, the components {components.shape[1]}: not the same sketch."
        )
