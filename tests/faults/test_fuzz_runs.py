"""Run directories from elsewhere: any value anywhere in their JSON, any tensor in their safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from npeff.analyse.run import read_examples
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.npeff import AlsState
from npeff.decompose.run import open_decomposition
from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import SEAL, parse_json, read_object, sha256, write_json
from npeff.verify import damaged_results
from tests.faults import cases
from tests.faults.fuzzing import changed, mutated, odd_value, only_user_errors, places, run_command, seeded
from tests.synthetic import add_decomposition, make_run

NAME = "npeff"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = make_run(tmp_path_factory.mktemp("odd") / "run", [f"text {i}" for i in range(80)])
    add_decomposition(made, components=3, name=NAME)
    Themes(made, NAME).add(0, "a label", "a note", who="Ada")
    return made


def read_all(path: Path) -> None:
    """What commands read of a run: everything."""
    run = Run.open(path)
    assert len(run.shards) < 10**6
    run.fingerprint  # noqa: B018
    read_examples(run)
    for kind in ("fisher", "gradient", "activation"):
        source = run.source(kind)
        assert source.read(0, len(source.ranks)).isfinite().all()
    decomposition = open_decomposition(run, NAME)
    assert decomposition.coefficients.isfinite().all()
    Themes(run, NAME).current()
    list(damaged_results(run))


def test_a_whole_run_is_read(run: Run) -> None:
    read_all(run.path)


def with_odd_values(run: Run, file: Path, count: int) -> None:
    """Put odd values at random places of a JSON file, with the hash that fits them, and read everything."""
    whole = read_object(file)
    everywhere = places(whole)
    random = seeded()
    try:
        for _ in range(count):
            new = changed(whole, random.choice(everywhere), odd_value(random), remove=random.random() < 0.2)
            try:
                write_json(file, new, sealed=True)
            except UnicodeEncodeError:  # half of a surrogate pair can be in no file
                continue
            with only_user_errors():
                read_all(run.path)
    finally:
        write_json(file, whole, sealed=True)


def test_odd_values_in_a_manifest(run: Run) -> None:
    with_odd_values(run, run.path / "manifest.json", cases(600, 3000))


def test_odd_values_in_a_decomposition(run: Run) -> None:
    with_odd_values(run, run.path / "decompositions" / NAME / "config.json", cases(300, 2000))


def test_mutated_json(run: Run) -> None:
    """Whatever happens to the bytes of a file: it is refused, or what is read is what was written."""
    random = seeded()
    files = [run.path / "manifest.json", run.path / "decompositions" / NAME / "config.json"]
    journal = run.path / "annotations" / f"{NAME}.jsonl"
    for number in range(cases(400, 3000)):
        file = files[number % len(files)]
        content = file.read_bytes()
        whole = read_object(file)
        file.write_bytes(mutated(content, random))
        try:
            with only_user_errors():
                read_all(run.path)
                if SEAL in parse_json(file):  # without, it is a file of a version that wrote none
                    assert read_object(file) == whole
        finally:
            file.write_bytes(content)
        content = journal.read_bytes()
        journal.write_bytes(mutated(content, random))
        try:
            with only_user_errors():
                Themes(run, NAME).current()
        finally:
            journal.write_bytes(content)


def test_mutated_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = seeded()
    checkpoint = Checkpoint(tmp_path / "checkpoint", "key")
    W, H = torch.rand(6, 2), torch.rand(2, 5)
    checkpoint.save(4, [W], {"H": H}, AlsState(beta=(0.25, 0.75)))
    files = [path for path in checkpoint.directory.iterdir() if path.is_file()]
    assert len(files) == 2
    for number in range(cases(300, 1000)):
        file = files[number % 2]
        content = file.read_bytes()
        file.write_bytes(mutated(content, random))
        saved = checkpoint.load(AlsState)
        if saved is not None:
            assert torch.equal(saved[0], W)
            assert torch.equal(saved[1]["H"], H)
            assert saved[2].beta == (0.25, 0.75)
        file.write_bytes(content)
    assert checkpoint.load(AlsState) is not None
    assert "is damaged, so the fit begins again" in capsys.readouterr().out


# --- tensors and tables that fit their hashes, but not the run --------------------------------------------------------


def resealed_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a decomposition, and its config so that the hash fits."""
    folder = path / "decompositions" / NAME
    tensors = load_file(folder / "tensors.safetensors")
    change(tensors)
    save_file(tensors, folder / "tensors.safetensors")
    config = read_object(folder / "config.json")
    write_json(folder / "config.json", config | {"sha256": sha256(folder / "tensors.safetensors")}, sealed=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("components"),
        lambda t: t.pop("residuals"),
        lambda t: t.update(components=t["components"][:2].clone()),
        lambda t: t.update(components=torch.rand(3)),
        lambda t: t.update(components=torch.rand(3, 4, 5)),
        lambda t: t.update(coefficients=t["coefficients"][:5].clone()),
        lambda t: t.update(coefficients=torch.rand(80)),
        lambda t: t.update(residuals=torch.rand(())),
        lambda t: t.update(components=t["components"].double()),
        lambda t: t.update(components=t["components"].int()),
        lambda t: t["components"].__setitem__((0, 0), float("nan")),
        lambda t: t["coefficients"].__setitem__((0, 0), float("inf")),
        lambda t: t.update(stranger=torch.rand(2)),
    ],
)
def test_odd_tensors_are_refused(run: Run, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    resealed_tensors(path, change)
    with pytest.raises(UserError, match=r"tensors\.safetensors|Decompose the run again"):
        open_decomposition(Run.open(path), NAME)
    assert run_command(["analyse", str(path)])[0] == 2
    assert run_command(["verify", str(path), "--no-repair"])[0] == 2


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("rows", lambda rows: rows[:-1]),
        ("rows", lambda rows: rows[:, :-1]),
        ("rows", lambda rows: rows[0]),
        ("rows", lambda rows: rows[None]),
        ("rows", lambda rows: rows.clone().fill_(float("nan"))),
        ("gradient", lambda rows: rows[1:]),
        ("activation", lambda rows: rows.new_zeros(0)),
    ],
)
def test_shards_that_do_not_fit_the_table_are_refused(
    run: Run, tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    manifest = read_object(path / "manifest.json")
    file = path / "shards" / "00001.safetensors"
    tensors = load_file(file)
    tensors[tensor] = change(tensors[tensor]).contiguous()
    save_file(tensors, file)
    manifest["shards"][1]["sha256"] = sha256(file)
    write_json(path / "manifest.json", manifest, sealed=True)
    method = {"rows": "npeff", "gradient": "gnpeff", "activation": "sae"}[tensor]
    code, said = run_command(
        ["decompose", str(path), "--method", method, "--components", "2", "--decomposition", "new"]
    )
    assert code == 2
    assert "00001.safetensors" in said or "not finite" in said


@pytest.mark.parametrize("column", ["text", "label", "prediction", "rank", "set_aside", "prediction_text"])
@pytest.mark.parametrize("change", ["missing", "texts", "numbers", "nothing", "negative", "twice"])
def test_tables_that_do_not_fit_the_run_are_refused(run: Run, tmp_path: Path, column: str, change: str) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    table = pq.read_table(path / "examples.parquet")
    place, m = table.column_names.index(column), len(table)
    new = {
        "texts": pa.array(["x"] * m),
        "numbers": pa.array(np.arange(m)),
        "nothing": pa.nulls(m),
        "negative": pa.array([-3] * m),
    }
    if change == "missing":
        table = table.remove_column(place)
    elif change == "twice":
        table = table.append_column(column, table[column])
    else:
        table = table.set_column(place, column, new[change])
    pq.write_table(table, path / "examples.parquet")
    manifest = read_object(path / "manifest.json")
    write_json(path / "manifest.json", manifest | {"examples_sha256": sha256(path / "examples.parquet")}, sealed=True)
    commands = [["analyse"], ["export", str(tmp_path / "site")], ["decompose", "--components", "2"]][: cases(1, 3)]
    for command, *options in commands:
        run_command([command, str(path), *options])
    with only_user_errors():
        read_all(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_headers_of_absurd_length(run: Run, tmp_path: Path, length: int) -> None:
    """With the hash that fits: whoever made the file wanted it so."""
    path = shutil.copytree(run.path, tmp_path / "run")
    for file, change in (
        (path / "shards" / "00000.safetensors", lambda m, h: m["shards"][0].update(sha256=h)),
        (path / "decompositions" / NAME / "tensors.safetensors", None),
    ):
        file.write_bytes(length.to_bytes(8, "little") + b'{"rows": {"dtype": "F16", "shape": [9], "data_offsets"')
        index = path / "manifest.json" if change else file.with_name("config.json")
        values = read_object(index)
        if change:
            change(values, sha256(file))
        else:
            values["sha256"] = sha256(file)
        write_json(index, values, sealed=True)
    assert run_command(["decompose", str(path), "--components", "2", "--decomposition", "new"])[0] == 2
    assert run_command(["analyse", str(path)])[0] == 2


def test_paths_in_a_manifest_are_not_followed(run: Run, tmp_path: Path) -> None:
    """Names of files are made from numbers; what a manifest calls them is not looked at."""
    path = shutil.copytree(run.path, tmp_path / "run")
    manifest = read_object(path / "manifest.json")
    for number, file in enumerate(("../../outside.safetensors", "/etc/passwd")):
        manifest["shards"][number]["file"] = file
    write_json(path / "manifest.json", manifest, sealed=True)
    read_all(path)
    for name in ("../outside", "/etc", "..", ".", "a/b"):
        assert run_command(["analyse", str(path), "--name", name])[0] == 2
        assert run_command(["themes", str(path), "--decomposition", name])[0] == 2


def test_links_out_of_a_run_are_read_only_if_they_lead_to_what_was_written(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    shard = path / "shards" / "00000.safetensors"
    moved = shutil.move(shard, tmp_path / "elsewhere.safetensors")
    shard.symlink_to(moved)
    read_all(path)
    shard.unlink()
    shard.symlink_to("/etc/hostname")
    assert run_command(["decompose", str(path), "--components", "2", "--decomposition", "new"])[0] == 2
    shard.unlink()
    shard.symlink_to(shard)
    assert run_command(["decompose", str(path), "--components", "2", "--decomposition", "new"])[0] == 2


def test_json_that_is_no_object(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    odd = [b"", b"[]", b"3", b'"x"', b"null", b"{}", b"\xff\xfe", b'{"format": 1e400}']
    odd += [b"[" * 100_000, b'{"a":' * 100_000]
    for file in (path / "manifest.json", path / "decompositions" / NAME / "config.json"):
        content = file.read_bytes()
        for value in odd:
            file.write_bytes(value)
            for command in (["analyse"], ["verify", "--no-repair"], ["themes"], ["replay"]):
                target = path if command != ["replay"] else file.parent
                assert run_command([command[0], str(target), *command[1:]])[0] == 2, (file, value[:20], command)
        file.write_bytes(content)
    assert json.loads((path / "manifest.json").read_text()) == parse_json(path / "manifest.json")
