"""The two fused element-wise ops: an ONNX function body for each, which is what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

SILU_MUL = "SiluMul"
ADD_RMS_NORMALIZATION = "AddRMSNormalization"


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
