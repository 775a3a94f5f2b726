"""A run of a tiny model with shared keys and values, two answers, half of the examples held out."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.tasks.config import DataConfig
from tests.conftest import write_reviews


@pytest.fixture(autouse=True)
def one_thread():
    """The matrices are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run(tmp_path_factory, model_directory):
    folder = tmp_path_factory.mktemp("explain")
    path, reviews = str(folder / "run"), write_reviews(folder / "reviews.jsonl", 120)
    run = collect(
        CollectConfig(
            run=path,
            data=DataConfig(task="sst2", data=str(reviews)),
            model=ModelConfig(model=str(model_directory)),
            sketch=SketchConfig(dim=1024),
            storage="float32",
        )
    )
    for method in ("npeff", "clusters"):
        options = DecomposeConfig(
            run=path, decomposition=method, method=method, components=4, holdout=0.5, device="cpu"
        )
        decompose(options)
    return run


@pytest.fixture(scope="session")
def prepared(run):
    return prepare_run(run, "cpu")
