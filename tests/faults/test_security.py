"""Strangers' files run nothing here."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from npeff import cli
from npeff.collect.config import CollectConfig
from npeff.models.config import TRUST, ModelConfig
from npeff.models.load import load_model
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, sha256, whole_file, write_json
from tests import tiny
from tests.faults.fuzzing import run_command
from tests.synthetic import add_decomposition, make_run

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
FORBIDDEN = {
    *("pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"),
    *("torch.load", "numpy.load", "np.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "tempfile.mktemp", "pd.read_pickle", "pandas.read_pickle"),
}


def names_used(path: Path) -> set[str]:
    """Modules imported and functions called by name in a source file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            for keyword in node.keywords:
                if keyword.arg in ("shell", "trust_remote_code") and isinstance(keyword.value, ast.Constant):
                    found.add(f"{keyword.arg}={keyword.value.value}")
    return found


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    assert len(SOURCES) > 80
    for path in SOURCES:
        assert not names_used(path) & {*FORBIDDEN, "shell=True", "trust_remote_code=True"}, path


class Mine:
    """What a hostile pickle does when it is read: it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_pickles_in_any_place_are_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    hostile = pickle.dumps(Mine(marker))
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=3, name="npeff")
    for file in sorted(path for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"):
        content = file.read_bytes()
        file.write_bytes(hostile)
        for arguments in (["verify", "--no-repair"], ["analyse"], ["decompose", "--components", "2"]):
            run_command([arguments[0], str(run.path), *arguments[1:]])
        file.write_bytes(content)
    for name in ("data.pkl", "data.jsonl", "data.parquet", "data.csv.gz", "task.yaml"):
        (tmp_path / name).write_bytes(hostile)
        model = ["--model", str(tmp_path / "absent")]
        option = "--task" if name.endswith("yaml") else "--data"
        assert run_command(["collect", str(tmp_path / "new"), *model, option, str(tmp_path / name)])[0] == 2
    assert not marker.exists()


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save(tiny.network("llama").state_dict(), model / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_model(ModelConfig(str(model), device="cpu"))
    marker = tmp_path / "it ran"
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Mine(marker)))
    assert run_command(["params", str(model)])[0] == 2
    assert not marker.exists()


CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM
os.mkdir({marker!r})
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path) -> tuple[Path, Path]:
    """A model that comes with Python code, and what that code makes when it runs."""
    model, marker = tiny.save(tmp_path / "model"), tmp_path / "it ran"
    (model / "own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (model / "config.json").write_text(json.dumps(config))
    return model, marker


def test_code_of_a_model_runs_only_where_the_user_asks_for_it(
    own_code: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, marker = own_code
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert run_command(["params", str(model)])[0] == 2
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=3, name="npeff")
    # as a stranger would make it: everything fits, and it asks for the model's code
    manifest = read_object(run.path / "manifest.json")
    manifest["config"] = to_dict(CollectConfig("x", model=ModelConfig(str(model), trust_remote_code=True)))
    write_json(run.path / "manifest.json", manifest, sealed=True)
    shard = run.path / "shards" / "00000.safetensors"
    commands = [
        ["probe", str(run.path), "a text"],
        ["perturb", str(run.path), "--top", "2", "--random", "4", "--protocol", "paper"],
    ]
    commands += [["replay", str(run.path)], ["replay", str(run.path), "--to", str(tmp_path / "again")]]
    for command in commands:
        code, said = run_command(command)
        assert code == 2
        assert TRUST in said, command
    shard.unlink()
    assert TRUST in run_command(["verify", str(run.path)])[1]
    assert not marker.exists()
    monkeypatch.setenv(TRUST, "another/model")
    assert TRUST in run_command(["replay", str(run.path)])[1]
    assert not marker.exists()


@pytest.mark.parametrize(
    "command", ["push", "pull", "export", "labels", "explore", "demo", "replay", ["collect"], None, 3]
)
def test_a_directory_from_elsewhere_cannot_choose_the_command(command: object, tmp_path: Path) -> None:
    """`replay` runs what a directory names: only what writes below the run."""
    folder = tmp_path / "run" / "decompositions" / "x"
    values = {
        "command": command,
        "config": {"run": "x", "csv": str(tmp_path / "written"), "out": str(tmp_path / "written")},
    }
    write_json(folder / "config.json", {"notes": {"replay": values}})
    assert run_command(["replay", str(folder)])[0] == 2
    assert not (tmp_path / "written").exists()


def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    """`--csv /dev/stdout` must not put a file in the place of a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="not a file"), whole_file(pipe) as temporary:
        temporary.write_text("x")
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_foreign_decomposition_is_not_taken_for_one_of_this_run(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", [f"text {i}" for i in range(40)])
    second = make_run(tmp_path / "second", [f"other {i}" for i in range(40)])
    add_decomposition(first, components=3, name="npeff")
    shutil.copytree(first.path / "decompositions", second.path / "decompositions")
    for command in (["analyse"], ["verify", "--no-repair"], ["export", str(tmp_path / "site")]):
        code, said = run_command([command[0], str(second.path), *command[1:]])
        assert code == 2
        assert "belongs to another run" in said
    assert sha256(first.path / "manifest.json") != sha256(second.path / "manifest.json")
    assert Run.open(second.path).fingerprint != first.fingerprint


def test_version_says_what_made_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip()
