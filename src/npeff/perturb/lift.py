"""Lifting: the sum of rows that a vector of the sketch is, formed of the unprojected gradients.

A stored row is the sketch of v J / c, with v an output direction, J = ∂z/∂θ and c a norm. So Σ α · row is the sketch
of Σ (α/c) v J: a backward pass in which an example's output gradient is (α/c) v. Several vectors share the forward pass
and, where every example has one direction, the output gradients δ: each adds only Σ_t (α/c) δ_t x_tᵀ of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm

from npeff.collect.capture import Capture
from npeff.collect.directions import combine_to_predicted, make_directions, predicted
from npeff.collect.session import Prepared
from npeff.collect.sketch.base import with_bias
from npeff.models.select import CapturedModule
from npeff.perturb.row_weights import RowSums
from npeff.store.run import Run
from npeff.utils.errors import UserError

Parameters = dict[str, torch.Tensor]
"""A vector of parameter space: module name → float32 [d_out, columns]."""


class Lifter:
    """Lifts sums of a run's rows with the run's own model."""

    def __init__(self, run: Run, prepared: Prepared, prompts: Sequence[Sequence[int]]) -> None:
        self.run, self.prepared, self.prompts = run, prepared, prompts
        collected = run.manifest.collected
        self._ranks = run.source("fisher").ranks if "fisher" in collected else np.zeros(len(prompts), dtype=np.int64)
        self._starts = np.cumsum(self._ranks) - self._ranks
        usable = run.usable
        self._gradient_place = np.cumsum(usable) - 1
        self._pef_norms = run.table["pef_norm"].to_numpy() if "fisher" in collected else None
        self._gradient_norms = run.tensor("gradient_norm").numpy() if "gradient" in collected else None
        self._mixture = run.tensor("mixture") if run.has_tensor("mixture") else None

    def lift(self, sums: RowSums) -> list[Parameters]:
        """The vectors in parameter space.

        Args:
            sums: J vectors of the sketch, as sums of rows.

        Returns:
            J vectors; memory 4 · parameters · J, and 4 · J · tokens of a batch · d_out while it runs.
        """
        J = len(sums.vectors)
        modules, device = self.prepared.selection.modules, self.prepared.model.device
        totals = {module.name: torch.zeros(J, *module.shape, device=device) for module in modules}
        chosen = self.examples(sums)
        batches = self.prepared.collector.batches([self.prompts[i] for i in chosen], self.prepared.config.batch_tokens)
        with tqdm(total=len(chosen), unit="ex", desc=f"Lifting {J} components", disable=None) as bar:
            for batch in batches:
                self._add_batch(sums, [chosen[i] for i in batch], totals)
                bar.update(len(batch))
        return [{name: total[j] for name, total in totals.items()} for j in range(J)]

    def examples(self, sums: RowSums) -> list[int]:
        """Examples that carry weight in any of the sums.

        Args:
            sums: J vectors of the sketch, as sums of rows.

        Returns:
            Their numbers, ascending.
        """
        carried = np.zeros(len(self.prompts), dtype=bool)
        if "fisher" in sums.weights:
            owner = np.repeat(np.arange(len(self._ranks)), self._ranks)
            carried[owner[(sums.weights["fisher"] != 0).any(0).numpy()]] = True
        if "gradient" in sums.weights:
            used = (sums.weights["gradient"] != 0).any(0).numpy()
            carried |= used[self._gradient_place] & (np.diff(self._gradient_place, prepend=-1) > 0)
        return np.flatnonzero(carried).tolist()

    def passes(self, sums: RowSums) -> int:
        """Forward passes of one example that lifting the sums takes about as long as."""
        J = len(sums.vectors)
        shared = set(sums.weights) == {"gradient"} or int(self._ranks.max()) == 1
        return len(self.examples(sums)) * (2 + J if shared else 1 + 2 * J)

    def _add_batch(self, sums: RowSums, examples: list[int], totals: dict[str, torch.Tensor]) -> None:
        """Add what a batch of examples brings to every vector: totals[module] is [J, d_out, columns]."""
        answer_model = self.prepared.collector.answer_model
        prompts = [self.prompts[i] for i in examples]
        with Capture(self.prepared.selection.modules, lambda module, x: x) as capture:
            capture.start(len(prompts), *answer_model.sequences(prompts))
            z, _ = answer_model.logits(prompts)
            V, mix = self._directions(sums, z.detach().double().softmax(1), examples)
            rows = mix.any(0).any(0).nonzero().view(-1).tolist()
            for row in rows:
                shares = mix[:, :, row].to(z.device, torch.float32)

                def consumer(module: CapturedModule, delta: torch.Tensor, x: torch.Tensor) -> None:
                    _add_products(module, delta, x, shares, totals[module.name])  # noqa: B023 - used up in this turn

                capture.backward(z, V[:, row].float(), consumer, keep_graph=row != rows[-1])

    def _directions(self, sums: RowSums, p: torch.Tensor, examples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output directions V [B, q, r] and what each vector takes of them, mix [J, B, q]; float64.

        A pass costs 2 units, and each product of a vector in it 2 more. So q > 1 directions shared by J vectors would
        cost q (2 + 2 J); instead each vector has its own sum of directions, in a pass of its own: J (2 + 2).
        """
        J, B = len(sums.vectors), len(examples)
        V, mix = p.new_zeros(B, 0, p.shape[1]), p.new_zeros(J, B, 0)
        if "fisher" in sums.weights:
            assert self._pef_norms is not None
            V, _ = make_directions(self.prepared.config.directions, p, examples)
            if self.prepared.config.directions.rank is not None:  # rows were mixed after the sketch
                if self._mixture is None:
                    raise UserError(f"{self.run.path} has no record of how --rank mixed its rows. Collect it again.")
                V = self._mixture[examples][:, :, : V.shape[1]].to(V) @ V
            mix = p.new_zeros(J, B, V.shape[1])
            for b, i in enumerate(examples):
                start, rank = self._starts[i], self._ranks[i]
                if rank:
                    mix[:, b, :rank] = (
                        sums.weights["fisher"][:, start : start + rank].to(mix) / self._pef_norms[i] ** 0.5
                    )
        if "gradient" in sums.weights:
            assert self._gradient_norms is not None
            norms = torch.from_numpy(self._gradient_norms[examples]).to(mix)
            shares = sums.weights["gradient"][:, self._gradient_place[examples]].to(mix) / norms
            combined = combine_to_predicted(V, p) if V.shape[1] else None
            if combined is not None:
                mix = mix + shares[:, :, None] * combined
            else:
                V = torch.cat([V, predicted(p)[:, None]], 1)
                mix = torch.cat([mix, shares[:, :, None]], 2)
        if V.shape[1] > 1:
            V = torch.einsum("jbq,bqr->bjr", mix, V)
            carried = mix.any(2)
            mix = torch.eye(J, dtype=mix.dtype, device=mix.device)[:, None, :] * carried[:, :, None]
        return V, mix


def _add_products(
    module: CapturedModule, delta: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, total: torch.Tensor
) -> None:
    """Total [J, d_out, columns] += Σ_b shares_jb Σ_t δ_bt x_btᵀ; delta [B, T, d_out], x [B, T, d_in], shares [J, B]."""
    J, d_out, columns = total.shape
    inputs = with_bias(module, x).float().reshape(-1, columns)
    outputs = delta.float().reshape(-1, d_out)
    tokens = shares.T.repeat_interleave(delta.shape[1], 0)
    used = (shares != 0).any(1).nonzero().view(-1).tolist()
    if len(used) == J:  # one large product is faster than J small ones
        weighted = (outputs[:, None] * tokens[:, :, None]).reshape(-1, J * d_out)
        total.view(J * d_out, columns).addmm_(weighted.T, inputs)
        return
    for j in used:
        total[j].addmm_((outputs * tokens[:, j, None]).T, inputs)


def norm(vector: Parameters) -> float:
    """Euclidean norm of a vector of parameter space."""
    return float(sum(float(part.double().square().sum()) for part in vector.values())) ** 0.5


def scale_to_unit(vector: Parameters) -> float:
    """Divide a vector by its norm in place, and return that norm; a zero vector stays."""
    length = norm(vector)
    for part in vector.values():
        part /= length or 1.0
    return length
