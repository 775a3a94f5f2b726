"""A run with several decompositions of a tiny model, some of its components perturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.perturb.config import PerturbConfig
from npeff.perturb.run import perturb
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from tests.conftest import write_reviews

HELD_OUT, IN_SAMPLE = "npeff-4-0-plain-lift-heldout", "npeff-4-0-reject-lift-paper"


@pytest.fixture(scope="session")
def perturbed(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Run:
    """Two seeds of 4 components, 8 of them, clusters; of npeff-4-0, 1 and 3 perturbed held-out, all four in-sample."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits for the first
    folder = tmp_path_factory.mktemp("perturbed")
    path, reviews = str(folder / "run"), write_reviews(folder / "reviews.jsonl", 120)
    run = collect(
        CollectConfig(
            run=path,
            data=DataConfig(task="sst2", data=str(reviews)),
            model=ModelConfig(model=str(model_directory)),
            sketch=SketchConfig(dim=1024, copies=2),
            storage="float32",
            shard_examples=16,
        )
    )
    for method, components, seed in (("npeff", 4, 0), ("npeff", 4, 1), ("npeff", 8, 0), ("clusters", 4, 0)):
        name = f"{method}-{components}-{seed}"
        decompose(
            DecomposeConfig(
                run=path,
                decomposition=name,
                method=method,  # type: ignore[arg-type]
                components=components,
                seed=seed,
                holdout=0.5,
                device="cpu",
            )
        )
    for direction, protocol, numbers in (("plain", "heldout", (1, 3)), ("reject", "paper", (0, 1, 2, 3))):
        perturb(
            PerturbConfig(
                run=path,
                decomposition="npeff-4-0",
                component=numbers,
                direction=direction,  # type: ignore[arg-type]
                protocol=protocol,  # type: ignore[arg-type]
                nulls=3,
                top=4,
                random=12,
                target_kl=1e-3,
                curve=(0.5, 1.0, 2.0),
                device="cpu",
            )
        )
    torch.set_num_threads(before)
    return run
