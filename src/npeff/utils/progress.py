"""Progress of long work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# no thread that watches the bars: one that gets no memory while it starts leaves its starter waiting for ever
tqdm.monitor_interval = 0


def progress(items: Iterable[T] | None = None, *, desc: str, unit: str, active: bool = True, **options: Any) -> tqdm[T]:
    """A progress bar on a terminal, and nothing in a log file.

    Args:
        items: What to go through; without it, the caller moves the bar by its `update`.
        desc: What is being done.
        unit: What is counted.
        active: Whether to show it at all: of several ranks, one does.
        **options: `total`, `initial`, `leave` as tqdm takes them. Every bar has a total.

    Returns:
        The bar: an iterator over the items, and a context manager.
    """
    return tqdm(items, desc=desc, unit=unit, disable=None if active else True, **options)
