"""Runs that go to others and come back: all of it, checked, or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from npeff.cli import main
from npeff.share.config import PullConfig, PushConfig
from npeff.share.run import INDEX, is_shared_name, pull, push, read_index
from npeff.store.rows import read_tensors
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.share.conftest import edit_index, files_of, refused


def test_a_run_comes_back_as_it_was_and_can_be_looked_at(made, shared, tmp_path, capsys):
    assert main(["pull", str(shared), str(tmp_path / "run")]) == 0
    assert "rows were not shared" in capsys.readouterr().out
    run = Run.open(tmp_path / "run")
    assert run.fingerprint == Run.open(made).fingerprint
    expected = {name: content for name, content in files_of(made).items() if not name.startswith("shards/")}
    assert files_of(run.path) == {**expected, "README.md": (shared / "README.md").read_bytes()}
    assert "annotations/npeff.jsonl" in expected
    assert main(["analyse", str(run.path)]) == 0
    assert main(["export", str(run.path), str(tmp_path / "site")]) == 0
    assert main(["themes", str(run.path)]) == 0
    assert "jokes" in capsys.readouterr().out


PERTURB = ["perturb", "--decomposition", "npeff", "--protocol", "paper", "--top", "4", "--random", "8"]


@pytest.mark.parametrize("command", [["decompose"], ["spectra"], PERTURB])
def test_what_needs_rows_says_so(shared, tmp_path, capsys, command):
    pull(PullConfig(str(shared), str(tmp_path / "run")))
    assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert "shared without its rows" in said
    assert "npeff verify" in said


def test_rows_that_were_not_shared_are_collected_again(made, shared, tmp_path):
    pulled = pull(PullConfig(str(shared), str(tmp_path / "run")))
    assert main(["verify", str(pulled.path)]) == 0
    for shard in Run.open(pulled.path).shards:
        before, after = (read_tensors(folder / shard.file, ["rows"])["rows"] for folder in (made, pulled.path))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    assert main(["decompose", str(pulled.path), "--components", "2"]) == 0


def test_with_rows_everything_works(made, tmp_path):
    push(PushConfig(str(made), str(tmp_path / "place"), rows=True))
    run = pull(PullConfig(str(tmp_path / "place"), str(tmp_path / "run")))
    assert [run.problem(shard) for shard in run.shards] == [None] * len(run.shards)
    assert main(["decompose", str(run.path), "--components", "2"]) == 0
    without = pull(PullConfig(str(tmp_path / "place"), str(tmp_path / "other")))
    shutil.rmtree(without.path / "shards")
    with pytest.raises(UserError, match="no rows to share"):
        push(PushConfig(str(without.path), str(tmp_path / "third"), rows=True))


def test_an_earlier_push_is_replaced_and_nothing_else(made, shared, copied, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(made, again)
    shutil.rmtree(again / "decompositions" / "clusters")
    push(PushConfig(str(again), str(copied)))
    assert not [name for name in files_of(copied) if "clusters" in name]
    other = tmp_path / "other"
    shutil.copytree(made, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["inputs_sha256"] = "0" * 64
    del manifest["seal"]
    manifest.pop("seal", None)
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="holds another run"):
        push(PushConfig(str(other), str(copied)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"other files \(thesis.tex\)"):
        push(PushConfig(str(made), str(tmp_path / "mine")))
    with pytest.raises(UserError, match="exists already"):
        pull(PullConfig(str(shared), str(tmp_path / "mine")))
    assert files_of(tmp_path / "mine") == {"thesis.tex": b"years of work"}


def test_a_damaged_run_is_not_shared(made, tmp_path):
    broken = Path(shutil.copytree(made, tmp_path / "run"))
    with (broken / "examples.parquet").open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(UserError, match="npeff verify"):
        push(PushConfig(str(broken), str(tmp_path / "place")))
    assert not (tmp_path / "place").exists()


def test_models_checkpoints_and_unfinished_work_stay_at_home(made, tmp_path):
    run = Path(shutil.copytree(made, tmp_path / "run"))
    secret = ["decompositions/half/tensors.safetensors", "decompositions/.x.checkpoint/state.safetensors"]
    secret += ["perturbations/p/model/00001/model.safetensors", "site/index.html", "notes.txt", "decompositions/a.pt"]
    for name in secret:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    (run / "decompositions/npeff/link.json").symlink_to("/etc/hostname")
    push(PushConfig(str(run), str(tmp_path / "place")))
    assert not files_of(tmp_path / "place").keys() & {*secret, "decompositions/npeff/link.json"}


def test_a_damaged_file_is_refused_and_a_second_pull_goes_on(shared, copied, tmp_path):
    file = copied / "decompositions" / "npeff" / "tensors.safetensors"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    refused(copied, tmp_path / "run", "tensors.safetensors .*damaged")
    file.write_bytes(whole)
    pull(PullConfig(str(copied), str(tmp_path / "run")))
    assert files_of(tmp_path / "run") == {n: c for n, c in files_of(shared).items() if n != INDEX}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_extra_missing_and_linked_files_are_refused(copied, tmp_path):
    (copied / "extra.py").write_text("print()")
    refused(copied, tmp_path / "run", r"does not list \(extra.py\)")
    (copied / "extra.py").unlink()
    table = copied / "examples.parquet"
    table.rename(tmp_path / "elsewhere")
    refused(copied, tmp_path / "run", "lacks examples.parquet")
    table.symlink_to(tmp_path / "elsewhere")
    refused(copied, tmp_path / "run", "is a link")


def test_a_pull_can_insist_on_what_was_pushed(made, tmp_path):
    digest = push(PushConfig(str(made), str(tmp_path / "place")))
    refused(tmp_path / "place", tmp_path / "run", "not what you asked for", sha256="0" * 64)
    pull(PullConfig(str(tmp_path / "place"), str(tmp_path / "run"), sha256=digest.upper()))


NAMES = ["../escape.json", "/escape.json", "decompositions/../../escape.json", "decompositions//x.json"]
NAMES += ["C:/escape.json", "decompositions\\x.json", ".ssh/config.json", "decompositions/.x/x.json", "site/index.html"]
NAMES += [
    "decompositions/x/code.py",
    "shards/00000.pt",
    "shards/../x.safetensors",
    "perturbations/p/model/1/config.json",
]
NAMES += ["decompositions/x/a\nb.json", "decompositions/" * 8 + "x.json", "", "decompositions/x./a.json"]


@pytest.mark.parametrize("name", NAMES)
def test_names_outside_a_run_are_refused(copied, tmp_path, name):
    assert not is_shared_name(name)
    edit_index(copied, lambda values: values["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    refused(copied, tmp_path / "run", "no file of a run")
    assert not (tmp_path / "escape.json").exists()


def test_names_that_are_one_on_some_systems_are_refused(shared):
    values = json.loads((shared / INDEX).read_text())
    values["files"]["decompositions/NPEFF/config.json"] = values["files"]["decompositions/npeff/config.json"]
    with pytest.raises(UserError, match="no file of a run"):
        read_index(json.dumps(values).encode(), "here")


def test_unknown_formats_and_broken_indexes_are_refused(copied, tmp_path):
    whole = (copied / INDEX).read_text()
    edit_index(copied, lambda values: values.update(format=99))
    refused(copied, tmp_path / "run", "Upgrade npeff")
    edit_index(copied, lambda values: values.update(format=1, run="0" * 64))
    refused(copied, tmp_path / "run", "another run than it holds")
    edit_index(copied, lambda values: values["files"]["manifest.json"].update(size="1"))
    refused(copied, tmp_path / "run", "is damaged")
    (copied / INDEX).write_text(whole[:50])
    refused(copied, tmp_path / "run", "is damaged")
    (copied / INDEX).unlink()
    refused(copied, tmp_path / "run", "not a shared run.*hf://owner/name")
