"""A run that the tests of `npeff icl` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.store.run import Run
from npeff.tasks.config import DataConfig


@pytest.fixture(scope="session")
def run(model_directory: Path, review_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """40 reviews of the tiny model, decomposed by two methods."""
    path = str(tmp_path_factory.mktemp("icl") / "run")
    config = CollectConfig(
        path,
        data=DataConfig(data=str(review_file)),
        model=ModelConfig(str(model_directory)),
        sketch=SketchConfig(dim=64),
        shard_examples=16,
    )
    collect(config)
    for method in ("npeff", "clusters"):
        decompose(DecomposeConfig(run=path, method=method, components=3))  # type: ignore[arg-type]
    return Run.open(path)
