"""The few words of torch.distributed that npeff needs; without torchrun they all do nothing."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from npeff.utils.errors import UserError

T = TypeVar("T")

# A rank waits for the slowest one, and a shard of a large model takes hours; torchrun itself notices a dead rank.
PATIENCE = timedelta(days=7)


def start() -> None:
    """Join the process group that torchrun describes in the environment; one process alone needs none."""
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "") in ("", "1"):
        return
    try:
        use_nccl = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if use_nccl:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # gloo is joined in any case: objects and CPU tensors travel over it
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_nccl else "gloo", timeout=PATIENCE)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"WORLD_SIZE is set, but the processes cannot find each other ({error}). Start them with torchrun, "
            "or unset WORLD_SIZE."
        ) from error


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, 0 when alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        with _lost_rank():
            dist.barrier()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Add `tensor` over all ranks in place and return it."""
    if dist.is_initialized():
        with _lost_rank():
            dist.all_reduce(tensor)
    return tensor


def everyone_has(value: T) -> list[T]:
    """What every rank has.

    Args:
        value: Of this rank: a small picklable object, which only travels between our own processes.

    Returns:
        The values in the order of the ranks.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * world_size()
    with _lost_rank():
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _lost_rank() -> Iterator[None]:
    """A rank that waits for one that has ended says so in a line; the reason stands where that one ended."""
    try:
        yield
    except RuntimeError as error:
        if "closed" not in str(error).lower() and "reset" not in str(error).lower():
            raise
        raise UserError(f"Rank {rank()} stops, because another rank has ended. See what that one says.") from error
