"""A small run without a model: random rows with planted components, and texts of your choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from npeff.decompose.config import FitConfig
from npeff.decompose.methods import create, kind_of
from npeff.store.run import Run
from npeff.store.schema import Manifest
from npeff.utils.configs import from_dict

LABELS = ["Negative", "Positive"]


def make_run(
    path: Path,
    texts: Sequence[str],
    labels: Sequence[int | None] | None = None,
    task_labels: Sequence[str] = LABELS,
    aside: Sequence[int] = (),
    seed: int = 0,
    shard_examples: int = 64,
) -> Run:
    """A finished run with these examples; predictions and rows are drawn with `seed`."""
    random = np.random.default_rng(seed)
    m, p = len(texts), 16
    planted = random.normal(size=(4, p))
    kind = random.integers(0, 4, m)
    rows = planted[kind] + 0.3 * random.normal(size=(m, p))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    usable = np.array([i not in aside for i in range(m)])
    # the model errs on examples of the first two kinds, so their components are tuned to labels but not predictions
    wrong = (kind < 2) & (random.uniform(size=m) < 0.25)
    predictions = np.where(wrong, 1 - kind % 2, kind % 2).astype(np.int32)
    given = [int(k) // 2 for k in kind] if labels is None else list(labels)
    names = list(task_labels) or [" Paris", " Rome"]
    inputs = pa.table(
        {
            "source_row": pa.array(range(m), pa.int64()),
            "text": pa.array(texts, pa.string()),
            "label": pa.array(given, pa.int32()),
            "answer": pa.array([None if task_labels else f"answer {i}" for i in range(m)], pa.string()),
        }
    )
    manifest = {
        "npeff": "0",
        "command": "collect",
        "config": {"model": {"model": "none"}},
        "identity": {"collected": ["fisher", "gradient", "activation"], "seed": seed},
        "shard_examples": shard_examples,
        "task": {
            "name": "synthetic",
            "prompt": "Review: {text}\nSentiment:",
            "answers": "tokens" if task_labels else "vocabulary",
            "labels": list(task_labels),
            "prefix": "",
        },
        "parameters": p,
    }
    run = Run.create(path, from_dict(Manifest, manifest), inputs)
    for shard in run.shards:
        kept = torch.from_numpy(rows[shard.start : shard.stop][usable[shard.start : shard.stop]]).half()
        every = torch.from_numpy(rows[shard.start : shard.stop]).half()
        run.write_shard(shard, {"rows": kept, "gradient": every, "activation": every.clone()})
    found = inputs
    for name, values in (
        ("prediction", predictions),
        ("probability", random.uniform(0.5, 1, m).astype(np.float32)),
        ("rank", usable.astype(np.int32)),
        ("pef_norm", usable.astype(np.float32)),
        ("kept", np.ones(m, np.float32)),
    ):
        found = found.append_column(name, pa.array(values))
    found = found.append_column("set_aside", pa.array([None if u else "not finite" for u in usable], pa.string()))
    found = found.append_column("prediction_text", pa.array([names[i] for i in predictions], pa.string()))
    run.finish(found)
    return Run.open(path)


def add_decomposition(run: Run, method: str = "npeff", components: int = 6, name: str | None = None) -> None:
    """Fit and save a decomposition of the run."""
    config = FitConfig(method=method, components=components)  # type: ignore[arg-type]
    decomposition = create(config).fit(run.source(kind_of(method)))
    decomposition.notes.run = run.fingerprint
    decomposition.save(run.path / "decompositions" / (name or method))
