"""What the results of a perturbation were made of: to continue them, and to show them beside their own components."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from npeff.decompose.base import Decomposition
from npeff.store.run import Run

# options that say where results go, how fast they come or what comes with them, not what they are
_NOT_IDENTITY = ("run", "label", "overwrite", "device", "memory_gb", "predict")


def identity(run: Run, decomposition: Decomposition, config: Mapping[str, Any]) -> str:
    """Digest of the run, the decomposition and those options of `config` that results depend on."""
    options = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    made_of = [run.fingerprint, run.manifest["examples_sha256"], _digest(decomposition), options]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _digest(decomposition: Decomposition) -> str:
    digest = hashlib.sha256(decomposition.components.contiguous().numpy().data)
    digest.update(decomposition.coefficients.contiguous().numpy().data)
    return digest.hexdigest()
