"""Random signs for every pair of parameter and coordinate: the textbook projection, for small p."""

import math
from collections.abc import Iterator

import torch

from npeff.collect.sketch.base import Sketch, random_signs
from npeff.models.select import CapturedModule

ROW_BLOCK_ENTRIES = 2**24


class DenseSketch(Sketch):
    """y = R g / √p with entries ±1.

    The matrix is made again in blocks of gradient rows at every use: it would be p times the size of the model. A whole
    batch shares one making of it.
    """

    def _blocks(self, module: CapturedModule) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Row ranges of the module's matrix with their signs [(stop - start) · columns, p]."""
        d_out, columns = module.shape
        step = max(1, ROW_BLOCK_ENTRIES // (columns * self.dim))
        for start in range(0, d_out, step):
            stop = min(d_out, start + step)
            # one key per row of the matrix, so that the numbers do not depend on the block size
            keys = [("dense", self.config.sketch_seed, module.name, row) for row in range(start, stop)]
            signs = torch.cat([random_signs(columns * self.dim, *key) for key in keys])
            yield start, stop, signs.view(-1, self.dim).to(self.device, torch.float32)

    def accumulator(self, batch: int) -> torch.Tensor:
        return torch.zeros(batch, self.dim, device=self.device)

    def add(self, module: CapturedModule, gradient: torch.Tensor, total: torch.Tensor) -> None:
        for start, stop, signs in self._blocks(module):
            total += gradient[:, start:stop].reshape(len(gradient), -1) @ signs

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        return total / math.sqrt(self.dim)

    def rmatvec_module(self, module: CapturedModule, y: torch.Tensor) -> torch.Tensor:
        y = y.to(self.device, torch.float32) / math.sqrt(self.dim)
        parts = [(signs @ y).view(stop - start, -1) for start, stop, signs in self._blocks(module)]
        return torch.cat(parts)
