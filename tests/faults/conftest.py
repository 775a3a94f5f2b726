from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.faults.killing import Forkserver


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forkserver]:
    with Forkserver(tmp_path_factory.mktemp("forkserver")) as running:
        yield running


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 48 labelled texts as sst2.jsonl."""
    folder = tmp_path_factory.mktemp("reviews")
    words = " ".join(tiny.TEXTS).split()
    lines = [
        {"text": f"{n} {' '.join(words[(n * k) % len(words)] for k in range(2, 5 + n % 5))}", "label": n % 2}
        for n in range(48)
    ]
    (folder / "sst2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def collecting(model_directory: Path, reviews: Path) -> list[str]:
    """Options of a collection that takes a fraction of a second."""
    options = ["--task", "sst2", "--data", str(reviews / "sst2.jsonl"), "--model", str(model_directory)]
    return [*options, "--dim", "256", "--shard-examples", "8", "--batch-tokens", "400", "--device", "cpu"]


DECOMPOSING = [
    *("--components", "5", "--max-passes", "40", "--tolerance", "0", "--checkpoint-passes", "4", "--device", "cpu")
]


@pytest.fixture(scope="session")
def collected(server: Forkserver, collecting: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    run = tmp_path_factory.mktemp("collected") / "run"
    ended = server.run(["collect", str(run), *collecting])
    assert ended.code == 0, ended.said
    return run


@pytest.fixture(scope="session")
def decomposed(server: Forkserver, collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a decomposition named npeff; not to be changed."""
    run = copy(collected, tmp_path_factory.mktemp("decomposed") / "run")
    ended = server.run(["decompose", str(run), "--decomposition", "npeff", *DECOMPOSING])
    assert ended.code == 0, ended.said
    return run


def copy(run: Path, to: Path) -> Path:
    """A copy of a run, to be changed."""
    import shutil

    shutil.copytree(run, to)
    return to
