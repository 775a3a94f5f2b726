"""The loss along a line of components is a quartic: its coefficients and its minimiser."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Quartic:
    """loss(H + αΔ) − loss(H) = c1·α + c2·α² + c3·α³ + c4·α⁴ for fixed coefficients W."""

    c1: float
    c2: float
    c3: float
    c4: float

    def __call__(self, step: float) -> float:
        return step * (self.c1 + step * (self.c2 + step * (self.c3 + step * self.c4)))

    def best_step(self) -> float:
        """The α ≥ 0 with the lowest loss."""
        cubic = np.array([4 * self.c4, 3 * self.c3, 2 * self.c2, self.c1])
        if not np.isfinite(cubic).all() or not cubic.any():
            return 0.0
        roots = np.roots(cubic)
        candidates = [0.0, *(float(root.real) for root in roots if root.real > 0)]
        # a double root may come out with a small imaginary part; comparing values is safe for any candidate
        return min(candidates, key=self)


def along(
    S: torch.Tensor, K: torch.Tensor, K_cross: torch.Tensor, K_step: torch.Tensor, slope: float, curvature: float
) -> Quartic:
    """The loss from H along Δ, from small matrices only.

    With S = WᵀW, K = HHᵀ, `K_cross` = HΔᵀ, `K_step` = ΔΔᵀ (all float64 [C, C]), `slope` = ⟨T − MH, Δ⟩ (the gradient is
    4(MH − T)) and `curvature` = Σ Wᵢⱼ‖GᵢΔⱼ‖²: ‖Gᵢ(h + αδ)‖² and the Gram matrix (H + αΔ)(H + αΔ)ᵀ are quadratic in α.
    """
    K1 = K_cross + K_cross.T
    return Quartic(
        c1=-4.0 * slope,
        c2=float((S * (K1 * K1 + 2 * K * K_step)).sum()) - 2.0 * curvature,
        c3=2.0 * float((S * K1 * K_step).sum()),
        c4=float((S * K_step * K_step).sum()),
    )
