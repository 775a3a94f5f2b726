"""Cost of an analysis at the size of a large run: 100,000 examples × 2,048 components, synthetic coefficients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import entry

EXAMPLES, COMPONENTS, CLASSES = 100_000, 2048, 10


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    """Peak memory, and time in units of one m × C × C product."""
    # a process of its own: the peak of this one may be another benchmark's
    command = [sys.executable, "-m", "bench.analyse"]
    root = Path(__file__).resolve().parents[1]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    found = json.loads(output.splitlines()[-1])
    for name, bar in (("peak_gb", 4.0), ("gemm_ratio", 5.0)):
        yield entry(f"analyse.{name}", found[name], f"<= {bar:g}")


def measure() -> dict[str, float]:
    """Analyse synthetic coefficients, half of them zero as in a real decomposition, and time a product beside it."""
    import resource

    import numpy as np
    import torch

    from npeff.analyse import matching, tunings
    from npeff.decompose.config import FitConfig
    from npeff.decompose.methods import create

    random = np.random.default_rng(0)
    examples = tunings.Examples(
        tunings.Classes(random.integers(0, CLASSES, EXAMPLES), [str(i) for i in range(CLASSES)]),
        tunings.Classes(random.integers(0, CLASSES, EXAMPLES), [str(i) for i in range(CLASSES)]),
        np.arange(EXAMPLES),
        np.ones(EXAMPLES, bool),
    )
    coefficients = torch.empty(EXAMPLES, COMPONENTS)
    coefficients.normal_(generator=torch.Generator().manual_seed(0)).relu_()

    def product() -> float:
        begin = time.perf_counter()
        coefficients.T @ coefficients
        return time.perf_counter() - begin

    unit = product()
    begin = time.perf_counter()
    components = tunings.find_tunings([("positive", coefficients)], examples)
    tunings.rates(components, tunings.expected_rates(examples, 16))
    decomposition = create(FitConfig(components=COMPONENTS))
    decomposition.coefficients = coefficients
    _ = decomposition.energy, decomposition.used
    matching.strongest_correlations(coefficients, 8)
    seconds = time.perf_counter() - begin
    unit = min(unit, product())  # the machine may be busy with something else during one of them
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return {"peak_gb": peak, "gemm_ratio": seconds / unit, "seconds": seconds, "product_seconds": unit}


if __name__ == "__main__":
    print(json.dumps(measure()))
