"""What a collection will cost, from a few measured batches."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from npeff.collect.asked import ask
from npeff.collect.config import CollectConfig
from npeff.collect.session import Prepared, collect_prompts, prepare_with_prompts
from npeff.utils import Record, amount, duration
from npeff.utils.distributed import rank, start, world_size


class Estimate(Record):
    """Cost of a collection."""

    seconds: float
    """On all ranks together, from the first batch to the last."""
    disk: int
    """Bytes."""
    memory: int
    """Bytes at the peak."""
    seconds_per_example: float


def estimate_collection(config: CollectConfig) -> Estimate:
    """Measure a few batches of the collection that `config` asks for, and print what all of it will cost.

    Args:
        config: What to collect.

    Returns:
        The cost.
    """
    start()
    prepared, dataset, prompts = prepare_with_prompts(config)
    prepared.collector.answer_model.check_tree(max(prompts, key=len))
    asked = ask(prepared, dataset, prompts)
    cost = estimate(prepared, prompts)
    if rank() == 0:
        run = Path(config.run).absolute()
        free = shutil.disk_usage(next(folder for folder in (run, *run.parents) if folder.exists())).free
        enough = "" if free > cost.disk else "  NOT ENOUGH"
        ranks = "1 rank" if world_size() == 1 else f"{world_size()} ranks"
        print(
            *(line + "\n" for line in (*dataset.notes, *asked.lines, *asked.warnings)),
            f"{prepared.selection.describe()}\n"
            f"{len(prompts)} examples of {sum(map(len, prompts)) / len(prompts):.0f} tokens on average\n"
            f"time    {duration(cost.seconds)} ({cost.seconds_per_example:.3g} s an example on {ranks})\n"
            f"disk    {amount(cost.disk)} of {amount(free)} free{enough}\n"
            f"memory  {amount(cost.memory)} at the peak, however many examples",
            sep="",
        )
    return cost


def estimate(prepared: Prepared, prompts: list[list[int]]) -> Estimate:
    """Measure batches of long, middling and short prompts, and scale by the tokens of all of them.

    Args:
        prepared: Model, task and sketch.
        prompts: Token ids of all examples.

    Returns:
        The cost of collecting all of them. A short collection is measured by one batch, so that the answer does not
        take longer than what it is about.
    """
    collector, config = prepared.collector, prepared.config
    batches = list(collector.batches(prompts, config.batch_tokens, shared=True))
    # the first batch pays for set-up, so its time does not count; it is the longest, so it shows the peak of memory
    collector.collect([prompts[i] for i in batches[0]], batches[0])
    tokens = np.array([len(prompt) + collector.answer_model.extra_tokens for prompt in prompts])
    chosen = representative([int(tokens[batch].sum()) for batch in batches], min(3, -(-len(batches) // 4)))
    sample = [i for index in chosen for i in batches[index]]
    begin = time.perf_counter()
    tensors = collect_prompts(prepared, [prompts[i] for i in sample], sample, storage=getattr(torch, config.storage))
    seconds = time.perf_counter() - begin
    total = float(seconds * tokens.sum() / tokens[sample].sum())
    total /= world_size() // (config.model.tensor_parallel or 1)
    each = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / len(sample)
    memory = peak_memory(prepared.model.device)
    if prepared.model.device.type != "cuda":
        # a shard is held twice while it is put in order; the sample was, too
        memory += int(2 * each * max(0, min(config.shard_examples, len(prompts)) - len(sample)))
    return Estimate(total, int(each * len(prompts)), memory, total / len(prompts))


def representative(tokens: Sequence[int], count: int) -> list[int]:
    """Batches that stand for all: those in the middle of equal shares of the tokens.

    The first and the last would not do: the longest prompts, and what is left over, cost more for a token.

    Args:
        tokens: Tokens of each batch.
        count: How many to choose.

    Returns:
        Numbers of the batches, ascending.
    """
    ends = np.cumsum(tokens)
    middles = (np.arange(count) + 0.5) / count * ends[-1]
    return np.unique(np.searchsorted(ends, middles)).tolist()


def peak_memory(device: torch.device) -> int:
    """How much memory has been in use at most.

    Args:
        device: Where the model is.

    Returns:
        Bytes of the GPU if it is one, else of this process; 0 where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on this system
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
