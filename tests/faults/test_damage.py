"""Truncated, flipped, deleted, swapped and foreign files of every kind: found, named, and never read as data."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import read_object
from tests.faults import cases
from tests.faults.conftest import DECOMPOSING, copy
from tests.faults.fuzzing import run_command, seeded
from tests.faults.killing import KILLED, Forkserver

PERTURBING = ["--component", "0", "1", "--top", "4", "--random", "8", "--direction", "plain", "--device", "cpu"]
PERTURBING += ["--protocol", "paper", "--nulls", "1"]
LABEL = "npeff-plain-lift-paper"


@pytest.fixture(scope="module")
def whole(server: Forkserver, decomposed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run can hold; not to be changed."""
    run = copy(decomposed, tmp_path_factory.mktemp("whole") / "run")
    for arguments in (["analyse"], ["perturb", *PERTURBING]):
        ended = server.run([arguments[0], str(run), *arguments[1:]])
        assert ended.code == 0, ended.said
    for component in range(5):
        Themes(Run.open(run), "npeff").add(component, f"label {component}", who="Ada")
    return run


@pytest.fixture(scope="module")
def other(server: Forkserver, collecting: list[str], reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of other examples: where foreign files come from."""
    folder = tmp_path_factory.mktemp("other")
    lines = (reviews / "sst2.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "sst2.jsonl").write_text(
        "".join(line.replace("film", "book") for line in reversed(lines)), encoding="utf-8"
    )
    run = folder / "run"
    for arguments in (
        ["collect", *collecting, "--data", str(folder / "sst2.jsonl")],
        ["decompose", "--decomposition", "npeff", *DECOMPOSING, "--seed", "1"],
        ["analyse"],
        ["perturb", *PERTURBING],
    ):
        ended = server.run([arguments[0], str(run), *arguments[1:]])
        assert ended.code == 0, ended.said
    Themes(Run.open(run), "npeff").add(0, "another label", who="Bob")
    return run


KINDS = {
    "manifest": "manifest.json",
    "table": "examples.parquet",
    "shard": "shards/00001.safetensors",
    "config of a decomposition": "decompositions/npeff/config.json",
    "tensors": "decompositions/npeff/tensors.safetensors",
    "analysis": "decompositions/npeff/analysis/analysis.json",
    "config of a perturbation": f"perturbations/{LABEL}/config.json",
    "notes of a perturbation": f"perturbations/{LABEL}/notes.json",
    "results of a perturbation": f"perturbations/{LABEL}/results.json",
    "record of a perturbation": f"perturbations/{LABEL}/components/00001.json",
}
SIBLINGS = {
    "shard": "shards/00002.safetensors",
    "record of a perturbation": f"perturbations/{LABEL}/components/00000.json",
}
MAY_BE_ABSENT = ("analysis", "notes of a perturbation", "record of a perturbation")
"""Made anew when they are needed, so that their absence is no damage."""
Damage = Callable[[Path, random.Random], None]


def truncate(path: Path, random: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(
        content[: random.choice((0, 1, len(content) // 2, len(content) - 2, random.randrange(len(content))))]
    )


def flip(path: Path, random: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def overwrite(path: Path, random: random.Random) -> None:
    path.write_bytes(random.randbytes(path.stat().st_size))


DAMAGES: dict[str, Damage] = {"truncated": truncate, "flipped": flip, "overwritten": overwrite}


def found_and_named(run: Path, name: str, original: bytes) -> None:
    """`verify` names the file, unless what can be read of it is what was written."""
    code, said = run_command(["verify", str(run), "--no-repair"])
    if code == 0:
        path = run / name
        (run / "original.json").write_bytes(original)
        assert path.suffix == ".json", f"damage of {name} was not found"
        assert read_object(path) == read_object(run / "original.json")
        (run / "original.json").unlink()
    else:
        assert name in said, said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(whole: Path, kind: str, damage: str, tmp_path: Path) -> None:
    random = seeded()
    run = copy(whole, tmp_path / "run")
    path = run / KINDS[kind]
    original = path.read_bytes()
    for _ in range(cases(6, 60)):
        DAMAGES[damage](path, random)
        if path.read_bytes() != original:
            found_and_named(run, KINDS[kind], original)
        path.write_bytes(original)
    assert run_command(["verify", str(run), "--no-repair"])[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_and_foreign_files_are_named(whole: Path, other: Path, kind: str, tmp_path: Path) -> None:
    run = copy(whole, tmp_path / "run")
    path = run / KINDS[kind]
    original = path.read_bytes()
    path.unlink()
    code, said = run_command(["verify", str(run), "--no-repair"])
    if kind not in MAY_BE_ABSENT:
        assert code == 2
        assert path.name in said
    foreign = [other / KINDS[kind]] + ([run / SIBLINGS[kind]] if kind in SIBLINGS else [])
    for source in foreign:
        shutil.copyfile(source, path)
        code, said = run_command(["verify", str(run), "--no-repair"])
        if kind in ("analysis", "notes of a perturbation"):
            continue  # whole in itself: see below for who reads it
        assert code == 2, source
        assert str(path.parent) in said
    path.write_bytes(original)
    assert run_command(["verify", str(run), "--no-repair"])[0] == 0


def test_a_foreign_analysis_is_not_shown(whole: Path, other: Path, tmp_path: Path) -> None:
    """An analysis names the hashes of what it was made of: another one is replaced."""
    run = copy(whole, tmp_path / "run")
    path = run / KINDS["analysis"]
    original = path.read_bytes()
    shutil.copyfile(other / KINDS["analysis"], path)
    assert run_command(["analyse", str(run)])[0] == 0
    assert path.read_bytes() == original


def test_foreign_results_of_a_perturbation_are_written_anew(whole: Path, other: Path, tmp_path: Path) -> None:
    run = copy(whole, tmp_path / "run")
    for kind in ("results of a perturbation", "notes of a perturbation"):
        path = run / KINDS[kind]
        original = path.read_bytes()
        shutil.copyfile(other / KINDS[kind], path)
        if kind.startswith("results"):
            assert run_command(["perturb", str(run), *PERTURBING])[0] == 0
            assert path.read_bytes() == original
        path.write_bytes(original)


def test_a_flipped_bit_in_the_journal_is_named(whole: Path, tmp_path: Path) -> None:
    """Unless it is in the last line break: a line without one is what a killed writer leaves, and does not count."""
    random = seeded()
    run = Run.open(copy(whole, tmp_path / "run"))
    book = Themes(run, "npeff")
    original, labels = book.path.read_bytes(), book.current()
    named = []
    for _ in range(cases(200, 2000)):
        content = bytearray(original)
        content[random.randrange(len(content) - 1)] ^= 1 << random.randrange(8)
        book.path.write_bytes(content)
        try:
            assert book.current() == labels
        except UserError as error:
            named.append(str(error))
    assert named
    assert all(str(book.path) in message for message in named)


READERS = {
    "shard": ["decompose", "--components", "3", "--max-passes", "3", "--decomposition", "new"],
    "table": ["analyse"],
    "tensors": ["analyse"],
    "manifest": ["themes"],
    "config of a decomposition": ["analyse"],
    "config of a perturbation": ["perturb", *PERTURBING],
    "record of a perturbation": ["perturb", *PERTURBING],
}


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_not_read_as_data(whole: Path, kind: str, tmp_path: Path) -> None:
    """Not only `verify` finds them: so does the command that would build on them."""
    random = seeded()
    run = copy(whole, tmp_path / "run")
    shutil.rmtree(run / "decompositions" / "npeff" / "analysis")
    path = run / KINDS[kind]
    original = path.read_bytes()
    command, *options = READERS[kind]
    for damage in (truncate, overwrite, flip, flip):
        damage(path, random)
        if path.suffix == ".json" and damage is flip:
            overwrite(path, random)
        code, said = run_command([command, str(run), *options])
        assert code == 2, said
        assert str(path) in said
        path.write_bytes(original)
    assert run_command([command, str(run), *options])[0] == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_unfinished_collection_is_continued_to_the_same_result(
    server: Forkserver, collecting: list[str], damage: str, tmp_path: Path
) -> None:
    """What a crash of the machine may leave behind: shards and records that are not what was written."""
    random = seeded()
    run = tmp_path / "run"
    arguments = ["collect", str(run), *collecting]
    ended = server.run(arguments)
    assert ended.code == 0, ended.said
    assert ended.events is not None
    expected = {path.name: path.read_bytes() for path in run.rglob("*.safetensors")}
    table = (run / "examples.parquet").read_bytes()
    shutil.rmtree(run)
    for part in ("*.safetensors", "*.json"):
        killed = server.run(arguments, after_events=ended.events * 2 // 3)
        assert killed.code == KILLED
        written = sorted((run / "shards").glob(part))
        assert len(written) > 1
        DAMAGES[damage](written[1], random)
        ended_again = server.run(arguments)
        assert ended_again.code == 0, ended_again.said
        assert {path.name: path.read_bytes() for path in run.rglob("*.safetensors")} == expected
        assert (run / "examples.parquet").read_bytes() == table
        shutil.rmtree(run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_fit_begins_anew(collected: Path, damage: str, tmp_path: Path) -> None:
    random = seeded()
    run = copy(collected, tmp_path / "run")
    options = [
        "--components",
        "4",
        "--tolerance",
        "0",
        "--checkpoint-passes",
        "2",
        "--decomposition",
        "x",
        "--device",
        "cpu",
    ]
    assert run_command(["decompose", str(run), *options, "--max-passes", "12"])[0] == 0
    expected = (run / "decompositions" / "x" / "tensors.safetensors").read_bytes()
    for part in ("state.json", "*.safetensors"):
        shutil.rmtree(run / "decompositions")
        assert run_command(["decompose", str(run), *options, "--max-passes", "6"])[0] == 0
        (path,) = (run / "decompositions" / ".x.checkpoint").glob(part)
        DAMAGES[damage](path, random)
        if damage == "flipped":
            overwrite(path, random)
        code, said = run_command(["decompose", str(run), *options, "--max-passes", "12"])
        assert code == 0, said
        assert "begins again" in said
        assert str(path.parent) in said
        assert (run / "decompositions" / "x" / "tensors.safetensors").read_bytes() == expected
