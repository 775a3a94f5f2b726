"""Processes that share each layer of a model give the rows of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from tests import tiny

WORKER = """
import sys
import torch
from npeff.collect.run import collect
from npeff.utils import distributed
from npeff.utils.configs import replace
from tests.collect.test_tensor_parallel import config_of

torch.set_num_threads(1)
config = config_of(*sys.argv[1:])
collect(replace(config, model=replace(config.model, tensor_parallel=2)))
distributed.stop()
"""


def config_of(run, model, reviews):
    return CollectConfig(
        str(run),
        data=DataConfig("sst2", data=str(reviews), limit=20),
        model=ModelConfig(str(model), device="cpu"),
        sketch=SketchConfig(dim=256),
        storage="float32",
        shard_examples=6,
        batch_tokens=80,
    )


def run_together(world, *arguments):
    """`world` processes with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_rows_are_those_of_one_process(tmp_path, review_file):
    """Two processes share a model, and two such pairs the examples."""
    model = tiny.save(tmp_path / "model", "llama")
    one = collect(config_of(tmp_path / "one", model, review_file))
    run_together(4, tmp_path / "split", model, review_file)
    split = Run.open(tmp_path / "split")
    assert split.manifest.identity == one.manifest.identity
    for kind in ("fisher", "gradient"):
        expected, found = (run.source(kind).read(0, 20) for run in (one, split))
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert prepare_run(split, "cpu").config.model.tensor_parallel is None


@pytest.mark.parametrize(
    ("family", "processes", "said"),
    [("llama", 2, "but there are 1 processes"), ("gpt2", 1, "has a plan for"), ("mixtral", 1, "has a plan for")],
)
def test_what_cannot_be_split(family, processes, said, tmp_path):
    model = tiny.save(tmp_path / "model", family)
    with pytest.raises(UserError, match=said):
        load_model(ModelConfig(str(model), device="cpu", tensor_parallel=processes))
