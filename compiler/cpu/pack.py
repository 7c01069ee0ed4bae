"""weights.bin: every weight of a program in the layout its kernel reads, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.compiler.cpu.program import Program, Weight
from plankiln.compiler.formats import NUMPY, Element
from plankiln.quantize.formats import Blocks, Fp8Weight

ALIGNMENT = 64


def weight_offsets(program: Program) -> tuple[dict[Weight, int], int]:
    """Byte offset of each weight in weights.bin (in the program's order, cache-line aligned), and the file's size."""
    offsets: dict[Weight, int] = {}
    end = 0
    for weight in program.weights:
        offsets[weight] = end
        end += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def pack_tiles(rows: NDArray[Any], element: Element) -> NDArray[Any]:
    """[n, k] → [ceil(n/16), ceil(k/pair), 16, pair], zeros beyond n and k (plugins/cpu/linear.h)."""
    pair = 4 // NUMPY[element].itemsize
    rows = _padded(rows, 16, pair)
    tiles, steps = rows.shape[0] // 16, rows.shape[1] // pair
    return np.ascontiguousarray(rows.reshape(tiles, 16, steps, pair).transpose(0, 2, 1, 3))


def pack_blocks(blocks: Blocks) -> NDArray[np.uint8]:
    """[n, k] → [ceil(n/32), k/group, bytes of a group of 32 rows], zeros beyond n (plugins/cpu/quantized.h)."""
    group = blocks.format.group
    q = _padded(blocks.unsigned(), 32)
    tiles, groups = q.shape[0] // 32, q.shape[1] // group
    steps = q.reshape(tiles, 2, 16, groups, group // 4, 4).transpose(0, 3, 4, 1, 2, 5)
    if blocks.format.bits == 4:
        steps = steps[:, :, 0::2] | steps[:, :, 1::2] << 4
    fields = [steps.reshape(tiles, groups, -1)]
    for halves in (blocks.scale, blocks.minimum):
        if halves is not None:
            lanes = _padded(halves, 32).reshape(tiles, 32, groups).transpose(0, 2, 1)
            fields.append(np.ascontiguousarray(lanes).view(np.uint8))
    return np.concatenate(fields, -1)


def pack_fp8(weight: Fp8Weight) -> NDArray[np.uint8]:
    """[n, k] → [ceil(n/16), k, 16] e4m3, then the rows' float32 scales, zeros beyond n (plugins/cpu/linear.h)."""
    q = _padded(weight.q.view(np.uint8), 16)
    tiles = q.reshape(-1, 16, q.shape[1]).transpose(0, 2, 1)
    return np.concatenate([tiles.reshape(-1), _padded(weight.scale[:, None], 16).reshape(-1).view(np.uint8)])


def _padded(rows: NDArray[Any], row_unit: int, column_unit: int = 1) -> NDArray[Any]:
    n, k = (-(-size // unit) * unit for size, unit in zip(rows.shape, (row_unit, column_unit), strict=True))
    if rows.shape == (n, k):
        return rows
    padded = np.zeros((n, k), rows.dtype)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return padded


def packed(weight: Weight) -> NDArray[Any]:
    """The weight as it lies in weights.bin."""
    read = weight.read()
    if isinstance(read, Blocks):
        return pack_blocks(read)
    if isinstance(read, Fp8Weight):
        return pack_fp8(read)
    assert isinstance(weight.format, str)
    rows = read.astype(NUMPY[weight.format], copy=False)
    return pack_tiles(rows, weight.format) if weight.layout == "tiles" else np.ascontiguousarray(rows)


def write_weights(program: Program, path: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Write weights.bin; returns its size in bytes. progress(bytes done, bytes in all) is called after each tensor."""
    offsets, total = weight_offsets(program)
    with path.open("wb") as file:
        for weight, offset in offsets.items():
            file.seek(offset)
            content = packed(weight).reshape(-1).view(np.uint8)
            assert content.nbytes == weight.nbytes, weight.name
            file.write(content.data)
            if progress:
                progress(offset + weight.nbytes, total)
        file.truncate(total)
    return total
