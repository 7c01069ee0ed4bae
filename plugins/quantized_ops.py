"""What standard Q/DQ cannot say: weights with a minimum in each group, and activations quantized as they come.

Each op has an ONNX function body of standard ops; the numpy twins are in plankiln.quantize.formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

DEQUANTIZE_BLOCKS = "DequantizeBlocks"
DYNAMIC_QUANTIZE = "DynamicQuantize"
DYNAMIC_QUANTIZE_FLOAT8 = "DynamicQuantizeFloat8"


def dequantize_blocks_function(*, axis: int) -> ir.Function:
    """`plankiln::DequantizeBlocks(q, scale, minimum; group) -> y`: y = scale · q + minimum, float32.

    q uint4 or uint8 of two dimensions; scale and minimum float16, one for `group` entries of q along `axis`, for which
    the op has one overload each ("0" or "1").
    """
    import onnx_ir as ir

    from plankiln.plugins.onnx_body import Body

    body = Body(DEQUANTIZE_BLOCKS, ["q", "scale", "minimum"], overload=str(axis))
    scale, minimum = (body.op("Cast", body.inputs[name], to=int(ir.DataType.FLOAT)) for name in ("scale", "minimum"))
    group = body.attribute("group", ir.AttributeType.INT)
    size = ir.RefAttr("block_size", "group", ir.AttributeType.INT)
    product = body.node("DequantizeLinear", [body.inputs["q"], scale], [ir.AttrInt64("axis", axis), size])
    between = body.ints(axis + 1)
    repeats = body.op("Unsqueeze", group, body.ints(0))
    ones = [body.ints(1)] * (axis + 1)
    spread_by = body.op("Concat", *ones, repeats, *[body.ints(1)] * (1 - axis), axis=0)
    spread = body.op("Tile", body.op("Unsqueeze", minimum, between), spread_by)
    return body.function(y=body.op("Add", product, body.op("Reshape", spread, body.op("Shape", product))))


def dynamic_quantize_function() -> ir.Function:
    """`plankiln::DynamicQuantize(x; group) -> q, scale`: int8 for each row and `group` columns of x [T, K].

    scale [T, K/group] = max|x| / 127; q [T, K] = round(x · 127 / max|x|), zero where max|x| < 1e-30.
    """
    import onnx_ir as ir

    from plankiln.plugins.onnx_body import Body

    body = Body(DYNAMIC_QUANTIZE, ["x"])
    group = body.op("Unsqueeze", body.attribute("group", ir.AttributeType.INT), body.ints(0))
    grouped = body.op("Reshape", body.inputs["x"], body.op("Concat", body.ints(0, -1), group, axis=0))
    peak = body.op("ReduceMax", body.op("Abs", grouped), body.ints(-1), keepdims=1)
    tiny = body.op("Less", peak, body.scalar(1e-30))
    inverse = body.op("Where", tiny, body.scalar(0.0), body.op("Div", body.scalar(127.0), peak))
    rounded = body.op("Round", body.op("Mul", grouped, inverse))
    packed = body.op("Reshape", body.op("Cast", rounded, to=int(ir.DataType.INT8)), body.ints(0, -1))
    scale = body.op("Squeeze", body.op("Mul", peak, body.scalar(1.0 / 127.0)), body.ints(-1))
    return body.function(q=packed, scale=scale)


def dynamic_quantize_float8_function() -> ir.Function:
    """`plankiln::DynamicQuantizeFloat8(x) -> q, scale`: e4m3 for each row of x [T, K].

    scale [T] = max|x| / 448; q [T, K] = e4m3(x / scale), zero where scale < 1e-30.
    """
    import onnx_ir as ir

    from plankiln.plugins.onnx_body import Body

    body = Body(DYNAMIC_QUANTIZE_FLOAT8, ["x"])
    peak = body.op("ReduceMax", body.op("Abs", body.inputs["x"]), body.ints(-1), keepdims=1)
    scale = body.op("Mul", peak, body.scalar(1.0 / 448.0))
    tiny = body.op("Less", scale, body.scalar(1e-30))
    inverse = body.op("Where", tiny, body.scalar(0.0), body.op("Reciprocal", scale))
    scaled = body.op("Mul", body.inputs["x"], inverse)
    q = body.op("Cast", scaled, to=int(ir.DataType.FLOAT8E4M3FN))
    return body.function(q=q, scale=body.op("Squeeze", scale, body.ints(-1)))
