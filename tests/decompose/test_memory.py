import os
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKER = """
import resource
import sys

import numpy as np
import torch

from npeff.decompose.config import FitConfig
from npeff.decompose.methods import create
from npeff.store.rows import ArrayRows

torch.set_num_threads(1)


class Stored:
    def __init__(self, path):
        self._path = path
        self.dim = np.load(path, mmap_mode="r").shape[1]
        self.ranks = np.ones(np.load(path, mmap_mode="r").shape[0], dtype=np.int64)

    def read(self, start, stop):
        # a fresh map each time: pages that were read do not stay in this process
        return torch.from_numpy(np.array(np.load(self._path, mmap_mode="r")[start:stop])).float()


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


source = Stored(sys.argv[1])
config = dict(max_passes=2, chunk=256, memory_gb=float(sys.argv[2]))
create(FitConfig(components=2, **config)).fit(ArrayRows(torch.randn(64, 64)))  # what torch itself takes
before = peak()
create(FitConfig(components=16, **config)).fit(source)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_store(tmp_path):
    m, p, C, chunk = 6_000, 8_192, 16, 256
    path = tmp_path / "rows.npy"
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(m, p))
    rng = np.random.default_rng(0)
    for start in range(0, m, 1000):
        rows[start : start + 1000] = rng.standard_normal((1000, p), dtype=np.float32)
    rows.flush()
    assert path.stat().st_size > 90e6
    stated = 4 * (2 * m * C + 5 * C * p + 3 * chunk * p) + 4 * (4 * C * p)
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", WORKER, str(path)]
    for memory_gb in (0.0, 0.05):
        done = subprocess.run(
            [*command, str(memory_gb)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        # twice what is stated, for the allocator; the rows as float32 would be 197 MB
        assert float(done.stdout) < 2 * (stated + 1e9 * memory_gb) < 190e6
