"""What a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from npeff.cli import main
from npeff.collect.run import collect
from npeff.config import VerifyConfig
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.verify import verify
from tests import tiny
from tests.collect.runs import arguments, shard_hashes, with_run


def refuse(arguments, capsys, *words):
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for word in words:
        assert word in said, said


def test_another_config_is_refused_not_mixed(config, capsys):
    collect(config)
    before = shard_hashes(config.run)
    refuse(arguments(config, **{"sketch-seed": 1}), capsys, "another config", "sketch_seed was 0 and is now 1")
    refuse(arguments(config, limit=10), capsys, "limit")
    assert shard_hashes(config.run) == before


def test_a_changed_task_file_is_refused(config, tmp_path, capsys):
    task = tmp_path / "task.yaml"
    values = {"prompt": "{text} It is", "answers": "tokens", "labels": ["bad", "good"], "label_map": {}}
    values["label_map"] = {"negative": "bad", "positive": "good"}
    task.write_text(yaml.safe_dump(values))
    assert main(arguments(config, task=task)) == 0
    fingerprint = Run.open(config.run).fingerprint
    Path(config.run, "shards", "00001.safetensors").unlink()
    examples = ({"text": "fine", "label": "good"},)
    for change in ({"prompt": "{text} This is"}, {"labels": ["good", "bad"]}, {"few_shot": list(examples)}):
        task.write_text(yaml.safe_dump(values | change))
        refuse(arguments(config, task=task), capsys, "another config", "task.")
        if "few_shot" not in change:  # the run keeps the prefix that it was collected with
            refuse(["verify", config.run], capsys, "no longer the one")
    task.write_text(yaml.safe_dump(values | {"prompt": "{text} This is"}))
    other = Path(config.run).with_name("other")
    assert main(["collect", str(other), *arguments(config, task=task)[2:]]) == 0
    assert Run.open(other).fingerprint != fingerprint


def test_changed_data_are_refused(config, tmp_path, capsys, review_file):
    data = tmp_path / "copy.jsonl"
    data.write_text(review_file.read_text())
    assert main(arguments(config, data=data)) == 0
    data.write_text(review_file.read_text().replace("0 ", "0 not ", 1))
    refuse(arguments(config, data=data), capsys, "data themselves have changed")


def test_wrong_arguments(config, capsys, tmp_path):
    refuse(arguments(config, data="nowhere.jsonl"), capsys, "nowhere.jsonl")
    refuse(arguments(config, **{"text-column": "body"}), capsys, "body", "text")
    refuse(arguments(config, task="sst3"), capsys, "sst3", "sst2")
    refuse(arguments(config, model="./nowhere"), capsys, "nowhere")
    refuse(arguments(config, device="quantum"), capsys, "quantum")
    refuse(arguments(config, directions="most"), capsys, "most", "spectral:8")
    refuse(arguments(config, exclude="nothing*"), capsys, "nothing*")
    refuse(["colect", "x"], capsys, "colect")
    # what is given as an argument is no option too: it would be taken and then ignored
    for command in (["check", "m", "--task", "sst2"], ["check", "m", "--limit", "3"], ["params", "m", "--model", "n"]):
        assert main(command) == 2
    refuse([*arguments(config), "--batch-token", "3"], capsys, "no option --batch-token", "--batch-tokens")
    refuse(
        [*arguments(config), "--batch-tokens", "3", "17"],
        capsys,
        "nothing takes the argument '17'",
        "--batch-tokens takes one value",
    )
    assert not Path(config.run).exists()


def test_a_text_longer_than_the_context(config, tmp_path, capsys):
    data = tmp_path / "long.csv"
    data.write_text("text\nshort\n" + "long " * 200 + "\n")
    refuse(arguments(config, data=data), capsys, "example 1", "row 3", "128", "--on-bad-example drop")
    drop = {"on-bad-example": "drop"}
    assert main(arguments(config, data=data, **drop)) == 0
    assert "1 examples with more than 128 tokens (row 3)" in capsys.readouterr().out
    assert Run.open(config.run).table["text"].to_pylist() == ["short"]
    Path(config.run, "examples.parquet").unlink()
    assert verify(VerifyConfig(config.run)) == ["examples.parquet"]
    data.write_text("text\n" + "long " * 200 + "\n")
    refuse(arguments(config, data=data, **drop), capsys, "No prompt fits")


def test_labels_that_begin_alike(config, tmp_path, capsys):
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump({"prompt": "{text}:", "answers": "tokens", "labels": ["pay bill", "pay rent"]}))
    data = tmp_path / "texts.tsv"
    data.write_text("text\n" + "\n".join(tiny.TEXTS))
    refuse(arguments(config, task=task, data=data), capsys, "'pay bill' = 'pay rent'", "suffixes")


def test_check_compares_all_rows_with_few_passes(config, tmp_path, monkeypatch):
    from npeff.collect import check
    from npeff.collect.capture import Capture
    from npeff.collect.config import CheckConfig, CheckedData

    data = tmp_path / "texts.tsv"
    data.write_text("text\n" + "\n".join(tiny.TEXTS))
    task = tmp_path / "intents.yaml"
    task.write_text(yaml.safe_dump({"prompt": "{text}:", "answers": "suffixes", "labels": list(tiny.INTENTS)}))
    asked = CheckConfig(config.model.model, str(task), 3, CheckedData(data=str(data)), sketch=config.sketch)
    assert check.check(asked).autograd_error < 1e-4
    original = Capture.rows

    def spoil(self, *arguments):
        rows = original(self, *arguments)
        rows[:, 2:3] *= 1.5
        return rows

    monkeypatch.setattr(Capture, "rows", spoil)
    with pytest.raises(UserError, match="differ from autograd"):
        check.check(asked)


def test_directories_that_cannot_be_used(config, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    full = with_run(config, tmp_path / "full")
    refuse(arguments(full), capsys, "thesis.tex")
    (tmp_path / "file").write_text("mine")
    refuse(arguments(with_run(config, tmp_path / "file")), capsys, "file")
    refuse(arguments(with_run(config, "/proc/npeff-run")), capsys, "/proc/npeff-run")


def test_a_store_of_a_newer_version(config, capsys):
    collect(config)
    manifest = Path(config.run, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    refuse(["verify", config.run], capsys, "newer npeff", "Upgrade")
    manifest.write_text("{")
    refuse(["verify", config.run], capsys, "manifest.json")
    manifest.write_text(json.dumps({"format": 1}))
    refuse(["verify", config.run], capsys, "damaged")


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("shards", []),
        ("shards", None),
        ("shards", [{}] * 5),
        ("examples", 8),
        ("examples", "40"),
        ("shard_examples", 0),
        ("identity", {}),
        ("task", 3),
        ("examples_sha256", None),
    ],
)
def test_an_edited_manifest_is_named(config, capsys, entry, value):
    path = Path(config.run, "manifest.json")
    path.parent.mkdir()
    whole = {"format": 1, "complete": True, "identity": {"collected": ["fisher"]}, "examples": 40, "shard_examples": 8}
    whole |= {
        "inputs_sha256": "0",
        "config": {},
        "task": {"labels": []},
        "shards": [{"file": f"{i}", "start": 8 * i, "stop": 8 * i + 8, "sha256": "0"} for i in range(5)],
        "examples_sha256": "0",
    }
    path.write_text(json.dumps(whole))
    Run.open(config.run)
    path.write_text(json.dumps(whole | {entry: value}))
    refuse(["verify", config.run], capsys, "manifest.json is damaged", entry.split("_")[0])


def test_an_edited_config_is_not_mixed_in(config, capsys):
    collect(config)
    Path(config.run, "shards", "00001.safetensors").unlink()
    path = Path(config.run, "manifest.json")
    manifest = json.loads(path.read_text())
    manifest["config"]["sketch"]["dim"] = 128
    path.write_text(json.dumps(manifest))
    refuse(["verify", config.run], capsys, "manifest.json is damaged or was edited")
    del manifest["seal"]  # as who edits it on purpose is told to do
    path.write_text(json.dumps(manifest))
    refuse(["verify", config.run], capsys, "sketch.dim was 256 and is now 128")
    assert not Path(config.run, "shards", "00001.safetensors").exists()


def test_two_writers(config, capsys):
    from npeff.utils.files import only_one

    with only_one(Path(config.run)):
        refuse(arguments(config), capsys, "Another process")


def test_a_full_disk_loses_nothing(config, capsys, monkeypatch):
    """The second shard meets a full disk (/dev/full is one); with space again, the run continues."""
    from npeff.store import run as store

    original = store.save_file

    def fill_up(tensors, path):
        if "00001" in str(path):
            with Path("/dev/full").open("wb") as device:
                device.write(b"0" * 10**6)
        original(tensors, path)

    monkeypatch.setattr(store, "save_file", fill_up)
    refuse(arguments(config), capsys, "disk is full", "00001")
    assert not list(Path(config.run).rglob("*.partial"))
    monkeypatch.setattr(store, "save_file", original)
    assert main(arguments(config)) == 0
    assert verify(VerifyConfig(config.run)) == []
