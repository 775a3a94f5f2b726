"""Sizes and signs of directions, as a logistic regression on what each of them does to the answers of examples.

A problem of n examples, r answers and J directions is four float64 tensors: log-probabilities log p [n, r], what a step
along each direction adds to them D [n, J, r], the probabilities that are wanted Q [n, r], and a penalty P [J, J], which
is positive definite.
"""

from collections.abc import Iterator

import torch
from torch.func import grad, hessian

MOST_STEPS = 100


def changed(s: torch.Tensor, log_p: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answers after steps of sizes s [J], to first order, [n, r]."""
    return (log_p + torch.einsum("njr,j->nr", D, s)).log_softmax(1)


def objective(s: torch.Tensor, log_p: torch.Tensor, D: torch.Tensor, Q: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of wanted and given probabilities after steps of sizes s [J], plus ½ sᵀ P s."""
    return -(Q * changed(s, log_p, D)).sum() / len(Q) + s @ P @ s / 2


def regress(*problem: torch.Tensor) -> torch.Tensor:
    """Sizes with the least `objective`, by Newton's method; a step that does not help is halved.

    Args:
        *problem: All that `objective` takes but the sizes.

    Returns:
        The sizes, [J].
    """
    s = torch.zeros(problem[1].shape[1], dtype=torch.float64)
    for _ in range(MOST_STEPS):
        step = torch.linalg.solve(hessian(objective)(s, *problem), grad(objective)(s, *problem))
        while objective(s - step, *problem) > objective(s, *problem) and float(step.norm()) > 1e-12:
            step = step / 2
        s = s - step
        if float(step.norm()) <= 1e-9 * float(s.norm()):
            break
    return s


def take_in_turn(count: int, *problem: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Take one direction after another, always the one that promises to lower the objective most.

    Args:
        count: Most directions to take.
        *problem: All that `objective` takes but the sizes.

    Yields:
        The directions so far, and their sizes.
    """
    log_p, D, Q, P = problem
    chosen: list[int] = []
    s = torch.zeros(len(P), dtype=torch.float64)
    while len(chosen) < min(count, len(P)):
        promise = grad(objective)(s, *problem).square() / hessian(objective)(s, *problem).diagonal()
        promise[chosen] = -1
        chosen.append(int(promise.argmax()))
        s = torch.zeros_like(s)
        s[chosen] = regress(log_p, D[:, chosen], Q, P[chosen][:, chosen])
        yield list(chosen), s[chosen]
