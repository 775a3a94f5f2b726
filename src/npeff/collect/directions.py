"""Output directions: the one choice that tells the approximations of a Fisher apart.

With answer logits z, p = softmax(z) and J = ∂z/∂θ, an example's Fisher is F = Jᵀ S J with S = diag(p) − p pᵀ. A matrix
V [k, r] with VᵀV ≈ S gives rows G = V J with GᵀG ≈ F, one backward pass each. Everything here is `p → V`.
"""

import numpy as np
import torch

from npeff.collect.config import DirectionsConfig, parse_directions
from npeff.utils.random import random_bits

# up to here S is decomposed whole; above, in a small space that holds its leading eigenvectors
DENSE_ANSWERS = 256
# auto: exact up to so many answers, else so many spectral rows
AUTO_EXACT, AUTO_ROWS = 16, 8


def most_rows(config: DirectionsConfig, answers: int) -> int:
    """How many rows an example may get before its rank is reduced."""
    kind, amount = parse_directions(config.directions)
    if kind in ("projection", "sampling"):
        return int(amount)
    wanted = {"auto": answers if answers <= AUTO_EXACT else AUTO_ROWS, "exact": answers}.get(kind, amount)
    return min(int(wanted) if wanted >= 1 else config.max_rows, answers - 1)


def make_directions(
    config: DirectionsConfig, probabilities: torch.Tensor, examples: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions of the outputs that stand for the expectation over answers.

    Args:
        config: Which directions.
        probabilities: Of the answers, [B, r].
        examples: The examples' numbers: random directions depend on them and on the seed, not on the batch.

    Returns:
        V [B, k, r] with VᵀV ≈ S = diag(p) − ppᵀ, where examples that need fewer than k rows have zeros in the rest, and
        the share of tr S that they keep, [B]. Both float64.
    """
    p = probabilities.double()
    kind, amount = parse_directions(config.directions)
    count = most_rows(config, p.shape[1])
    if kind == "projection":
        V = projection(p, count, examples, config.directions_seed)
    elif kind == "sampling":
        V = sampling(p, count, examples, config.directions_seed)
    else:
        V = spectral(p, count)
        V = _keep_share(V, p, amount) if 0 < amount < 1 else V
    kept = V.square().sum((1, 2)) / _trace(p).clamp_min(torch.finfo(torch.float64).tiny)
    return V, kept


def _others(p: torch.Tensor) -> torch.Tensor:
    """1 − p, [B, r]; for the largest the sum of the others, since rounding would leave nothing of 1 − p near 1."""
    largest = p.argmax(1, keepdim=True)
    rest = p.scatter(1, largest, 0.0).sum(1, keepdim=True)
    return (1 - p).scatter(1, largest, rest)


def _trace(p: torch.Tensor) -> torch.Tensor:
    """Tr S = Σᵢ pᵢ (1 − pᵢ), [B]."""
    return (p * _others(p)).sum(1)


def spectral(p: torch.Tensor, count: int) -> torch.Tensor:
    """Eigenvectors of S for the largest eigenvalues, each times √λ.

    For many answers the eigenproblem is solved in the space of the most probable answers and, on the rest, p, p² and
    p³: an eigenvector is v_i ∝ p_i / (p_i − λ), and where p_i is below λ that is a power series in p_i.

    Args:
        p: Probabilities of the answers, float64 [B, r].
        count: How many eigenvectors; r − 1 of them are exact.

    Returns:
        [B, count, r], the largest eigenvalue first.
    """
    answers = p.shape[1]
    if answers <= DENSE_ANSWERS:
        S = -p[:, :, None] * p[:, None, :]
        S.diagonal(dim1=1, dim2=2).copy_(p * _others(p))
        return _scaled_eigenvectors(S, count)
    head, places = p.topk(min(answers - 1, max(4 * count, 64)), dim=1)
    rest = p.scatter(1, places, 0.0)
    basis = _orthonormal([rest, rest**2, rest**3])
    inner = torch.cat([head, (basis @ rest[:, :, None])[:, :, 0]], 1)  # p in the basis of the small space
    S = -inner[:, :, None] * inner[:, None, :]
    size = head.shape[1]
    S[:, :size, :size].diagonal(dim1=1, dim2=2).copy_(head * _others(p).gather(1, places))
    S[:, size:, size:] += (basis * rest[:, None]) @ basis.mT
    small = _scaled_eigenvectors(S, count)
    V = small[:, :, size:] @ basis
    return V.scatter(2, places[:, None, :].expand(-1, count, -1), small[:, :, :size])


def _orthonormal(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Gram-Schmidt on vectors [B, r], giving [B, len, r]; one that depends on those before it becomes zero."""
    basis: list[torch.Tensor] = []
    for vector in vectors:
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        for _ in range(2):  # once more for the rounding of the first time
            for other in basis:
                vector = vector - (vector * other).sum(1, keepdim=True) * other
        length = vector.norm(dim=1, keepdim=True)
        basis.append(torch.where(length > 1e-9, vector / length.clamp_min(1e-9), 0.0))
    return torch.stack(basis, 1)


def _scaled_eigenvectors(S: torch.Tensor, count: int) -> torch.Tensor:
    values, vectors = _leading(S, count)
    return vectors * values.clamp_min(0).sqrt()[:, :, None]


def _leading(matrices: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues [B, count] of symmetric matrices, and their eigenvectors [B, count, n].

    An eigenvector's sign is arbitrary, so it is fixed: the first of its largest entries is positive. Entries count as
    equal up to rounding; for two answers they always are, and rounding would otherwise decide.
    """
    values, vectors = torch.linalg.eigh(matrices)
    values, vectors = values[:, -count:].flip(1), vectors[:, :, -count:].flip(2).mT
    size = vectors.abs()
    first = (size > (1 - 1e-6) * size.amax(2, keepdim=True)).int().argmax(2, keepdim=True)
    return values, vectors * vectors.gather(2, first).sign()


def _keep_share(V: torch.Tensor, p: torch.Tensor, share: float) -> torch.Tensor:
    """Zero the rows behind the first ones that reach `share` of the trace."""
    energy = V.square().sum(2)
    before = energy.cumsum(1) - energy
    wanted = before < share * _trace(p)[:, None]
    return (V * wanted[:, :, None])[:, : max(1, int(wanted.sum(1).max()))]


def projection(p: torch.Tensor, count: int, examples: list[int], seed: int) -> torch.Tensor:
    """The paper's random projections: A diag(√p) (I − 1 pᵀ), with A [count, r] of random signs over √count.

    Args:
        p: Probabilities of the answers, float64 [B, r].
        count: Rows per example.
        examples: Numbers of the examples, which key the random signs, [B].
        seed: Of all examples.

    Returns:
        [B, count, r].
    """
    size = count * p.shape[1]
    bits = np.stack([random_bits(-(-size // 8), "projection", seed, example) for example in examples])
    ones = torch.from_numpy(np.unpackbits(bits, axis=1, count=size, bitorder="little")).to(p)
    scaled = (2 * ones - 1).view(len(p), count, -1) * (p.sqrt() / count**0.5)[:, None, :]
    return scaled - scaled.sum(2, keepdim=True) * p[:, None, :]


def sampling(p: torch.Tensor, count: int, examples: list[int], seed: int) -> torch.Tensor:
    """The paper's ablation: rows (e_y − p)/√count with y drawn from p.

    Args:
        p: Probabilities of the answers, float64 [B, r].
        count: Rows per example.
        examples: Numbers of the examples, which key the draws, [B].
        seed: Of all examples.

    Returns:
        [B, count, r].
    """
    batch, answers = p.shape
    bits = np.stack([random_bits(8 * count, "sampling", seed, example).view("<u8") for example in examples])
    uniforms = torch.from_numpy((bits >> 11) * 2.0**-53).to(p.device)
    drawn = torch.searchsorted(p.cumsum(1), uniforms).clamp_max(answers - 1)
    V = -p[:, None, :].expand(batch, count, answers).clone()
    V.scatter_add_(2, drawn[:, :, None], torch.ones_like(drawn, dtype=p.dtype)[:, :, None])
    return V / count**0.5


def predicted(p: torch.Tensor) -> torch.Tensor:
    """e_argmax − p, [B, r]: the gradient of the predicted answer's log-probability."""
    p = p.double()
    largest = p.argmax(1, keepdim=True)
    return (-p).scatter(1, largest, _others(p).gather(1, largest))


def split_length(V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions as directions of length 1/2 to 1, times powers of 2.

    Directions of confident answers are tiny, and what a half-precision model backpropagates of them would vanish. A
    power of 2 changes no digit, so in float32 it makes no difference where in a backward pass it is multiplied.

    Args:
        V: Directions, [..., r].

    Returns:
        Directions to backpropagate [..., r] and what to multiply the outcome by [...]; 1 for a direction that is zero.
    """
    length = torch.linalg.vector_norm(V, dim=-1, dtype=torch.float64)
    power = torch.where(length > 0, length / torch.frexp(length).mantissa, 1.0)
    return (V / power[..., None]).to(V.dtype), power.to(V.dtype)


def combine_to_predicted(V: torch.Tensor, p: torch.Tensor) -> torch.Tensor | None:
    """The direction `predicted` as a combination of other directions.

    It lies in the range of S, so exact directions give its row without a backward pass of its own. The coefficients are
    at most 1/√max(p) long, so rounding is not blown up.

    Args:
        V: Directions, [B, k, r].
        p: Probabilities of the answers, [B, r].

    Returns:
        Coefficients [B, k], or None where the row space of V does not hold it.
    """
    if V.shape[1] < V.shape[2] - 1:
        return None
    target = predicted(p)
    lengths = V.square().sum(2)
    # eigenvectors are orthogonal; directions with no weight to speak of would only add rounding
    usable = lengths > 1e-12 * lengths.amax(1, keepdim=True)
    coefficients = torch.where(usable, (V @ target[:, :, None])[:, :, 0] / lengths, 0.0)
    rebuilt = (coefficients[:, None, :] @ V)[:, 0]
    error = (rebuilt - target).norm(dim=1) / target.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    return coefficients if bool((error < 1e-5).all()) else None


def reduce_rank(rows: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best few rows for GᵀG.

    Rows are mixed where k ≤ rank too, so that those of an example do not depend on how many the others of its batch
    need.

    Args:
        rows: G, [B, k, p].
        rank: How many rows to keep.

    Returns:
        New rows [B, R, p] with R = min(rank, k), the share of the trace that they keep [B], and the mix [B, R, k] that
        made them of the old ones.
    """
    gram = (rows @ rows.mT).double()
    values, top = _leading(gram, min(rank, rows.shape[1]))
    whole = gram.diagonal(dim1=1, dim2=2).sum(1)
    kept = values.sum(1) / whole.clamp_min(torch.finfo(torch.float64).tiny)
    mix = top.to(rows.dtype)
    return mix @ rows, kept, mix
