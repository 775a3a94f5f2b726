"""A machine that fails: full disks, directories that cannot be written to, little memory, dead ranks, odd settings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from npeff.decompose.methods import load
from npeff.utils.files import PARTIAL, read_object
from tests.faults import cases
from tests.faults.conftest import DECOMPOSING, copy
from tests.faults.fuzzing import run_command
from tests.faults.killing import QUIET, ROOT, Forkserver

PERTURBING = [
    "--component",
    "0",
    "--top",
    "4",
    "--random",
    "8",
    "--direction",
    "plain",
    "--device",
    "cpu",
    "--protocol",
    "paper",
    "--nulls",
    "1",
]

# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forkserver, Path]]:
    """A fork server that sees a disk of its own at a path: a tmpfs, in a name space where mounting is allowed."""
    folder = tmp_path_factory.mktemp("disk")
    # anyone may do the first where the system allows it, and root the second in containers that do not
    ways = (["unshare", "--map-root-user", "--mount"], ["unshare", "--mount"])
    own_mounts = next((way for way in ways if not subprocess.run([*way, "true"], capture_output=True).returncode), None)
    assert own_mounts, "These tests mount a small disk of their own and need `unshare --mount`: allow it, or be root."
    with Forkserver(folder, own_mounts) as server:
        (folder / "mounted").mkdir()
        shell(server, f"mount -t tmpfs -o size=64m npeff {folder / 'mounted'}")
        yield server, folder / "mounted"


def shell(server: Forkserver, command: str) -> None:
    ended = server.run([command], "tests.faults.stages:shell")
    assert ended.code == 0, ended.said


def listing(server: Forkserver, folder: Path, out: Path) -> dict[str, bytes]:
    """The files of a directory that only the server sees."""
    shutil.rmtree(out, ignore_errors=True)
    shell(server, f"cp -r {folder} {out}")
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kilobytes", [40, 96, 8, 72][: cases(2, 4)])
def test_a_full_disk_ends_a_collection_clearly_and_with_space_it_goes_on(
    disk: tuple[Forkserver, Path], collecting: list[str], kilobytes: int, tmp_path: Path
) -> None:
    server, mounted = disk
    run = mounted / "run"
    shell(server, f"rm -rf {run}; mount -o remount,rw,size=64m {mounted}")
    arguments = ["collect", str(run), *collecting]
    assert server.run(arguments).code == 0
    expected = listing(server, run, tmp_path / "expected")
    shell(server, f"rm -rf {run}; mount -o remount,size={kilobytes}k {mounted}")
    ended = server.run(arguments)
    assert ended.code == 2, ended.said
    assert "The disk is full" in ended.said
    assert "Traceback" not in ended.said
    left = listing(server, mounted, tmp_path / "left")
    assert not [name for name in left if PARTIAL in name]
    shell(server, f"mount -o remount,size=64m {mounted}")
    ended = server.run(arguments)
    assert ended.code == 0, ended.said
    assert listing(server, run, tmp_path / "found") == expected


@pytest.mark.parametrize("kilobytes", [4, 24][: cases(1, 2)])
def test_a_full_disk_ends_other_commands_clearly(
    disk: tuple[Forkserver, Path], decomposed: Path, kilobytes: int, tmp_path: Path
) -> None:
    server, mounted = disk
    run = mounted / "run"
    commands = [
        ["decompose", str(run), "--decomposition", "new", *DECOMPOSING],
        ["analyse", str(run)],
        ["export", str(run), str(mounted / "site")],
        ["perturb", str(run), "--decomposition", "npeff", *PERTURBING],
        ["push", str(run), str(mounted / "shared")],
    ]
    for command in commands:
        shell(server, f"mount -o remount,rw,size=64m {mounted}; rm -rf {mounted}/*; cp -r {decomposed} {run}")
        # a file takes up all but a little of the space
        shell(
            server,
            f"head -c $(( $(df --output=avail -B1 {mounted} | tail -1) - {kilobytes * 1024} )) /dev/zero > {mounted}/f",
        )
        ended = server.run(command)
        assert ended.code == 2, (command, ended.said)
        assert "Traceback" not in ended.said, (command, ended.said)
        assert "isk is full" in ended.said or "No space" in ended.said, (command, ended.said)
        shell(server, f"rm {mounted}/f")
        ended = server.run(command)
        assert ended.code == 0, (command, ended.said)
        left = listing(server, mounted, tmp_path / "left")
        assert not [name for name in left if PARTIAL in name], command


def test_a_disk_that_cannot_be_written_to(
    disk: tuple[Forkserver, Path], decomposed: Path, collecting: list[str]
) -> None:
    server, mounted = disk
    run = mounted / "run"
    shell(server, f"mount -o remount,rw,size=64m {mounted}; rm -rf {mounted}/*; cp -r {decomposed} {run}")
    shell(server, f"mount -o remount,ro {mounted}")
    for command in (
        ["collect", str(mounted / "new"), *collecting],
        ["decompose", str(run), "--decomposition", "new", *DECOMPOSING],
        ["analyse", str(run)],
        ["export", str(run), str(mounted / "site")],
        ["perturb", str(run), *PERTURBING],
        ["push", str(run), str(mounted / "shared")],
        ["themes", str(run), "--csv", str(mounted / "labels.csv")],
    ):
        ended = server.run(command)
        assert ended.code == 2, (command, ended.said)
        assert "Traceback" not in ended.said, (command, ended.said)
        assert "ead-only" in ended.said, (command, ended.said)
    for command in (["themes", str(run)], ["verify", str(run)]):  # reading is still possible
        ended = server.run(command)
        assert ended.code == 0, (command, ended.said)
    shell(server, f"mount -o remount,rw {mounted}")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["collect", "decompose"])
def test_little_memory_ends_clearly_and_with_more_it_goes_on(
    server: Forkserver, collecting: list[str], collected: Path, command: str, tmp_path: Path
) -> None:
    """The address space is limited, from next to nothing upwards: a message or success, and nothing is spoilt."""
    run = tmp_path / "run"
    arguments = ["collect", str(run), *collecting, "--dim", "65536"]
    if command == "decompose":
        copy(collected, run)
        arguments = ["decompose", str(run), "--decomposition", "new", *DECOMPOSING, "--components", "40"]
    codes = []
    steps = (0, 2, 16, 64, 256, 2000) if cases(1, 2) == 1 else (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2000)
    for megabytes in steps:
        ended = server.run(arguments, memory_mb=megabytes)
        codes.append(ended.code)
        said = ended.said[-3000:]
        loader = ended.code == 127 and "cannot allocate memory for thread-local data: ABORT" in said
        if ended.code < 0 or loader:  # a library, or the C library's loader, that gives up itself; a kill, as it were
            # with next to nothing a thread that gets no memory while it starts leaves its starter waiting
            assert ended.code != -signal.SIGALRM or megabytes <= 16, (megabytes, "it hangs", said)
            continue
        assert ended.code in (0, 2), (megabytes, ended.code, said)
        if ended.code == 2:
            assert "not enough memory" in said or "does not fit in memory" in said, (megabytes, said)
            assert "Traceback" not in said
    print(codes)
    assert 2 in codes, "mostly it is Python that runs out of memory, and says so"
    assert codes[-1] == 0
    assert run_command(["verify", str(run), "--no-repair"])[0] == 0


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that torchrun has started."""
    return [process for process in psutil.Process(launcher.pid).children() if "npeff.cli" in process.cmdline()]


@pytest.mark.parametrize("victim", [0, 1][: cases(1, 2)])
def test_a_rank_that_dies_ends_all_and_the_rest_can_be_done_by_fewer(
    collected: Path, victim: int, tmp_path: Path
) -> None:
    run = copy(collected, tmp_path / "run")
    options = [
        "--components",
        "4",
        "--tolerance",
        "0",
        "--checkpoint-passes",
        "1",
        "--decomposition",
        "x",
        "--device",
        "cpu",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "npeff.cli"]
    state = run / "decompositions" / ".x.checkpoint" / "state.json"
    with subprocess.Popen(
        [*command, "decompose", str(run), *options, "--max-passes", "1000000"],
        env=os.environ | QUIET,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as launcher:
        while not state.exists():
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.05)
        processes = sorted(ranks_of(launcher), key=lambda process: int(process.environ()["RANK"]))
        assert len(processes) == 2
        processes[victim].send_signal(signal.SIGKILL)
        said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode != 0
    assert "SIGKILL" in said or "Signal 9" in said
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
    passes = read_object(state)["number"] + 3
    assert run_command(["decompose", str(run), *options, "--max-passes", str(passes)])[0] == 0
    found = load(run / "decompositions" / "x")
    again = copy(collected, tmp_path / "again")
    assert run_command(["decompose", str(again), *options, "--max-passes", str(passes)])[0] == 0
    expected = load(again / "decompositions" / "x")
    # sums over two ranks are rounded differently, and hundreds of passes add to that
    assert abs(float(found.residuals.mean()) - float(expected.residuals.mean())) < 1e-3
    assert bool(torch.isfinite(found.components).all())


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "-1"},
        {"WORLD_SIZE": "2", "RANK": "x", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ],
)
def test_odd_settings_of_ranks_are_named(environment: dict[str, str], server: Forkserver, collected: Path) -> None:
    ended = server.run(["decompose", str(collected), "--components", "2"], environment=environment)
    assert ended.code == 2, ended.said
    assert "WORLD_SIZE" in ended.said
    assert "Traceback" not in ended.said


def test_odd_settings_of_the_terminal_change_nothing(decomposed: Path, tmp_path: Path) -> None:
    """A process of its own, since many are read once: at the start."""
    run = copy(decomposed, tmp_path / "run")
    odd = {
        "MPLBACKEND": "module://nowhere",
        "COLUMNS": "many",
        "LINES": "-3",
        "TERM": "nonsense",
        "PYTHONIOENCODING": "ascii",
        "LANG": "xx_YY",
        "OMP_NUM_THREADS": "many",
        "XDG_CACHE_HOME": "",
        "NPEFF_CACHE": "/dev/null/cache",
    }
    done = subprocess.run(
        [sys.executable, "-m", "npeff.cli", "analyse", str(run)],
        env=os.environ | QUIET | odd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
