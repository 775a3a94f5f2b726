"""kill -9 at any moment: after a restart the results are those of an undisturbed run, byte for byte."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.utils.files import PARTIAL, SEAL
from tests.faults import cases
from tests.faults.conftest import DECOMPOSING
from tests.faults.killing import Forkserver, kill_until_done

KILLS = cases(3, 50)
MOST = 8
"""Kills after which a command may end, to be compared; then the next round begins."""


@dataclass(frozen=True)
class Stage:
    """A command that is to be killed, in a directory that is `start` (or empty) before."""

    arguments: list[str]
    start: Path | None = None
    call: str = "npeff.cli:main"


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a directory without what depends on the clock: times in histories and journals."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            content = path.read_bytes()
            if path.name == "history.csv":
                rows = list(csv.DictReader(io.StringIO(content.decode())))
                content = json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in rows]).encode()
            elif path.name == "state.json":
                state = {name: value for name, value in json.loads(content).items() if name != SEAL}
                for step in state["history"]["steps"]:
                    del step["seconds"]
                content = json.dumps(state).encode()
            elif path.name == "config.json":
                config = {name: value for name, value in json.loads(content).items() if name != SEAL}
                config.get("notes", {}).pop("made", None)
                content = json.dumps(config).encode()
            elif path.suffix == ".jsonl" and path.parent.name == "annotations":
                lines = [json.loads(line) | {"when": "", SEAL: ""} for line in content.decode().splitlines()]
                content = json.dumps(lines).encode()
            found[str(path.relative_to(folder))] = content
    return found


def differences(first: dict[str, bytes], second: dict[str, bytes]) -> list[str]:
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def fresh(folder: Path, start: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if start is not None:
        shutil.copytree(start, folder)


def check(server: Forkserver, stage: Stage, folder: Path) -> None:
    """Run once undisturbed, then in rounds with kills, until there were enough of them."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    moments = random.Random(seed)
    fresh(folder, stage.start)
    whole = server.run(stage.arguments, stage.call)
    assert whole.code == 0, whole.said
    expected = contents(folder)
    kills, rounds = 0, 0
    while kills < KILLS:
        fresh(folder, stage.start)
        kills += kill_until_done(server, stage.arguments, stage.call, whole, moments, min(MOST, KILLS - kills))
        rounds += 1
        found = contents(folder)
        assert differences(expected, found) == [], f"seed {seed}, round {rounds}"
        assert not [path for path in folder.rglob("*") if PARTIAL in path.name], f"seed {seed}, round {rounds}"
    print(f"{kills} kills in {rounds} rounds; undisturbed {whole.seconds:.2f} s, {whole.events} changes of files")


def test_collect(server: Forkserver, collecting: list[str], tmp_path: Path) -> None:
    check(server, Stage(["collect", str(tmp_path / "run"), *collecting]), tmp_path / "run")


@pytest.mark.parametrize("method", ["npeff", "clusters", "sae"][: cases(1, 3)])
def test_decompose(server: Forkserver, collected: Path, method: str, tmp_path: Path) -> None:
    arguments = ["decompose", str(tmp_path / "run"), "--method", method, *DECOMPOSING]
    if method == "sae":
        arguments += ["--sae-steps", "200", "--sae-patience", "20"]
    check(server, Stage(arguments, collected), tmp_path / "run")


def test_perturb(server: Forkserver, decomposed: Path, tmp_path: Path) -> None:
    options = ["--component", "0", "1", "2", "--top", "4", "--random", "8", "--save", "delta", "--device", "cpu"]
    options += ["--protocol", "paper", "--nulls", "1"]
    # one vector at a time: a group of several would be put together anew after a kill, and rounded differently
    options += ["--memory-gb", "1e-6"]
    check(server, Stage(["perturb", str(tmp_path / "run"), *options], decomposed), tmp_path / "run")


def test_reproduce(server: Forkserver, model_directory: Path, reviews: Path, tmp_path: Path) -> None:
    options = ["--scale", "0.001", "--examples", "sst2=40", "--tasks", "sst2", "--device", "cpu"]
    options += ["--data", str(reviews), "--model", str(model_directory), "--out", str(tmp_path / "out")]
    check(server, Stage(["reproduce", "component-count", *options]), tmp_path / "out")


def test_labels(server: Forkserver, decomposed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    check(server, Stage([str(run), "npeff"], decomposed, "tests.faults.stages:edit_labels"), run)
    assert len(Themes(Run.open(run), "npeff").current()) == 5


def test_the_comparison_sees_a_single_bit(decomposed: Path, tmp_path: Path) -> None:
    """The tests above would be worth nothing if they compared nothing."""
    shutil.copytree(decomposed, tmp_path / "run")
    path = tmp_path / "run" / "decompositions" / "npeff" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert differences(contents(decomposed), contents(tmp_path / "run")) == [str(path.relative_to(tmp_path / "run"))]
    assert SEAL in json.loads((decomposed / "manifest.json").read_text())
