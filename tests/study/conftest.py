from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npeff.store.run import Run
from npeff.study.config import MakeConfig
from npeff.study.kit import CHOICES, Answer, Key, Sheet
from npeff.study.make import make
from tests.synthetic import add_decomposition, make_run

COMPONENTS = 12


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """300 examples, every tenth text a repetition, two decompositions."""
    texts = [f"a review about subject {i - i % 10 if i % 10 == 1 else i} & more" for i in range(300)]
    run = make_run(tmp_path_factory.mktemp("study") / "run", texts, aside=[7, 70])
    add_decomposition(run, "npeff", COMPONENTS)
    add_decomposition(run, "clusters", COMPONENTS)
    return run


@pytest.fixture(scope="session")
def made(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of both decompositions in two forms; tests write only beside it."""
    out = tmp_path_factory.mktemp("kits") / "kit"
    return make(MakeConfig(str(run.path), str(out), ("npeff", "clusters"), groups=10, forms=2, seed=3))


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client would wait between tries; it does not."""
    waits: list[float] = []
    monkeypatch.setattr("npeff.study.judge.sleep", waits.append)
    return waits


def drawn(seed: int, key: Key, who: str, answered: float = 0.9, source: str = "person") -> Sheet:
    """Answers at random; some groups are left open."""
    random = np.random.default_rng(seed)
    answers = {
        entry.number: Answer(CHOICES[random.integers(3)], f"theme {entry.number}")
        for entry in key.groups
        if random.uniform() < answered
    }
    return Sheet(who, answers, source)
