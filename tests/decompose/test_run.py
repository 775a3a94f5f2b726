import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from npeff import cli
from npeff.decompose.config import DecomposeConfig, SaeConfig, suggest_components
from npeff.decompose.methods import load
from npeff.decompose.run import decompose, fit_key, open_decomposition
from npeff.store.run import Run
from npeff.store.schema import Manifest
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError
from tests.decompose.reference import planted

SHARD = 40


def make_run(path, seed=0, collected=("fisher", "gradient", "activation"), examples=100):
    """A finished run of planted rows, of which example 3 was set aside."""
    U, source = planted(seed, examples=examples, dim=32)
    inputs = pa.table(
        {
            "source_row": pa.array(range(examples)),
            "text": pa.array([f"text {i}" for i in range(examples)]),
            "label": pa.array([i % 2 for i in range(examples)]),
        }
    )
    manifest = {
        "identity": {"collected": list(collected), "seed": seed},
        "config": {},
        "shard_examples": SHARD,
        "task": {"labels": ["no", "yes"]},
    }
    run = Run.create(path, from_dict(Manifest, manifest), inputs)
    rank = np.full(examples, 2)
    rank[3] = 0
    for shard in run.shards:
        inside = [i for i in range(shard.start, shard.stop) if rank[i]]
        rows = torch.cat([source.read(i, i + 1) for i in inside])
        gradient = torch.randn(shard.stop - shard.start, 32, generator=torch.Generator().manual_seed(shard.number))
        run.write_shard(
            shard, {"rows": rows.half(), "gradient": gradient.half(), "activation": gradient[:, :8].clone()}
        )
    table = inputs.append_column("rank", pa.array(rank)).append_column(
        "set_aside", pa.array(["not finite" if i == 3 else None for i in range(examples)], pa.string())
    )
    run.finish(table.append_column("prediction", pa.array([int(i % 3 == 0) for i in range(examples)])))
    return Run.open(path), U


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")[0]


def test_decomposes_a_stored_run(tmp_path, capsys):
    run, U = make_run(tmp_path / "run")
    fitted = decompose(DecomposeConfig(run=str(run.path), components=8, chunk=30))
    assert ((U @ fitted.components.T).abs().amax(dim=1) > 0.95).sum() >= 7
    said = capsys.readouterr().out
    assert "The loss per example went from" in said
    directory = run.path / "decompositions" / "npeff-8-0"
    assert torch.equal(load(directory, run.fingerprint).coefficients, fitted.coefficients)
    assert not list(run.path.glob("decompositions/.*checkpoint"))
    decompose(DecomposeConfig(run=str(run.path), components=8, chunk=30))
    assert "already there" in capsys.readouterr().out


def test_a_name_is_not_taken_twice(run):
    config = {"run": str(run.path), "decomposition": "mine", "max_passes": 2}
    decompose(DecomposeConfig(components=4, **config))
    with pytest.raises(UserError, match=r"made with other options \(components 4, not 5\).*--overwrite"):
        decompose(DecomposeConfig(components=5, **config))
    assert len(decompose(DecomposeConfig(components=5, overwrite=True, **config)).components) == 5


def test_more_passes_go_on_where_fewer_ended(run, capsys):
    config = {"run": str(run.path), "components": 4, "tolerance": 0, "checkpoint_passes": 3}
    short = decompose(DecomposeConfig(max_passes=3, **config))
    assert "allow more passes" in capsys.readouterr().out
    longer = decompose(DecomposeConfig(max_passes=6, **config))
    assert [step.loss for step in longer.history.steps[:4]] == [step.loss for step in short.history.steps[:4]]
    assert len(longer.history.steps) == 8


def test_held_out_examples_get_coefficients_and_a_loss(run):
    fitted = decompose(DecomposeConfig(run=str(run.path), components=8, holdout=0.3))
    held_out = fitted.notes.held_out
    assert len(held_out) == 30
    assert fitted.coefficients.shape == (100, 8)
    kept = [i for i in held_out if i != 3]
    assert fitted.notes.held_out_loss == pytest.approx(float(fitted.residuals[kept].mean()), rel=1e-5)
    assert fitted.notes.held_in_loss < fitted.notes.held_out_loss + 0.05


def test_refuses_a_decomposition_of_another_run(tmp_path):
    one, two = make_run(tmp_path / "one")[0], make_run(tmp_path / "two", seed=1)[0]
    decompose(DecomposeConfig(run=str(one.path), components=4, max_passes=2))
    (two.path / "decompositions").mkdir()
    (one.path / "decompositions" / "npeff-4-0").rename(two.path / "decompositions" / "npeff-4-0")
    with pytest.raises(UserError, match="belongs to another run"):
        open_decomposition(two)
    with pytest.raises(UserError, match="has no finished decomposition"):
        open_decomposition(one)
    with pytest.raises(UserError, match="no finished decomposition 'x': it has npeff-4-0"):
        open_decomposition(two, "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--components", "200"],
            "200 components need as many examples; there are 99 (and 1 that is zero). Take fewer, for example 8.",
        ),
        (["--method", "sae"], "Collect a run with --activation"),
        (["--method", "clusters"], "Collect a run with --gradient"),
        (["--holdout", "1.5"], "holdout is a share"),
        (["--decomposition", "../x"], "cannot be the name of a directory"),
        (["--components", "0"], "--components is 0; it should be at least 1"),
    ],
)
def test_mistakes_end_with_code_2(arguments, message, tmp_path, capsys):
    run, _ = make_run(tmp_path / "run", collected=("fisher",))
    assert cli.main(["decompose", str(run.path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command_line_knows_every_option(run):
    arguments = "--method npeff --components 4 --solver paper --joint-steps 3 --frozen-steps 2 --top-k 3 --seed 1"
    assert cli.main(["decompose", str(run.path), *arguments.split()]) == 0
    config = load(run.path / "decompositions" / "npeff-4-1").config
    assert (config.solver, config.paper.joint_steps, config.sae.top_k) == ("paper", 3, 3)


def test_config_is_readable_without_tensors(run):
    decompose(DecomposeConfig(run=str(run.path), components=4, max_passes=2))
    values = json.loads((run.path / "decompositions" / "npeff-4-0" / "config.json").read_text())
    assert values["components"] == [4, 32]
    assert values["notes"]["run"] == run.fingerprint
    assert values["config"]["components"] == 4


@pytest.mark.parametrize(
    ("examples", "expected"), [(1, 1), (2, 1), (5, 2), (40, 8), (99, 8), (150, 10), (1024, 68), (60_000, 512)]
)
def test_the_number_of_components_follows_from_the_examples(examples, expected):
    assert suggest_components(examples, "npeff", dim=6) == expected
    assert suggest_components(examples, "svd-activations", dim=6) == min(expected, 6)


def test_a_number_that_is_not_given_is_chosen_said_and_saved(run, capsys):
    fitted = decompose(DecomposeConfig(run=str(run.path), max_passes=2))
    assert "8 components for 99 examples: --components takes another number." in capsys.readouterr().out
    directory = run.path / "decompositions" / "npeff-8-0"
    assert load(directory).config == fitted.config
    assert fitted.config.components == 8
    values = json.loads((directory / "config.json").read_text())
    assert values["notes"]["replay"]["config"]["components"] == 8
    assert values["notes"]["replay"]["config"]["decomposition"] == "npeff-8-0"
    held = decompose(DecomposeConfig(run=str(run.path), decomposition="held", max_passes=2, holdout=0.9))
    assert held.config.components == 5
    assert cli.main(["replay", str(directory)]) == 0
    assert "is already there" in capsys.readouterr().out


def test_the_old_name_of_an_option_is_understood_in_files_only(run, capsys):
    decompose(DecomposeConfig(run=str(run.path), components=3, decomposition="old", max_passes=2))
    file = run.path / "decompositions" / "old" / "config.json"
    values = json.loads(file.read_text())
    values["notes"]["replay"]["config"]["name"] = values["notes"]["replay"]["config"].pop("decomposition")
    del values["seal"]
    file.write_text(json.dumps(values))
    capsys.readouterr()
    assert cli.main(["replay", str(file.parent)]) == 0
    assert "is already there" in capsys.readouterr().out
    assert cli.main(["decompose", str(run.path), "--name", "old"]) == 2
    assert "--name is now --decomposition" in capsys.readouterr().err


def test_what_another_command_needed_becomes_wanted_for_its_own_sake(run):
    config = DecomposeConfig(run=str(run.path), components=3, max_passes=2)
    decompose(config, made_for="compare")
    directory = run.path / "decompositions" / "npeff-3-0"
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert load(directory).notes.made_for == "compare"
    decompose(config, made_for="stability")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    decompose(config)
    assert load(directory).notes.made_for is None
    assert all((directory / name).read_bytes() == old for name, old in before.items() if name != "config.json")


def test_a_decomposition_of_0_1_0_is_not_made_again(tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "faults" / "data" / "run-format-1", path)
    run = Run.open(path)
    old = open_decomposition(run)
    assert (old.notes.holdout, old.notes.held_out, old.notes.made, old.notes.made_for) == (0.0, [], "", None)
    key = fit_key(run, old.config, 0.0)
    assert (
        key == "d3c64f2fb28e56fec0db0a4e1df52ebe56650eca5086632f0af1c19d06beca5c"
    )  # checkpoints of 0.1.0 are continued under this key
    again = decompose(DecomposeConfig(run=str(path), decomposition="npeff", components=2))
    assert "is already there" in capsys.readouterr().out
    assert torch.equal(again.coefficients, old.coefficients)


def test_the_default_k_of_the_sae_may_change(run, capsys):
    """What was made when the default was another is not refused, and k is saved as a number."""
    config = DecomposeConfig(run=str(run.path), method="sae", components=32, holdout=0.0, sae=SaeConfig(sae_steps=20))
    assert decompose(config).config.sae.top_k == 2
    assert load(run.path / "decompositions" / "sae-32-0").notes.replay.config["sae"]["top_k"] == 2
    old = replace(config, sae=SaeConfig(top_k=9, sae_steps=20), decomposition="old")
    decompose(old)
    assert decompose(replace(old, sae=config.sae)).config.sae.top_k == 9
    assert "is not made again" in capsys.readouterr().out
    with pytest.raises(UserError, match="top_k 9, not 8"):
        decompose(replace(old, sae=SaeConfig(top_k=8, sae_steps=20)))
