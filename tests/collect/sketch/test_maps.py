"""What each map is, its adjoint, and that it never changes."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.base import random_signs
from npeff.collect.sketch.make import make_sketch
from npeff.models.select import CapturedModule
from npeff.utils.random import random_bits
from tests.collect.sketch.layers import (
    CONFIGS,
    KINDS,
    NAMES,
    every_config,
    every_kind,
    flat_rmatvec,
    linear,
    random_gradient,
)


def kron_matrix(config: SketchConfig, module: CapturedModule) -> np.ndarray:
    """[p, n] written with np.kron: y = fold(Σ_c (A_c ⊗ B_c) g)."""
    side = config.side or 2 * math.ceil(math.sqrt(config.dim))
    (d_out, columns), seed = module.shape, config.sketch_seed
    cells = np.zeros((side**2, module.size))
    for copy in range(config.copies):
        A = random_signs(d_out * side, "kron", seed, module.name, "out", copy).numpy().reshape(d_out, side).T
        B = random_signs(columns * side, "kron", seed, module.name, "in", copy).numpy().reshape(columns, side).T
        cells += np.kron(A, B) / (side * math.sqrt(config.copies))
    return folded(config, cells, side)


def blocks_matrix(config: SketchConfig, module: CapturedModule) -> np.ndarray:
    """[p, n] written with np.kron and a loop over the columns of A and B, each of which has one block."""
    side = config.side or 8 * math.ceil(2 * math.ceil(math.sqrt(config.dim)) / 8)
    width = side // 8
    cells = np.zeros((side**2, module.size))
    for copy in range(config.copies):
        factors = []
        for name, d in zip(("out", "in"), module.shape, strict=True):
            padded = 8 * math.ceil(d / 8)
            key = (config.sketch_seed, module.name, name, copy)
            signs = random_signs(padded * width, "blocks", *key).numpy().reshape(padded, width)
            order = (
                random_bits(8 * padded, "blocks order", config.sketch_seed, d, copy).view("<u8").argsort(kind="stable")
            )
            factor = np.zeros((side, d))
            for turn, column in enumerate(order):
                block = turn // (padded // 8)
                if column < d:
                    factor[block * width : (block + 1) * width, column] = signs[turn]
            factors.append(factor)
        cells += np.kron(*factors) / (width * math.sqrt(config.copies))
    return folded(config, cells, side)


def folded(config: SketchConfig, cells: np.ndarray, side: int) -> np.ndarray:
    """Sums [side², n] folded to [p, n]."""
    seed = config.sketch_seed
    if side**2 == config.dim:
        return cells
    result = np.zeros((config.dim, cells.shape[1]))
    order = random_bits(8 * side**2, "kron fold", seed).view("<u8").argsort(kind="stable")
    signs = random_signs(side**2, "kron fold signs", seed).numpy()
    for turn, cell in enumerate(order):
        result[turn % config.dim] += signs[turn] * cells[cell]
    return result


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


MATRICES = {"blocks": blocks_matrix, "kron": kron_matrix, "sparse": sparse_matrix, "dense": dense_matrix}


@every_config
@pytest.mark.parametrize("shape", [(5, 4), (3, 9), (1, 1), (2, 1), (10, 16)])
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
        (CONFIGS[4], [-5.33333, 3.66667, -10.0, 34.6667, -5.33333]),
        (CONFIGS[5], [-1.44338, -7.21688, 8.66025, -8.66025, -0.57735]),
    ],
    ids=NAMES,
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


@every_config
def test_a_part_that_is_all_of_it_gives_the_same_inner_products(config: SketchConfig) -> None:
    if config.copies > 1:
        return  # its part has one of the copies only
    modules = [linear("a", 7, 5), linear("b", 6, 9, "weight")]
    sketch, generator = make_sketch(config, modules), torch.Generator().manual_seed(0)
    vectors = torch.randn(3, config.dim, generator=generator)
    part, there = sketch.part(vectors)
    gradient = random_gradient(modules)
    torch.testing.assert_close(there @ part.matvec(gradient), vectors @ sketch.matvec(gradient), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["blocks", "kron"])
def test_a_part_estimates_inner_products(kind: Literal["blocks", "kron"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sketches of correlated gradients, with the error that a map of as many sums has."""
    monkeypatch.setattr("npeff.collect.sketch.kron.PART", 32)
    modules = [linear("a", 40, 30, "weight"), linear("b", 30, 50, "weight")]
    errors, norms = [], []
    for seed in range(12):
        sketch = make_sketch(SketchConfig(kind, dim=1024, copies=2, sketch_seed=seed), modules)
        first, other = random_gradient(modules, 2 * seed), random_gradient(modules, 2 * seed + 1)
        second = {name: matrix + other[name] for name, matrix in first.items()}
        size = sum(float(matrix.square().sum()) for matrix in first.values())
        part, there = sketch.part(sketch.matvec(first)[None])
        assert part.dim == 1024
        errors.append(float(there[0] @ part.matvec(second)) / size - 1)
        norms.append(float(part.matvec(first).square().sum()) / size - 1)
    assert abs(np.mean(errors)) < 0.25
    assert np.std(errors) < 0.6
    assert np.abs(norms).max() < 0.3
