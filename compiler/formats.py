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
