import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

WORKER = """
import sys
import torch
from npeff.utils import distributed
from npeff.decompose.config import FitConfig, PaperConfig, SaeConfig
from npeff.decompose.methods import create
from npeff.decompose.checkpoint import Checkpoint
from tests.decompose.reference import planted
from safetensors.torch import save_file
from pathlib import Path

torch.set_num_threads(1)
distributed.start()
out = Path(sys.argv[1])
paper = PaperConfig(frozen_steps=5, joint_steps=10, frozen_rate=1e-3, joint_rate=1e-3)
sae = SaeConfig(top_k=2, sae_steps=10, sae_patience=10)
for name, options, each in (
    ("als", {"checkpoint_passes": 4}, 2),
    ("als-streamed", {"memory_gb": 0.0}, 2),
    ("paper", {"solver": "paper"}, 2),
    ("clusters", {"method": "clusters"}, 1),
    ("sae", {"method": "sae"}, 1),
    ("svd-gradients", {"method": "svd-gradients"}, 1),
):
    _, source = planted(0, examples=61, each=each)
    config = FitConfig(components=5, max_passes=8, tolerance=0, chunk=10, paper=paper, sae=sae, **options)
    fitted = create(config, Checkpoint(out / f".{name}", "key")).fit(source)
    tensors = {"components": fitted.components, "coefficients": fitted.coefficients, "residuals": fitted.residuals}
    save_file(tensors, out / f"{name}-{distributed.rank()}.safetensors")
distributed.stop()
"""


def start(world: int, out: Path) -> list[subprocess.Popen]:
    """`world` processes with the environment that torchrun gives them."""
    out.mkdir()
    (out / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    shared = {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(out / "worker.py"), str(out)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for world in (1, 2, 3):
        processes = start(world, folder / str(world))
        assert [process.wait(timeout=120) for process in processes] == [0] * world
    return folder


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["als", "als-streamed", "paper", "clusters", "sae", "svd-gradients"])
def test_ranks_agree_to_rounding(name, world, results):
    alone = load_file(results / "1" / f"{name}-0.safetensors")
    for rank in range(world):
        together = load_file(results / str(world) / f"{name}-{rank}.safetensors")
        for key, values in alone.items():
            assert float((together[key] - values).abs().max()) < 2e-3 * float(values.abs().max()), key
