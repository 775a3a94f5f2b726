"""What a collection will cost, from a few measured batches."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from npeff.collect.config import CollectConfig
from npeff.collect.session import Prepared, collect_prompts, load_prompts, prepare
from npeff.utils import distributed
from npeff.utils.distributed import world_size
from npeff.utils.text import amount, duration

MEASURED_BATCHES = 3


@dataclass(frozen=True)
class Estimate:
    """Cost of a collection."""

    seconds: float
    disk: int
    """Bytes."""
    memory: int
    """Bytes at the peak."""
    seconds_per_example: float


def estimate_collection(config: CollectConfig) -> Estimate:
    """Measure a few batches of the collection that `config` asks for, print what all of it will cost, and return it."""
    distributed.start()
    prepared = prepare(config)
    _, prompts = load_prompts(prepared)
    prepared.collector.answer_model.check_tree(max(prompts, key=len))
    found = estimate(prepared, prompts)
    if distributed.rank() == 0:
        _print(found, prepared, prompts)
    return found


def estimate(prepared: Prepared, prompts: list[list[int]]) -> Estimate:
    """Measure batches of long, middling and short prompts, and scale by the tokens of all of them."""
    collector, config = prepared.collector, prepared.config
    batches = list(collector.batches(prompts, config.batch_tokens))
    # the first batch pays for set-up, so its time does not count; it is the longest, so it shows the peak of memory
    collector.collect([prompts[i] for i in batches[0]], batches[0])
    extra = collector.answer_model.extra_tokens
    chosen = representative([_tokens(prompts, batch, extra) for batch in batches])
    sample = [i for index in chosen for i in batches[index]]
    begin = time.perf_counter()
    storage = getattr(torch, config.storage)
    found = collect_prompts(prepared, [prompts[i] for i in sample], sample, storage=storage)
    seconds = time.perf_counter() - begin
    everything, measured = _tokens(prompts, range(len(prompts)), extra), _tokens(prompts, sample, extra)
    total = seconds * everything / measured / world_size()
    each = sum(tensor.numel() * tensor.element_size() for tensor in found.values()) / len(sample)
    memory = peak_memory(prepared.model.device)
    if prepared.model.device.type != "cuda":
        # a shard is held twice while it is put in order; the sample was, too
        memory += int(2 * each * max(0, min(config.shard_examples, len(prompts)) - len(sample)))
    return Estimate(total, int(each * len(prompts)), memory, total / len(prompts))


def representative(tokens: Sequence[int]) -> list[int]:
    """Batches that stand for all, given the tokens of each: those in the middle of equal shares of the tokens.

    The first and the last would not do: the longest prompts, and what is left over, cost more for a token.
    """
    ends = np.cumsum(tokens)
    middles = (np.arange(MEASURED_BATCHES) + 0.5) / MEASURED_BATCHES * ends[-1]
    return np.unique(np.searchsorted(ends, middles)).tolist()


def _tokens(prompts: Sequence[Sequence[int]], chosen: Iterable[int], extra: int) -> int:
    return sum(len(prompts[i]) + extra for i in chosen)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on this system
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print(found: Estimate, prepared: Prepared, prompts: list[list[int]]) -> None:
    folder = Path(prepared.config.run).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    enough = "" if free > found.disk else "  NOT ENOUGH"
    ranks = "1 rank" if world_size() == 1 else f"{world_size()} ranks"
    print(
        f"{len(prompts)} examples of {sum(map(len, prompts)) / len(prompts):.0f} tokens on average\n"
        f"time    {duration(found.seconds)} ({found.seconds_per_example:.3g} s an example on {ranks})\n"
        f"disk    {amount(found.disk)} of {amount(free)} free{enough}\n"
        f"memory  {amount(found.memory)} at the peak, however many examples"
    )
