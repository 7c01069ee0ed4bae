"""What the graph does with a linear's input before the product: a pre-scale, and a rounding that is said exactly.

Pre-scale: Mul by a constant [K]. Static scales: QuantizeLinear and DequantizeLinear. Scales of each row's own:
plankiln::DynamicQuantize (int8, a scale for each group of columns) and plankiln::DynamicQuantizeFloat8 (e4m3).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from plankiln.compiler import graph as g
from plankiln.compiler.stored import StoredInput
from plankiln.plugins import quantized_ops
from plankiln.plugins.onnx_body import DOMAIN
from plankiln.quantize.formats import Floats


def prepare_input(graph: ir.Graph, x: ir.Value, stored: StoredInput, name: str, layer: int | None) -> ir.Value:
    """x [T, K] as the linear `name` reads it: pre-scaled, rounded, and in float32. One value for equal requests."""
    if stored.prescale is not None:
        x = _prescaled(graph, x, stored.prescale, name, layer)
    if stored.rounding is None:
        return x
    if stored.rounding == "int8":
        width = g.dimensions(x)[1]
        assert isinstance(width, int)
        return add_dynamic_quantize(graph, x, width, layer)
    if stored.rounding == "e4m3":
        return _dynamic_float8(graph, x, layer)
    assert stored.scale is not None
    kind = ir.DataType.INT8 if stored.rounding == "int8 static" else ir.DataType.FLOAT8E4M3FN
    return _static(graph, x, stored.scale, kind, name, layer)


def add_dynamic_quantize(graph: ir.Graph, x: ir.Value, group: int, layer: int | None) -> ir.Value:
    """x as int8 activations leave it: quantized for each row and group of columns, and back in float32."""
    for node in _readers(x, quantized_ops.DYNAMIC_QUANTIZE):
        if node.attributes["group"].as_int() == group:
            return _dequantized(node)
    width = g.dimensions(x)[1]
    assert isinstance(width, int)
    q = g.value(f"{x.name}.q g{group}", ir.DataType.INT8, g.dimensions(x))
    scale = g.value(f"{x.name}.scale g{group}", g.FLOAT, [g.dimensions(x)[0], width // group])
    back = g.value(f"{x.name}.int8 g{group}", g.FLOAT, g.dimensions(x))
    graph.append(g.node(quantized_ops.DYNAMIC_QUANTIZE, [x], [q, scale], {"group": group}, layer=layer, domain=DOMAIN))
    graph.append(g.node("DequantizeLinear", [q, scale], [back], {"axis": 1, "block_size": group}, layer=layer))
    return back


def add_bfloat16(graph: ir.Graph, x: ir.Value, layer: int | None) -> ir.Value:
    """x rounded to bf16, in float32."""
    for node in _readers(x, "Cast"):
        return _dequantized(node)
    narrow = g.value(f"{x.name}.bf16", g.BFLOAT16, g.dimensions(x))
    back = g.value(f"{x.name}.rounded", g.FLOAT, g.dimensions(x))
    graph.append(g.node("Cast", [x], [narrow], {"to": int(g.BFLOAT16)}, layer=layer))
    graph.append(g.node("Cast", [narrow], [back], {"to": int(g.FLOAT)}, layer=layer))
    return back


def add_functions(model: ir.Model) -> None:
    """Give the model the bodies of the quantization ops that it uses."""
    used = {node.op_identifier() for node in model.graph}
    blocks = [quantized_ops.dequantize_blocks_function(axis=axis) for axis in (0, 1)]
    rows = [quantized_ops.dynamic_quantize_function(), quantized_ops.dynamic_quantize_float8_function()]
    for function in (*blocks, *rows):
        if function.identifier() in used:
            g.add_function(model, function)


def constant(graph: ir.Graph, name: str, values: Floats) -> ir.Value:
    """A float32 initializer."""
    tensor = ir.tensor(np.asarray(values, np.float32, order="C"), name=name)
    made = ir.Value(name=name, type=ir.TensorType(g.FLOAT), shape=ir.Shape(values.shape), const_value=tensor)
    graph.register_initializer(made)
    return made


def _prescaled(graph: ir.Graph, x: ir.Value, prescale: Floats, name: str, layer: int | None) -> ir.Value:
    for node in _readers(x, "Mul"):
        if _is_constant(node.inputs[1], prescale):
            return node.outputs[0]
    factors = constant(graph, f"{name}.pre_quant_scale", prescale)
    output = g.value(f"{name}.prescaled", g.FLOAT, g.dimensions(x))
    graph.append(g.node("Mul", [x, factors], [output], layer=layer))
    return output


def _static(graph: ir.Graph, x: ir.Value, scale: float, kind: ir.DataType, name: str, layer: int | None) -> ir.Value:
    value = np.array(scale, np.float32)
    for node in _readers(x, "QuantizeLinear"):
        if node.outputs[0].dtype == kind and _is_constant(node.inputs[1], value):
            return _dequantized(node)
    factor = constant(graph, f"{name}.input_scale", value)
    q = g.value(f"{name}.input.q", kind, g.dimensions(x))
    back = g.value(f"{name}.input", g.FLOAT, g.dimensions(x))
    graph.append(g.node("QuantizeLinear", [x, factor], [q], {"output_dtype": int(kind)}, layer=layer))
    graph.append(g.node("DequantizeLinear", [q, factor], [back], layer=layer))
    return back


def _dynamic_float8(graph: ir.Graph, x: ir.Value, layer: int | None) -> ir.Value:
    for node in _readers(x, quantized_ops.DYNAMIC_QUANTIZE_FLOAT8):
        return _dequantized(node)
    q = g.value(f"{x.name}.e4m3.q", ir.DataType.FLOAT8E4M3FN, g.dimensions(x))
    scale = g.value(f"{x.name}.e4m3.scale", g.FLOAT, g.dimensions(x)[:1])
    back = g.value(f"{x.name}.e4m3", g.FLOAT, g.dimensions(x))
    graph.append(g.node(quantized_ops.DYNAMIC_QUANTIZE_FLOAT8, [x], [q, scale], layer=layer, domain=DOMAIN))
    graph.append(g.node("DequantizeLinear", [q, scale], [back], {"axis": 0}, layer=layer))
    return back


def _dequantized(node: ir.Node) -> ir.Value:
    """What the node that reads this one's first output makes of it."""
    return next(iter(node.outputs[0].uses())).node.outputs[0]


def _readers(x: ir.Value, op_type: str) -> list[ir.Node]:
    return [use.node for use in x.uses() if use.node.op_type == op_type]


def _is_constant(value: ir.Value | None, wanted: NDArray[np.float32]) -> bool:
    constant = None if value is None else value.const_value
    return constant is not None and bool(np.array_equal(constant.numpy(), wanted))
