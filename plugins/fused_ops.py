"""The two fused element-wise ops: a numpy reference and an ONNX function body for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir

SILU_MUL = "SiluMul"
ADD_RMS_NORMALIZATION = "AddRMSNormalization"

Floats = NDArray[np.float32]


def silu_mul(gate_up: Floats) -> Floats:
    """silu(gate) * up for gate_up [T, 2I], whose first I columns are the gate; returns [T, I]."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return (gate / (1.0 + np.exp(-gate)) * up).astype(np.float32)


def add_rms_normalization(x: Floats, residual: Floats, weight: Floats, epsilon: float) -> tuple[Floats, Floats]:
    """x, residual [T, H], weight [H]. Returns (RMSNorm(residual + x) * weight, residual + x), both [T, H]."""
    total = residual + x
    wide = total.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(np.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight).astype(np.float32), total


def silu_mul_function() -> ir.Function:
    """`plankiln::SiluMul(gate_up) -> y`."""
    from plankiln.plugins.onnx_body import Body

    body = Body(SILU_MUL, ["gate_up"])
    gate, up = body.split(body.inputs["gate_up"], 2)
    return body.function(y=body.op("Mul", body.op("Mul", gate, body.op("Sigmoid", gate)), up))


def add_rms_normalization_function() -> ir.Function:
    """`plankiln::AddRMSNormalization(x, residual, weight; epsilon) -> normed, total`."""
    import onnx_ir as ir

    from plankiln.plugins.onnx_body import Body

    body = Body(ADD_RMS_NORMALIZATION, ["x", "residual", "weight"])
    total = body.op("Add", body.inputs["residual"], body.inputs["x"])
    epsilon = body.reference("epsilon", ir.AttributeType.FLOAT)
    normed = body.node("RMSNormalization", [total, body.inputs["weight"]], [ir.AttrInt64("axis", -1), epsilon])
    return body.function(normed=normed, total=total)
