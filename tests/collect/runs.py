"""Configs of collections and their command lines, and what a run holds."""

from __future__ import annotations

from pathlib import Path

from npeff.collect.config import CollectConfig
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.files import sha256


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
