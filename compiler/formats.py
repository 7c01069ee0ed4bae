"""The number formats a graph is made of: what recipes call them, and the same for numpy and ONNX."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

Format = Literal["fp32", "bf16"]
Element = Literal["float32", "bfloat16"]

ELEMENTS: dict[Format, Element] = {"fp32": "float32", "bf16": "bfloat16"}
NUMPY: dict[Element, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ONNX: dict[Element, ir.DataType] = {"float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16}

# The KV cache. int8: a float32 scale for each token and head lies beside it. fp8: e4m3 with the checkpoint's scales,
# one for a layer's keys and one for its values; fp8_cast: the same with scales of 1.
KvFormat = Literal["fp32", "bf16", "int8", "fp8", "fp8_cast"]
KV_ONNX: dict[KvFormat, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "bf16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
    "fp8": ir.DataType.FLOAT8E4M3FN,
    "fp8_cast": ir.DataType.FLOAT8E4M3FN,
}


def kv_row_bytes(kv: KvFormat, head_dim: int) -> int:
    """Bytes of one token's keys, or values, in one head, with their scale."""
    return int(head_dim * KV_ONNX[kv].itemsize) + (4 if kv == "int8" else 0)
