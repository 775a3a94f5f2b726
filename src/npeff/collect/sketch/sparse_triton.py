"""Triton kernels of the sparse sketch, for CUDA devices.

Both make the picks on the fly, own the numbers that they write and add in a fixed order: no atomics, so that the same
input gives the same bits every time.
"""

import torch
import triton
import triton.language as tl

# as in npeff.collect.sketch.sparse; kernels see only module constants of this type
_STEP = tl.constexpr(0x9E3779B9)
_FIRST = tl.constexpr(0x21F0AAAD)
_SECOND = tl.constexpr(0x735A2D97)
# entries that a program of the adjoint owns, 16 rows of 32, and coordinates that it takes at a time
_HIGH, _LOW = tl.constexpr(16), tl.constexpr(32)
_CHUNK = 64


@triton.jit
def _pick(j, words, region, regions, length):  # type: ignore[no-untyped-def]
    """Entry in [0, length) and sign that coordinates j, uint32, take of a region: `sparse.draw_slots`."""
    first = tl.load(words + region).to(tl.uint32, bitcast=True)
    second = tl.load(words + regions + region).to(tl.uint32, bitcast=True)
    h = j * _STEP + first
    h = (h ^ (h >> 16)) * _FIRST
    h = ((h ^ (h >> 15)) + second) * _SECOND
    # slots length, ..., 2 length - 1 are those that are below zero where the hash is signed
    slot = tl.umulhi(h, tl.cast(2 * length, tl.uint32)).to(tl.int32)
    minus = slot >= length
    return tl.where(minus, slot - length, slot), tl.where(minus, -1.0, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    part, words, total, regions, length, weight, dim, batch, J: tl.constexpr, B: tl.constexpr
):
    """Sketch J coordinates of B examples.

    A program walks over the regions, as a thread of the paper's kernel does for one coordinate. The examples lie beside
    each other, so a pick is made once and read as one line for all.
    """
    j = tl.program_id(0) * J + tl.arange(0, J)
    b = tl.program_id(1) * B + tl.arange(0, B)
    inside = (j < dim)[:, None] & (b < batch)[None, :]
    counter = j.to(tl.uint32)
    acc = tl.zeros((J, B), dtype=tl.float32)
    for region in range(regions):
        entry, sign = _pick(counter, words, region, regions, length)
        row = region * length + entry
        acc += sign[:, None] * tl.load(part + row[:, None] * batch + b[None, :], mask=inside, other=0.0)
    place = total + j[:, None] * batch + b[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0.0) + weight * acc, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _lift(y, words, result, regions, length, weight, dim, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program owns 16 · 32 entries of a region and walks over the coordinates.

    Adding y_j to entry 32 h + l is the outer product of two one-hot vectors, of h and of l; over J coordinates that is
    a matrix product [16, J] × [J, 32], which is what a GPU does best. It replaces a scatter with atomic additions,
    whose result would depend on their order.
    """
    region, tile = tl.program_id(0), tl.program_id(1)
    high, low = tl.arange(0, _HIGH), tl.arange(0, _LOW)
    acc = tl.zeros((_HIGH, _LOW), dtype=tl.float32)
    for start in range(0, dim, J):
        j = start + tl.arange(0, J)
        entry, sign = _pick(j.to(tl.uint32), words, region, regions, length)
        value = sign * tl.load(y + j, mask=j < dim, other=0.0)
        place = entry - tile * _HIGH * _LOW  # outside of this tile: below zero or too high for any row
        rows = tl.where((place[None, :] >> 5) == high[:, None], value[None, :], 0.0)
        columns = ((place[:, None] & 31) == low[None, :]).to(tl.float32)
        acc = tl.dot(rows, columns, acc, input_precision="ieee")
    entry = tile * _HIGH * _LOW + high[:, None] * _LOW + low[None, :]
    tl.store(result + region.to(tl.int64) * length + entry, weight * acc, mask=entry < length)


def project(part: torch.Tensor, words: torch.Tensor, length: int, weight: float, total: torch.Tensor) -> None:
    """Add signed sums of regions.

    Args:
        part: Entries of the regions, [regions · length, B].
        words: Random words, [2, regions].
        length: Entries of a region.
        weight: What the sums are multiplied by.
        total: What they are added to, [p, B].
    """
    dim, batch = total.shape
    words, regions = words.contiguous(), words.shape[1]
    B = min(32, triton.next_power_of_2(batch))
    J = max(16, 128 // B)  # small, as p / J is the number of programs
    with torch.cuda.device_of(total):  # type: ignore[no-untyped-call]
        _project[triton.cdiv(dim, J), triton.cdiv(batch, B)](
            part, words, total, regions, length, weight, dim, batch, J=J, B=B
        )


def lift(y: torch.Tensor, words: torch.Tensor, length: int, weight: float, result: torch.Tensor) -> None:
    """Write the adjoint of `project` at y [p] to result [regions · length]."""
    words, regions = words.contiguous(), words.shape[1]
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        _lift[regions, triton.cdiv(length, _HIGH.value * _LOW.value)](
            y, words, result, regions, length, weight, len(y), J=_CHUNK
        )
