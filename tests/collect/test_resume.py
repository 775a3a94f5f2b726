"""Resume, ranks, repair, replay: the store does not depend on how it was made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npeff.cli import main
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.config import VerifyConfig
from npeff.store.run import Run
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.verify import verify
from tests.collect.runs import arguments, shard_hashes, with_run


def test_an_interrupted_run_continues_to_the_same_result(config, tmp_path, monkeypatch, capsys):
    whole = collect(with_run(config, tmp_path / "whole"))
    written = []
    original = Run.write_shard

    def stop_after_two(self, shard, tensors):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard)
        original(self, shard, tensors)

    monkeypatch.setattr(Run, "write_shard", stop_after_two)
    assert main(arguments(config)) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert len(shard_hashes(config.run)) == 2
    kept = {file: file.stat().st_mtime_ns for file in Path(config.run, "shards").glob("*.safetensors")}
    monkeypatch.setattr(Run, "write_shard", original)
    run = collect(config)
    assert shard_hashes(config.run) == shard_hashes(whole.path)
    assert run.table.equals(whole.table)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(Path(config.run).rglob("*.partial"))
    assert not list(Path(config.run, "shards").glob("*.json"))


def test_a_run_begun_with_the_former_default_sketch_is_continued_with_it(config, tmp_path, monkeypatch):
    former = to_dict(config.sketch) | {"sketch": "kron"}
    whole = collect(with_run(config, tmp_path / "whole", sketch=former))
    original = Run.write_shard

    def stop_after_one(self, shard, tensors):
        original(self, shard, tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "write_shard", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        collect(with_run(config, config.run, sketch=former))
    monkeypatch.setattr(Run, "write_shard", original)
    assert main(arguments(config)) == 0  # the command says nothing of a sketch
    assert shard_hashes(config.run) == shard_hashes(whole.path)
    assert prepare_run(Run.open(config.run)).collector.sketch.config.sketch == "kron"
    with pytest.raises(UserError, match=r"sketch.dim was"):
        collect(with_run(config, config.run, sketch=former | {"sketch": "blocks", "dim": 1024}))
    assert collect(with_run(config, tmp_path / "new")).manifest.config["sketch"]["sketch"] == "blocks"


def test_a_lost_table_of_an_unfinished_run_is_written_again(config, tmp_path, monkeypatch):
    whole = collect(with_run(config, tmp_path / "whole"))
    monkeypatch.setattr(Run, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        collect(config)
    monkeypatch.undo()
    Path(config.run, "examples.parquet").write_bytes(b"nonsense")
    assert collect(config).table.equals(whole.table)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_count_does_not_change_the_store(config, tmp_path, ranks):
    alone = collect(with_run(config, tmp_path / "alone"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "-m", "npeff.cli", *arguments(config)], check=True, env=environment, capture_output=True, timeout=300
    )
    run = Run.open(config.run)
    assert run.table.drop_columns(["pef_norm", "probability"]).equals(
        alone.table.drop_columns(["pef_norm", "probability"])
    )
    for kind in ("fisher", "gradient", "activation"):
        torch.testing.assert_close(run.source(kind).read(0, 40), alone.source(kind).read(0, 40), rtol=1e-3, atol=1e-4)


def test_batches_and_padding_do_not_change_the_rows(config, tmp_path):
    first = collect(with_run(config, tmp_path / "a", storage="float32"))
    for name, changes in (("b", {"batch_tokens": 30}), ("c", {"padding": "left"}), ("d", {"shard_examples": 40})):
        other = collect(with_run(config, tmp_path / name, storage="float32", **changes))
        a, b = first.source("fisher").read(0, 40), other.source("fisher").read(0, 40)
        assert (a - b).norm(dim=1).max() < 1e-4


def test_verify_names_and_mends_only_what_is_damaged(config, capsys):
    run = collect(config)
    before = shard_hashes(config.run)
    assert verify(VerifyConfig(config.run)) == []
    shards = Path(config.run, "shards")
    data = bytearray((shards / "00001.safetensors").read_bytes())
    data[-20] ^= 4
    (shards / "00001.safetensors").write_bytes(data)
    (shards / "00003.safetensors").unlink()
    untouched = (shards / "00000.safetensors").stat().st_mtime_ns
    assert main(["verify", config.run, "--no-repair"]) == 2
    said = capsys.readouterr().out
    assert "00001.safetensors has changed" in said
    assert "00003.safetensors is missing" in said
    assert verify(VerifyConfig(config.run)) == ["shards/00001.safetensors", "shards/00003.safetensors"]
    assert shard_hashes(config.run) == before
    assert (shards / "00000.safetensors").stat().st_mtime_ns == untouched
    (run.path / "examples.parquet").write_bytes(b"nonsense")
    assert verify(VerifyConfig(config.run)) == ["examples.parquet"]
    assert verify(VerifyConfig(config.run)) == []
    assert Run.open(config.run).table.equals(run.table)


def test_replay_makes_the_same_run(config, tmp_path):
    collect(config)
    assert main(["replay", config.run, "--to", str(tmp_path / "again")]) == 0
    assert shard_hashes(tmp_path / "again") == shard_hashes(config.run)
    assert main(["replay", config.run]) == 0


def test_dry_run_says_the_cost_and_writes_nothing(config, capsys):
    assert main([*arguments(config), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("40 examples", "time", "disk", "memory"))
    assert not Path(config.run).exists()


def test_model_and_data_may_have_moved(config, tmp_path, monkeypatch):
    """Both are known by their content; where they lie is no part of a run."""
    straight = shard_hashes(collect(with_run(config, tmp_path / "straight")).path)
    monkeypatch.setattr(Run, "finish", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        collect(config)
    monkeypatch.undo()
    data, model = tmp_path / "moved.jsonl", tmp_path / "moved-model"
    shutil.copyfile(str(config.data.data), data)
    shutil.copytree(config.model.model, model)
    moved = to_dict(config)
    moved["data"]["data"], moved["model"]["model"] = str(data), str(model)
    moved = from_dict(CollectConfig, moved)
    assert shard_hashes(collect(moved).path) == straight
    data.write_text(data.read_text(encoding="utf-8").replace("0 ", "1 ", 1), encoding="utf-8")
    with pytest.raises(UserError, match="the data themselves have changed"):
        collect(moved)
