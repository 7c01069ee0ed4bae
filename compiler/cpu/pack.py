"""weights.bin: every weight of a program in the layout its kernel reads, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plankiln.compiler.cpu.program import ELEMENT_BYTES, Program, Weight

ALIGNMENT = 64
_NUMPY = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def weight_offsets(program: Program) -> tuple[dict[Weight, int], int]:
    """Byte offset of each weight in weights.bin (in the program's order, cache-line aligned), and the file's size."""
    offsets: dict[Weight, int] = {}
    end = 0
    for weight in program.weights:
        offsets[weight] = end
        end += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def pack_tiles(rows: NDArray[Any], weight: Weight) -> NDArray[Any]:
    """[n, k] → [ceil(n/16), ceil(k/pair), 16, pair], zeros beyond n and k (plugins/cpu/linear.h)."""
    pair = 4 // ELEMENT_BYTES[weight.element]
    tiles, steps = -(-weight.n // 16), -(-weight.k // pair)
    if rows.shape != (tiles * 16, steps * pair):
        padded = np.zeros((tiles * 16, steps * pair), _NUMPY[weight.element])
        padded[: weight.n, : weight.k] = rows
        rows = padded
    return np.ascontiguousarray(rows.reshape(tiles, 16, steps, pair).transpose(0, 2, 1, 3))


def write_weights(program: Program, path: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Write weights.bin; returns its size in bytes. progress(bytes done, bytes in all) is called after each tensor."""
    offsets, total = weight_offsets(program)
    with path.open("wb") as file:
        for weight, offset in offsets.items():
            rows = weight.rows().astype(_NUMPY[weight.element], copy=False)
            packed = pack_tiles(rows, weight) if weight.layout == "tiles" else np.ascontiguousarray(rows)
            file.seek(offset)
            file.write(packed.reshape(-1).view(np.uint8).data)
            if progress:
                progress(offset + weight.nbytes, total)
        file.truncate(total)
    return total
