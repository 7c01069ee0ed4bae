"""What a quantized Hugging Face checkpoint stores for a linear: its matrix, and what its input goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from plankiln.checkpoint import LinearQuantization, unpack_int4
from plankiln.errors import ExportError
from plankiln.quantize.formats import E4M3, BlockFormat, Blocks, Floats, Fp8Format, Fp8Weight, round_e4m3
from plankiln.quantize.nvfp4 import Nvfp4Weight

if TYPE_CHECKING:
    from plankiln.compiler.weights import WeightSource

Rounding = Literal["int8", "int8 static", "e4m3", "e4m3 static"]


@dataclass(frozen=True)
class StoredInput:
    """What a linear does with its input x [T, K] before it multiplies.

    prescale [K]: factors of the columns. rounding: to which type, by a scale of its own or, static, by `scale`; None
    rounds nothing.
    """

    prescale: Floats | None
    rounding: Rounding | None
    scale: float | None


def quantization_of(checkpoint: WeightSource, tensor: str) -> LinearQuantization | None:
    """How the matrix `tensor` is quantized; None for one that is stored in floats or GGUF blocks."""
    found = checkpoint.quantization
    return None if found is None else found.linear(tensor.removesuffix(".weight"))


def stored_format(checkpoint: WeightSource, tensor: str) -> BlockFormat | Fp8Format | None:
    """The format of a quantized matrix. w4a8's weights are e4m3: its int4 values are rounded to that before they meet
    e4m3 activations. Raises ExportError for nvfp4, which has no kernel."""
    linear = quantization_of(checkpoint, tensor)
    if linear is None:
        return None
    if linear.algorithm in ("fp8", "fp8_per_token", "w4a8_awq"):
        return Fp8Format()
    if linear.algorithm in ("int8", "int8_smoothquant"):
        return BlockFormat(8, stored_shape(checkpoint, tensor)[1], scales="float32")
    if linear.algorithm == "nvfp4":
        hint = "`weights: bf16` dequantizes it; GPU targets that have NVFP4 take it as it is"
        raise ExportError(f"`{tensor}` is NVFP4, which no CPU kernel multiplies", str(checkpoint.origin), hint)
    assert linear.algorithm == "int4_awq"
    assert linear.group is not None
    scale = _scale(checkpoint, tensor)
    halves = np.array_equal(scale.astype(np.float16).astype(np.float32), scale)
    return BlockFormat(4, linear.group, scales="float16" if halves else "float32")


def stored_shape(checkpoint: WeightSource, tensor: str) -> tuple[int, int]:
    """[N, K] of a matrix: a byte holds two rows of int4, two columns of nvfp4."""
    n, k = checkpoint.tensors[tensor].shape
    linear = quantization_of(checkpoint, tensor)
    if linear is not None and linear.algorithm == "nvfp4":
        return n, 2 * k
    return (2 * n, k) if linear is not None and linear.algorithm in ("int4_awq", "w4a8_awq") else (n, k)


def stored_rows(
    checkpoint: WeightSource, tensor: str, start: int, stop: int, format: BlockFormat | Fp8Format
) -> Blocks | Fp8Weight:
    """Rows start … stop-1 of a quantized matrix, the values as they are stored. format: what `stored_format` said."""
    linear = quantization_of(checkpoint, tensor)
    assert linear is not None
    scale = _scale(checkpoint, tensor)
    if linear.algorithm in ("int4_awq", "w4a8_awq"):
        packed = checkpoint.read_rows(tensor, start // 2, -(-stop // 2))
        q = unpack_int4(packed)[start % 2 :][: stop - start]
        blocks = Blocks(BlockFormat(4, scale_group(q, scale), scales="float32"), q, scale[start:stop])
        if isinstance(format, Fp8Format):
            second = float(checkpoint.read(tensor + "_scale_2").astype(np.float32))
            values = round_e4m3(blocks.dequantize() / np.float32(second))
            return Fp8Weight(values.astype(E4M3), np.full(stop - start, second, np.float32))
        return Blocks(format, q, blocks.scale.astype(format.scales))
    q = checkpoint.read_rows(tensor, start, stop)
    rows = np.full(stop - start, scale, np.float32) if scale.size == 1 else scale.reshape(-1)[start:stop]
    if isinstance(format, Fp8Format):
        return Fp8Weight(q, rows)
    return Blocks(format, q, rows[:, None])


def stored_floats(checkpoint: WeightSource, tensor: str, start: int, stop: int) -> Floats:
    """Rows start … stop-1 of a quantized matrix, dequantized."""
    linear = quantization_of(checkpoint, tensor)
    if linear is not None and linear.algorithm == "nvfp4":
        group_scale = checkpoint.read_rows(f"{tensor}_scale", start, stop)
        scale = float(checkpoint.read(f"{tensor}_scale_2").astype(np.float32))
        return Nvfp4Weight(checkpoint.read_rows(tensor, start, stop), group_scale, scale).dequantize()
    format = stored_format(checkpoint, tensor)
    assert format is not None
    return stored_rows(checkpoint, tensor, start, stop, format).dequantize()


def scale_group(q: NDArray[np.int8], scale: Floats) -> int:
    """Columns that share a scale."""
    return int(q.shape[1] // scale.shape[1])


def stored_input(checkpoint: WeightSource, tensor: str) -> StoredInput:
    """What the linear of this matrix does with its input, as the checkpoint declares it."""
    linear = quantization_of(checkpoint, tensor)
    if linear is None:
        return StoredInput(None, None, None)
    module = tensor.removesuffix(".weight")

    def small(name: str) -> Floats | None:
        full = f"{module}.{name}"
        return checkpoint.read(full).astype(np.float32) if full in checkpoint.tensors else None

    scale = small("input_scale")
    static = None if scale is None else float(scale.reshape(()))
    rounding: Rounding | None = None
    if linear.algorithm in ("fp8", "w4a8_awq"):
        rounding = "e4m3 static"
    elif linear.algorithm == "fp8_per_token":
        rounding = "e4m3"
    elif linear.algorithm == "int8_smoothquant":
        rounding = "int8 static"
    return StoredInput(small("pre_quant_scale"), rounding, static)


def _scale(checkpoint: WeightSource, tensor: str) -> Floats:
    return checkpoint.read(tensor + "_scale").astype(np.float32)
