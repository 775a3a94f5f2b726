"""A collection with a tiny model."""

from __future__ import annotations

import pytest

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.models.config import ModelConfig
from npeff.tasks.config import DataConfig


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
