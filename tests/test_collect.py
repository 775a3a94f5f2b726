"""Collection into a run directory: content, resume, ranks, repair, and what a user can get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from npeff.cli import main
from npeff.collect import CollectConfig, collect, collect_texts
from npeff.configs import from_dict, to_dict
from npeff.data import DataConfig
from npeff.directions import DirectionsConfig
from npeff.errors import UserError
from npeff.files import sha256
from npeff.models import ModelConfig, load_model
from npeff.sketch import SketchConfig
from npeff.store import Run
from npeff.verify import VerifyConfig, verify
from tests import tiny


@pytest.fixture
def config(tmp_path, model_directory, review_file):
    return CollectConfig(
        run=str(tmp_path / "run"),
        data=DataConfig(task="sst2", data=str(review_file)),
        model=ModelConfig(model=str(model_directory)),
        sketch=SketchConfig(dim=256),
        shard_examples=8,
        batch_tokens=200,
    )


def with_run(config, path, **changes):
    return from_dict(CollectConfig, to_dict(config) | {"run": str(path)} | changes)


def arguments(config, **changes):
    """The command line of a config."""
    values = {
        "task": config.data.task,
        "data": config.data.data,
        "model": config.model.model,
        "dim": config.sketch.dim,
        "shard-examples": config.shard_examples,
        "batch-tokens": config.batch_tokens,
        **changes,
    }
    return ["collect", config.run, *[str(part) for name, value in values.items() for part in (f"--{name}", value)]]


def shard_hashes(path):
    return {file.name: sha256(file) for file in sorted(Path(path, "shards").glob("*.safetensors"))}


# --- what is collected ---------------------------------------------------------------------------------------------


def test_a_run_holds_what_plain_autograd_finds(config, model_directory):
    run = collect(with_run(config, config.run, storage="float32"))
    assert run.table.num_rows == 40
    model = load_model(ModelConfig(model=str(model_directory)))
    rows, gradients, activations = run.source("fisher"), run.source("gradient"), run.source("activation")
    ids = [model.tokenizer(f" {label}").input_ids[0] for label in ("Negative", "Positive")]
    from npeff.models import select_parameters
    from npeff.sketch import make_sketch

    selection = select_parameters(model.network)
    sketch = make_sketch(config.sketch, selection.modules)
    weights = {n: p for m in selection.modules for n, p in m.module.named_parameters(prefix=m.name, recurse=False)}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    for i in (0, 7, 8, 39):
        text = run.table["text"][i].as_py()
        prompt = model.tokenizer(f"Review: {text}\nSentiment:", return_tensors="pt").input_ids
        output = model.network(prompt, output_hidden_states=True)
        log_p = output.logits[0, -1, ids].log_softmax(0)
        best = float(log_p.detach().max().exp())
        scores = []
        for y in range(2):
            found = dict(
                zip(weights, torch.autograd.grad(log_p[y], list(weights.values()), retain_graph=True), strict=True)
            )
            scores.append(
                sketch.matvec(
                    {
                        m.name: m.matrix(found[m.name + ".weight"], found.get(m.name + ".bias"))
                        for m in selection.modules
                    }
                )
            )
        fisher = sum(log_p[y].exp().detach() * torch.outer(s, s) for y, s in enumerate(scores))
        row = rows.read(i, i + 1)
        assert float(run.table["pef_norm"][i].as_py()) == pytest.approx(float(fisher.norm()), rel=1e-3)
        torch.testing.assert_close(row.T @ row, fisher / fisher.norm(), rtol=1e-3, atol=1e-5)
        prediction = int(log_p.argmax())
        assert run.table["prediction"][i].as_py() == prediction
        assert run.table["prediction_text"][i].as_py() == ("Negative", "Positive")[prediction]
        assert run.table["probability"][i].as_py() == pytest.approx(best, rel=1e-4)
        expected = scores[prediction] / scores[prediction].norm()
        torch.testing.assert_close(gradients.read(i, i + 1)[0], expected, rtol=1e-3, atol=1e-4)
        # the residual stream before the final norm
        normed = model.network.model.norm(activations.read(i, i + 1))
        torch.testing.assert_close(normed[0], output.hidden_states[-1][0, -1], rtol=1e-3, atol=1e-4)
        assert float(run.tensor("probabilities")[i, prediction]) == pytest.approx(best, rel=1e-4)


def test_half_precision_storage_and_reading_across_shards(config, tmp_path):
    half = collect(config)
    full = collect(with_run(config, tmp_path / "full", storage="float32"))
    a, b = half.source("fisher").read(5, 30), full.source("fisher").read(5, 30)
    assert a.dtype == torch.float32
    assert a.shape == (25, 256)
    assert (a - b).norm() < 1e-3 * b.norm()
    assert torch.equal(full.source("fisher").read(0, 40)[5:30], b)
    assert len(full.source("fisher").read(3, 3)) == 0


def test_ragged_ranks(config, tmp_path):
    task = tmp_path / "intents.yaml"
    task.write_text(
        yaml.safe_dump({"prompt": "Q: {text}\nIntent:", "answers": "suffixes", "labels": list(tiny.INTENTS)})
    )
    directions = DirectionsConfig("spectral:0.7")
    values = to_dict(config)
    values["data"]["task"] = str(task)
    values["directions"] = to_dict(directions)
    data = tmp_path / "unlabelled.tsv"
    data.write_text("text\n" + "\n".join(tiny.TEXTS))
    values["data"]["data"] = str(data)
    run = collect(from_dict(CollectConfig, values))
    source = run.source("fisher")
    assert len(set(source.ranks.tolist())) > 1
    assert run.table["label"].null_count == len(tiny.TEXTS)
    for i in range(len(tiny.TEXTS)):
        rows = source.read(i, i + 1)
        assert len(rows) == source.ranks[i]
        assert float((rows @ rows.T).norm()) == pytest.approx(1, abs=1e-3)
    assert len(source.read(0, 6)) == source.ranks.sum()
    assert np.all(run.table["kept"].to_numpy() >= 0.7)


@pytest.mark.parametrize("only", ["fisher", "gradient", "activation"])
def test_each_kind_can_be_collected_alone(config, only):
    kinds = {name: name == only for name in ("fisher", "gradient", "activation")}
    run = collect(with_run(config, config.run, **kinds))
    assert len(run.source(only).read(0, 40)) == 40
    for other in kinds:
        if other != only:
            with pytest.raises(UserError, match=f"--{other}"):
                run.source(other)


def test_vocabulary_answers(config, tmp_path):
    values = to_dict(config)
    values["data"] |= {"task": "triviaqa", "text_column": "text", "limit": 5}
    values["directions"] |= {"directions": "spectral:4", "rank": 2}
    run = collect(from_dict(CollectConfig, values))
    assert run.source("fisher").ranks.tolist() == [2] * 5
    assert run.tensor("top_tokens").shape == (5, 8)
    token = run.table["prediction"][0].as_py()
    assert int(run.tensor("top_tokens")[0, 0]) == token
    assert run.table["prediction_text"][0].as_py() == tiny.tokenizer().decode([token])


def test_many_directions_of_many_answers_make_smaller_batches(config, monkeypatch):
    from npeff import collector
    from npeff.collect import load_prompts, prepare

    values = to_dict(config)
    values["data"] |= {"task": "triviaqa", "text_column": "text"}
    values["directions"] |= {"directions": "projection:16"}
    prepared = prepare(from_dict(CollectConfig, values))
    _, prompts = load_prompts(prepared)
    vocabulary = prepared.collector.answer_model.count
    assert max(map(len, prepared.collector.batches(prompts, 1000))) > 3
    monkeypatch.setattr(collector, "DIRECTION_ENTRIES", 3 * 16 * vocabulary)
    batches = list(prepared.collector.batches(prompts, 1000))
    assert max(map(len, batches)) == 3
    assert sorted(i for batch in batches for i in batch) == list(range(40))


def test_texts_given_on_the_spot_equal_the_run(config):
    run = collect(with_run(config, config.run, storage="float32"))
    texts = run.table["text"].to_pylist()[:3]
    rows, found = collect_texts(run, texts)
    torch.testing.assert_close(rows.read(0, 3), run.source("fisher").read(0, 3), rtol=1e-3, atol=1e-4)
    assert found["prediction"].tolist() == run.table["prediction"].to_pylist()[:3]


def test_values_that_are_not_finite_are_set_aside(config, tmp_path, capsys):
    network = tiny.network("llama")
    tokenizer = tiny.tokenizer()
    bad = tokenizer(" mess").input_ids[0]
    network.model.embed_tokens.weight.data[bad] = float("nan")
    network.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.csv"
    data.write_text("text,label\na fine film,positive\nit is a mess,negative\none of the best,positive\n")
    values = to_dict(config)
    values["model"]["model"] = str(tmp_path / "model")
    values["data"]["data"] = str(data)
    # a tied head would spread the NaN to every example
    assert not network.config.tie_word_embeddings
    run = collect(from_dict(CollectConfig, values))
    assert run.table["set_aside"].to_pylist() == [None, "a value was not finite", None]
    assert run.source("fisher").ranks.tolist() == [1, 0, 1]
    assert bool(run.source("fisher").read(0, 3).isfinite().all())
    for kind in ("gradient", "activation"):
        rows = run.source(kind).read(0, 3)
        assert rows.shape[0] == 2
        assert bool((rows.norm(dim=1) > 0).all())
        assert torch.equal(run.source(kind).read(2, 3), rows[1:])
    assert "example 1" in capsys.readouterr().out


# --- resume, ranks, repair, replay -----------------------------------------------------------------------------------


def test_an_interrupted_run_continues_to_the_same_result(config, tmp_path, monkeypatch):
    whole = collect(with_run(config, tmp_path / "whole"))
    written = []
    original = Run.write_shard

    def stop_after_two(self, shard, tensors):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard)
        original(self, shard, tensors)

    monkeypatch.setattr(Run, "write_shard", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        collect(config)
    assert len(shard_hashes(config.run)) == 2
    kept = {file: file.stat().st_mtime_ns for file in Path(config.run, "shards").glob("*.safetensors")}
    monkeypatch.setattr(Run, "write_shard", original)
    run = collect(config)
    assert shard_hashes(config.run) == shard_hashes(whole.path)
    assert run.table.equals(whole.table)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(Path(config.run).rglob("*.partial"))
    assert not list(Path(config.run, "shards").glob("*.json"))


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


# --- what a user can get wrong ---------------------------------------------------------------------------------------


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
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main([*arguments(config), "--batch-token", "3"])
    assert ended.value.code == 2
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
    refuse(arguments(config, task=task), capsys, "'pay bill' = 'pay rent'", "suffixes")


def test_check_compares_all_rows_with_few_passes(config, tmp_path, monkeypatch):
    from npeff import check
    from npeff.capture import Capture

    data = tmp_path / "texts.tsv"
    data.write_text("text\n" + "\n".join(tiny.TEXTS))
    task = tmp_path / "intents.yaml"
    task.write_text(yaml.safe_dump({"prompt": "{text}:", "answers": "suffixes", "labels": list(tiny.INTENTS)}))
    asked = check.CheckConfig(config.model.model, str(task), 3, check.CheckedData(data=str(data)), sketch=config.sketch)
    assert check.check(asked).autograd_error < 1e-4
    original = Capture.rows

    def spoil(self, z, directions, sketch):
        rows = original(self, z, directions, sketch)
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
        "shards": [{"sha256": "0"}] * 5,
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
    from npeff.locks import only_one

    with only_one(Path(config.run)):
        refuse(arguments(config), capsys, "Another process")


def test_a_full_disk_loses_nothing(config, capsys, monkeypatch):
    """The second shard meets a full disk (/dev/full is one); with space again, the run continues."""
    from npeff import store

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
