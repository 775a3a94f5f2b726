"""The sparse sketch alone: its blocks, and its Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch import sparse
from npeff.collect.sketch.make import make_sketch
from npeff.utils.errors import UserError
from tests.collect.sketch.layers import linear, random_gradient


@pytest.mark.parametrize("dim", [1, 16, 100, 16385])
def test_sparse_needs_a_dimension_that_32_divides(dim: int) -> None:
    with pytest.raises(UserError, match="32"):
        SketchConfig("sparse", dim=dim)


def test_sparse_is_the_same_kept_or_made_again_and_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear("layer", 23, 31)
    config = SketchConfig("sparse", dim=160)
    gradient = random_gradient([module])
    y = torch.randn(160, generator=torch.Generator().manual_seed(1))
    results, kept_picks = [], []
    for kept, block in ((2**28, 2**19), (0, 2**19), (0, 160 * 7), (2**28, 1)):
        monkeypatch.setattr(sparse, "KEPT_BYTES", kept)
        monkeypatch.setattr(sparse, "BLOCK_PICKS", block)
        sketch = make_sketch(config, [module])
        for _ in range(2):
            results.append((sketch.matvec(gradient), sketch.rmatvec_module(module, y)))
        kept_picks.append(bool(sketch._kept))  # type: ignore[attr-defined]
    for projected, lifted in results[1:]:
        torch.testing.assert_close(projected, results[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lifted, results[0][1], atol=1e-6, rtol=1e-5)
    assert kept_picks == [True, False, False, True]
    assert torch.equal(results[0][0], results[1][0])  # and to the last bit when nothing differs
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("batch", [1, 3])
def test_sparse_sums_rows_without_embedding_bag_too(batch: int) -> None:
    table = torch.randn(40, batch, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sparse._sum_rows(table, rows), table[rows].sum(1))


INTERPRETED = """
import torch
from npeff.collect.config import SketchConfig
from npeff.collect.sketch import sparse_triton
from npeff.collect.sketch.make import make_sketch
from tests.collect.sketch.layers import linear, random_gradient, slots

sparse_triton._CHUNK = 1024  # the interpreter takes its time for every turn of a loop

# the last region short or not; s = 1; a region of more than one tile
for dim, shape in ((96, (5, 7)), (96, (3, 4)), (32, (2, 2)), (544, (6, 9)), (16640, (13, 41))):
    module = linear("layer", *shape)
    sketch = make_sketch(SketchConfig("sparse", dim=dim), [module])
    batch = 1 if dim > 1000 else 5
    gradients = torch.stack([random_gradient([module], seed)["layer"] for seed in range(batch)])
    y = torch.randn(dim, generator=torch.Generator().manual_seed(1))
    results = []
    for sketch.kernels in (None, sparse_triton):
        total = sketch.accumulator(batch)
        sketch.add(module, gradients, total)
        results += [sketch.finish(total), sketch.rmatvec_module(module, y)]
    torch.testing.assert_close(results[2], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[3], results[1], atol=1e-5, rtol=1e-5)
    for span in sketch._spans(module, module.size):
        # region r of example r counts its entries from one: the sums are the picks themselves, exactly
        part = torch.zeros(span.regions, span.length, span.regions)
        part.diagonal(dim1=0, dim2=2).copy_(torch.arange(1, span.length + 1)[:, None])
        total = torch.zeros(dim, span.regions)
        sparse_triton.project(part.view(-1, span.regions), span.words, span.length, 1.0, total)
        drawn = slots(span.words, span.length, dim)
        assert torch.equal(total, torch.where(drawn < 0, -(drawn + span.length + 1), drawn + 1).float())
print("equal")
"""


def test_triton_kernels_equal_torch_in_the_interpreter() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("hip", "gfx942", 64)], ids=["cuda", "hip"])
def test_triton_kernels_compile_for_gpus(
    target: tuple[str, int | str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes code that the compiler refuses; the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from npeff.collect.sketch import sparse_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # the default; saying so avoids a warning
    types = {"part": "*fp32", "words": "*i32", "total": "*fp32", "y": "*fp32", "result": "*fp32", "weight": "fp32"}
    for kernel, sizes in (
        (sparse_triton._project, {"J": 16, "B": 32}),
        (sparse_triton._project, {"J": 128, "B": 1}),
        (sparse_triton._lift, {"J": 64}),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
        source = ASTSource(kernel, signature, constexprs={(names.index(name),): size for name, size in sizes.items()})
        code = triton.compile(source, target=GPUTarget(*target)).asm
        assert "atom" not in code.get("ptx", "")  # deterministic
