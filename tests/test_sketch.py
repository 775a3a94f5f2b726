"""The three sketches: what each map is, its adjoint, its statistics, and that it never changes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from npeff.errors import UserError
from npeff.models import CapturedModule
from npeff.sketch import Sketch, SketchConfig, make_sketch, sparse
from npeff.sketch.base import random_bits, random_signs

KINDS = ("kron", "sparse", "dense")
CONFIGS = [
    SketchConfig("kron", dim=96),
    SketchConfig("kron", dim=64, copies=3, side=8),
    SketchConfig("sparse", dim=96),
    SketchConfig("dense", dim=96),
]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=["kron", "kron-copies", "sparse", "dense"])


PassThrough = tuple[list[CapturedModule], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def linear(name: str, d_out: int, d_in: int, parts: str = "weight bias", conv1d: bool = False) -> CapturedModule:
    """A captured layer of which `parts` are used."""
    module = Conv1D(d_out, d_in) if conv1d else nn.Linear(d_in, d_out)
    return CapturedModule(name, module, "weight" in parts, "bias" in parts)


def random_gradient(modules: Sequence[CapturedModule], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {module.name: torch.randn(module.shape, generator=generator) for module in modules}


def flat_rmatvec(sketch: Sketch, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for _, part in sketch.rmatvec(y)])


# --- what the maps are -----------------------------------------------------------------------------------------------


def kron_matrix(config: SketchConfig, module: CapturedModule) -> np.ndarray:
    """[p, n] written with np.kron: y = fold(Σ_c (A_c ⊗ B_c) g)."""
    side = config.side or 2 * math.ceil(math.sqrt(config.dim))
    (d_out, columns), seed = module.shape, config.sketch_seed
    cells = np.zeros((side**2, module.size))
    for copy in range(config.copies):
        A = random_signs(d_out * side, "kron", seed, module.name, "out", copy).numpy().reshape(d_out, side).T
        B = random_signs(columns * side, "kron", seed, module.name, "in", copy).numpy().reshape(columns, side).T
        cells += np.kron(A, B) / (side * math.sqrt(config.copies))
    if side**2 == config.dim:
        return cells
    folded = np.zeros((config.dim, module.size))
    order = random_bits(8 * side**2, "kron fold", seed).view("<u8").argsort(kind="stable")
    signs = random_signs(side**2, "kron fold signs", seed).numpy()
    for turn, cell in enumerate(order):
        folded[turn % config.dim] += signs[turn] * cells[cell]
    return folded


def sparse_matrix(config: SketchConfig, module: CapturedModule) -> np.ndarray:
    """[p, n] in plain Python integers, one region and one coordinate after the other."""
    matrix = np.zeros((config.dim, module.size))
    s = config.dim // 32
    regions = math.ceil(module.size / s)
    words = random_bits(8 * regions, "sparse", config.sketch_seed, module.name).view("<u4").tolist()
    for region in range(regions):
        first, second = words[2 * region : 2 * region + 2]
        length = min(s, module.size - region * s)
        for j in range(config.dim):
            h = (j * 0x9E3779B9 + first) % 2**32
            h = (h ^ (h >> 16)) * 0x21F0AAAD % 2**32
            h = ((h ^ (h >> 15)) + second) * 0x735A2D97 % 2**32
            minus, entry = divmod(h * 2 * length // 2**32, length)
            matrix[j, region * s + entry] = (-1) ** minus * math.sqrt(length / s / 32)
    return matrix


def dense_matrix(config: SketchConfig, module: CapturedModule) -> np.ndarray:
    """[p, n] from the signs of every gradient row."""
    d_out, columns = module.shape
    rows = [
        random_signs(columns * config.dim, "dense", config.sketch_seed, module.name, row).numpy().reshape(columns, -1)
        for row in range(d_out)
    ]
    return np.concatenate(rows).T / math.sqrt(config.dim)


MATRICES = {"kron": kron_matrix, "sparse": sparse_matrix, "dense": dense_matrix}


@every_config
@pytest.mark.parametrize("shape", [(5, 4), (3, 9), (1, 1), (2, 1)])
def test_map_is_the_matrix_written_independently(config: SketchConfig, shape: tuple[int, int]) -> None:
    module = linear("blocks.0.up", *shape)
    sketch = make_sketch(config, [module])
    expected = MATRICES[config.sketch](config, module)
    units = torch.eye(module.size).view(-1, *module.shape)
    columns = torch.stack([sketch.matvec({module.name: unit}) for unit in units], 1)
    assert columns.dtype == torch.float32
    np.testing.assert_allclose(columns.numpy(), expected, atol=1e-6)
    gradient = torch.randn(module.shape, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(
        sketch.matvec({module.name: gradient}), expected @ gradient.double().numpy().reshape(-1), atol=1e-5
    )


@every_config
def test_linear_and_modules_add_up(config: SketchConfig) -> None:
    modules = [linear("a", 5, 7), linear("b", 4, 3, conv1d=True), linear("c", 6, 2, "bias")]
    sketch = make_sketch(config, modules)
    g, h = random_gradient(modules, 1), random_gradient(modules, 2)
    mixed = sketch.matvec({name: 2 * g[name] - 3 * h[name] for name in g})
    torch.testing.assert_close(mixed, 2 * sketch.matvec(g) - 3 * sketch.matvec(h), atol=1e-4, rtol=0)
    alone = sum(sketch.matvec({name: part}) for name, part in g.items())
    torch.testing.assert_close(sketch.matvec(g), alone, atol=1e-4, rtol=0)
    assert not sketch.matvec({}).any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    dim=st.sampled_from([32, 96, 160, 512, 1024]),
    copies=st.integers(1, 3),
    shape=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    parts=st.sampled_from(["weight bias", "weight", "bias"]),
    conv1d=st.booleans(),
    seed=st.integers(0, 5),
)
def test_adjoint(kind: str, dim: int, copies: int, shape: tuple[int, int], parts: str, conv1d: bool, seed: int) -> None:
    module = linear("layer", *shape, parts, conv1d)
    sketch = make_sketch(SketchConfig(kind, dim=dim, copies=copies, sketch_seed=seed), [module])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    g, y = torch.randn(module.shape, generator=generator), torch.randn(dim, generator=generator)
    projected, lifted = sketch.matvec({"layer": g}), sketch.rmatvec_module(module, y)
    assert projected.shape == (dim,)
    assert lifted.shape == module.shape
    left, right = projected.double() @ y.double(), (g.double() * lifted.double()).sum()
    assert abs(left - right) <= 1e-5 * projected.norm() * y.norm() + 1e-6


@every_kind
def test_adjoint_at_a_size_like_the_real_one(kind: str) -> None:
    """p = 16192 divides nothing, its root is no whole number, and the last region is short; a small p for dense."""
    dim = 16192 if kind != "dense" else 992
    modules = [linear("a", 40, 60), linear("b", 30, 20, conv1d=True)]
    sketch = make_sketch(SketchConfig(kind, dim=dim), modules)  # type: ignore[arg-type]
    g = random_gradient(modules)
    y = torch.randn(dim, generator=torch.Generator().manual_seed(3))
    flat = torch.cat([part.reshape(-1) for part in g.values()])
    left, right = sketch.matvec(g) @ y, flat @ flat_rmatvec(sketch, y)
    assert abs(left - right) <= 1e-5 * flat.norm() * y.norm()


# --- collection ------------------------------------------------------------------------------------------------------


def collect(
    sketch: Sketch, inputs: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], examples: slice
) -> torch.Tensor:
    """What a forward and a backward pass do with a sketch, for some of the examples."""
    folded = {name: sketch.fold_input(module, inputs[name][examples]) for name, module in sketch.modules.items()}
    total = sketch.accumulator(len(next(iter(folded.values()))))
    for name, module in reversed(sketch.modules.items()):
        sketch.accumulate(module, deltas[name][examples], folded[name], total)
    return sketch.finish(total)


def convert(tensors: dict[str, torch.Tensor], to: torch.dtype | str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(to) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def pass_through() -> PassThrough:
    """Modules of every sort with inputs [5, 3, d_in] and output gradients [5, 3, d_out]."""
    modules = [
        linear("both", 5, 7),
        linear("weight", 6, 4, "weight"),
        linear("bias", 9, 3, "bias"),
        linear("conv1d", 4, 8, conv1d=True),
        linear("conv1d weight", 3, 11, "weight", conv1d=True),
    ]
    generator = torch.Generator().manual_seed(0)
    inputs, deltas = {}, {}
    for module in modules:
        weight = module.module.weight
        d_out, d_in = reversed(weight.shape) if module.transposed else weight.shape  # type: ignore[arg-type, misc]
        inputs[module.name] = torch.randn(5, 3, d_in, generator=generator)
        deltas[module.name] = torch.randn(5, 3, d_out, generator=generator)
    return modules, inputs, deltas


@every_config
def test_collection_projects_the_gradients_that_autograd_gives(config: SketchConfig, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    sketch = make_sketch(config, modules)
    rows = collect(sketch, inputs, deltas, slice(None))
    assert rows.shape == (5, config.dim)
    assert rows.dtype == torch.float32
    for example in range(5):
        gradient = {}
        for module in modules:
            parameters = tuple(module.module.parameters())
            output = module.module(inputs[module.name][example])
            weight, bias = torch.autograd.grad(output, parameters, deltas[module.name][example])
            gradient[module.name] = module.matrix(weight, bias)
        torch.testing.assert_close(rows[example], sketch.matvec(gradient), atol=2e-4, rtol=1e-5)


@every_config
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_batch_size_gives_the_same(config: SketchConfig, size: int, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    sketch = make_sketch(config, modules)
    whole = collect(sketch, inputs, deltas, slice(None))
    parts = [collect(sketch, inputs, deltas, slice(start, start + size)) for start in range(0, 5, size)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_activations(kind: str, dtype: torch.dtype, pass_through: PassThrough) -> None:
    """A number is rounded up to four times on its way: on both sides, in their product and in its sum."""
    modules, inputs, deltas = pass_through
    sketch = make_sketch(SketchConfig(kind, dim=96), modules)  # type: ignore[arg-type]
    inputs, deltas = convert(inputs, dtype), convert(deltas, dtype)
    rows = collect(sketch, inputs, deltas, slice(None))
    expected = collect(sketch, convert(inputs, torch.float32), convert(deltas, torch.float32), slice(None))
    assert rows.dtype == torch.float32
    assert (rows - expected).norm() <= 4 * torch.finfo(dtype).eps / 2 * expected.norm()


# --- statistics ------------------------------------------------------------------------------------------------------


def relative_variance(config: SketchConfig, gradient: torch.Tensor) -> float:
    """An upper bound of Var(‖y‖²) / ‖g‖⁴ over random draws of the map.

    dense   y_j are independent sums of signs: E y_j⁴ ≤ 3 E²(y_j²), so the variance is at most 2/p.
    sparse  y_j as well, and E y_j⁴ has a term of single regions more: Σ_r E z_r⁴ / 32² ≤ s Σ_i g_i⁴ / p².
    kron    each side is a dense map to m = `side` numbers for every row or column, so E‖y‖⁴ grows by 1 + 2/m twice;
            in the folding each pair of cells meets with probability ≤ 1/p under a random sign: by 1 + 2/p. The terms
            between independent copies are at most 2/m², less than what averaging the copies saves.
    """
    if config.sketch == "kron":
        side = config.side or 2 * math.ceil(math.sqrt(config.dim))
        return (1 + 2 / side) ** 2 * (1 + 2 / config.dim) - 1
    fourth = float((gradient**4).sum() / gradient.norm() ** 4) if config.sketch == "sparse" else 0.0
    return (2 + config.dim / 32 * fourth) / config.dim


@every_config
@pytest.mark.parametrize("shape", [(6, 7), (1, 1), (2, 1), (11, 16)])
def test_norm_is_kept_on_average(config: SketchConfig, shape: tuple[int, int]) -> None:
    """The mean over 300 seeds lies within five standard errors; (1, 1) is a region shorter than the others alone."""
    module, draws = linear("layer", *shape), 300
    gradient = random_gradient([module], 5)["layer"]
    norms = []
    for seed in range(draws):
        drawn = SketchConfig(config.sketch, config.dim, config.copies, config.side, sketch_seed=seed)
        norms.append(float(make_sketch(drawn, [module]).matvec({"layer": gradient}).square().sum()))
    mean = np.mean(norms) / float(gradient.square().sum())
    assert abs(mean - 1) <= 5 * math.sqrt(relative_variance(config, gradient) / draws) + 1e-6


def slots(words: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    steps = torch.from_numpy((np.arange(dim, dtype=np.uint32) * np.uint32(sparse.STEP)).view(np.int32))
    mixed = torch.empty(dim, words.shape[1], dtype=torch.int32)
    result = torch.empty(dim, words.shape[1], dtype=torch.int64)
    sparse.draw_slots(steps, words, length, mixed, torch.empty_like(mixed), result)
    return result


def assert_uniform(values: torch.Tensor, cells: int) -> None:
    """Pearson's χ² has mean df and variance 2 df; five deviations on both sides, as too even is not random either."""
    counts = torch.bincount(values.reshape(-1), minlength=cells).double()
    assert len(counts) == cells
    expected = counts.sum() / cells
    assert expected > 20
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), cells - 1
    assert abs(statistic - freedom) <= 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("length", "bins"), [(1, 2), (3, 6), (50, 10), (64, 8)])
def test_picks_are_uniform_and_independent(length: int, bins: int) -> None:
    """Sign and index are jointly uniform, alone and in pairs of near coordinates and of near regions."""
    dim, regions = 4096, 64
    words = random_bits(8 * regions, "a test of picks").view("<i4").astype(np.int32).reshape(2, regions)
    drawn = slots(torch.from_numpy(words), length, dim) + length
    assert_uniform(drawn, 2 * length)
    coarse = drawn * bins // (2 * length)
    for lag in (1, 2, 3, 16, 256, 2048):
        assert_uniform(coarse[lag:] * bins + coarse[:-lag], bins**2)
    for lag in (1, 2, 3, 32):
        assert_uniform(coarse[:, lag:] * bins + coarse[:, :-lag], bins**2)


# --- identity --------------------------------------------------------------------------------------------------------


@every_config
def test_other_seeds_and_other_modules_have_other_maps(config: SketchConfig) -> None:
    modules = [linear("a", 8, 8), linear("b", 8, 8)]
    gradient = random_gradient(modules)["a"]
    other = SketchConfig(config.sketch, config.dim, config.copies, config.side, sketch_seed=1)
    first = make_sketch(config, modules)
    a, b = first.matvec({"a": gradient}), first.matvec({"b": gradient})
    c = make_sketch(other, modules).matvec({"a": gradient})
    for one, two in ((a, b), (a, c), (b, c)):
        assert abs(torch.cosine_similarity(one, two, dim=0)) < 6 / math.sqrt(
            config.dim
        )  # independent directions in R^p
        assert not torch.allclose(one, two)
    # a module's map does not depend on which others are there
    assert torch.equal(make_sketch(config, modules[:1]).matvec({"a": gradient}), a)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIGS[0], [23.4, -5.9, 2.6, -22.0, 8.6]),
        (CONFIGS[1], [-10.248, -4.04145, 0.57735, -6.06218, -10.248]),
        (CONFIGS[2], [-8.05702, 18.3425, -4.37715, -16.1289, -3.07991]),
        (CONFIGS[3], [-2.44949, -1.42887, 14.9011, -5.30723, 23.6784]),
    ],
    ids=["kron", "kron-copies", "sparse", "dense"],
)
def test_the_maps_never_change(config: SketchConfig, expected: list[float]) -> None:
    """Stored projections are worthless under another map: these numbers may change only with the store's version."""
    module = linear("model.layers.0.mlp.up_proj", 5, 6)
    gradient = torch.arange(1.0, module.size + 1).view(module.shape)
    y = make_sketch(config, [module]).matvec({module.name: gradient})
    np.testing.assert_allclose(y[:5].tolist(), expected, rtol=1e-5)


def test_the_random_bits_never_change() -> None:
    assert random_bits(8, "npeff", 0, "layer").tobytes().hex() == "347ef9efe2d36353"
    assert random_signs(10, "npeff", 0, "layer").tolist() == [-1, -1, 1, 1, -1, 1, -1, -1, -1, 1]


# --- the sparse sketch alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 16, 100, 16385])
def test_sparse_needs_a_dimension_that_32_divides(dim: int) -> None:
    with pytest.raises(UserError, match="32"):
        SketchConfig("sparse", dim=dim)


def test_sparse_is_the_same_kept_or_made_again_and_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear("layer", 23, 31)
    config = SketchConfig("sparse", dim=160)
    gradient = random_gradient([module])
    y = torch.randn(160, generator=torch.Generator().manual_seed(1))
    results, memory = [], []
    for kept, block in ((2**28, 2**19), (0, 2**19), (0, 160 * 7), (2**28, 1)):
        monkeypatch.setattr(sparse, "KEPT_BYTES", kept)
        monkeypatch.setattr(sparse, "BLOCK_PICKS", block)
        sketch = make_sketch(config, [module])
        memory.append(sketch.memory())
        for _ in range(2):
            results.append((sketch.matvec(gradient), sketch.rmatvec_module(module, y)))
    for projected, lifted in results[1:]:
        torch.testing.assert_close(projected, results[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lifted, results[0][1], atol=1e-6, rtol=1e-5)
    assert memory[0] > memory[1]
    assert torch.equal(results[0][0], results[1][0])  # and to the last bit when nothing differs
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("batch", [1, 3])
def test_sparse_sums_rows_without_embedding_bag_too(batch: int) -> None:
    table = torch.randn(40, batch, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sparse._sum_rows(table, rows), table[rows].sum(1))


@every_kind
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_here_gives_the_same(kind: str, device: str, pass_through: PassThrough) -> None:
    modules, inputs, deltas = pass_through
    config = SketchConfig(kind, dim=96)  # type: ignore[arg-type]
    cpu, other = make_sketch(config, modules), make_sketch(config, modules, device)
    rows = collect(other, convert(inputs, device), convert(deltas, device), slice(None)).cpu()
    torch.testing.assert_close(rows, collect(cpu, inputs, deltas, slice(None)), atol=1e-4, rtol=1e-4)
    lifted = flat_rmatvec(other, rows[0])
    torch.testing.assert_close(lifted.cpu(), flat_rmatvec(cpu, rows[0]), atol=1e-4, rtol=1e-4)
    if kind != "sparse" or device == "cpu" or other.kernels is not None:  # type: ignore[attr-defined]
        assert torch.equal(lifted, flat_rmatvec(other, rows[0]))


INTERPRETED = """
import torch
from npeff.sketch import SketchConfig, make_sketch, sparse_triton
from tests.test_sketch import linear, random_gradient, slots

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
        sketch._add(module, gradients, total)
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
    root = Path(__file__).parents[1]
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

    from npeff.sketch import sparse_triton

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
