from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright

from tests import tiny
from tests.browser import launch

# Workers side by side share the cores: threads that wait for a core another worker has make all of them slow. The
# environment is for the processes that tests start.
_THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(_THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def review_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 short labelled texts."""
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.jsonl", 40)


def write_reviews(path: Path, count: int) -> Path:
    generator = torch.Generator().manual_seed(0)
    words = " ".join(tiny.TEXTS).split()
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            length = int(torch.randint(3, 12, (1,), generator=generator))
            chosen = [words[int(i)] for i in torch.randint(len(words), (length,), generator=generator)]
            record = {"text": f"{number} {' '.join(chosen)}", "label": ["negative", "positive"][number % 2]}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a module: while it is open no other event loop can run."""
    with sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()
