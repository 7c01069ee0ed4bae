"""How a matrix stands in the graph: initializers and the nodes that turn them into float32, and the way back.

float32: the initializer itself. bf16: Cast. Symmetric blocks: DequantizeLinear, blocked along K, with its float16
scales cast to float32 first so that products stay exact. Blocks with a minimum: plankiln::DequantizeBlocks.
"""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.blocks import BlockReference, BlockTensor, Component, concatenated_blocks
from plankiln.compiler.weights import Reference, concatenated, reference_of
from plankiln.plugins import quantized_ops
from plankiln.plugins.onnx_body import DOMAIN

MatrixReference = Reference | BlockReference


def add_matrix(
    graph: ir.Graph, name: str, reference: MatrixReference, layer: int | None, after: ir.Node | None = None
) -> ir.Value:
    """The float32 value of a matrix called `name`, in the reference's orientation.

    Its nodes go to the end of the graph, or after the node `after`. Raises ValueError when K is not whole groups.
    """
    nodes: list[ir.Node] = []

    def op(op_type: str, inputs: list[ir.Value], suffix: str, domain: str = "", **attributes: int) -> ir.Value:
        output = g.value(f"{name}.{suffix}", g.FLOAT, inputs[0].shape or ())
        overload = str(attributes["axis"]) if domain else ""
        given = {key: value for key, value in attributes.items() if not domain or key != "axis"}
        nodes.append(g.node(op_type, inputs, [output], given, layer=layer, domain=domain, overload=overload))
        return output

    if isinstance(reference, Reference):
        value = g.weight(graph, name, reference)
        if reference.dtype == "bfloat16":
            value = op("Cast", [value], "float32", to=int(g.FLOAT))
    else:
        group, axis = reference.format.group, 0 if reference.transposed else 1
        if reference.rows_columns[1] % group:
            raise ValueError(f"`{name}` has {reference.rows_columns[1]} columns, not whole groups of {group}")
        q, scale = (_component(graph, name, reference, which) for which in ("q", "scale"))
        if reference.format.minimum:
            minimum = _component(graph, name, reference, "minimum")
            inputs = [q, scale, minimum]
            value = op(quantized_ops.DEQUANTIZE_BLOCKS, inputs, "float32", DOMAIN, axis=axis, group=group)
        else:
            wide = op("Cast", [scale], "scale.float32", to=int(g.FLOAT))
            value = op("DequantizeLinear", [q, wide], "float32", axis=axis, block_size=group)
    for node in nodes:
        if after is None:
            graph.append(node)
        else:
            graph.insert_after(after, node)
            after = node
    return value


def matrix_behind(value: ir.Value | None) -> MatrixReference | None:
    """The reference that `add_matrix` made this value from, or None for any other value."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type in ("Cast", "DequantizeLinear", quantized_ops.DEQUANTIZE_BLOCKS):
        value = node.inputs[0]
    if value is None:
        return None
    tensor = value.const_value
    return tensor.reference if isinstance(tensor, BlockTensor) else reference_of(value)


def joined_reference(references: list[MatrixReference]) -> MatrixReference:
    """One reference to the rows of all; ValueError when they do not agree in format and orientation."""
    whole = [reference for reference in references if isinstance(reference, Reference)]
    blocks = [reference for reference in references if isinstance(reference, BlockReference)]
    if whole and blocks:
        raise ValueError("quantized and unquantized matrices cannot be joined")
    return concatenated(whole) if whole else concatenated_blocks(blocks)


def add_dynamic_quantize(graph: ir.Graph, x: ir.Value, group: int, layer: int | None) -> ir.Value:
    """x as int8 activations leave it: quantized for each row and group of columns, and back in float32."""
    width = g.dimensions(x)[1]
    assert isinstance(width, int)
    q = g.value(f"{x.name}.q", ir.DataType.INT8, g.dimensions(x))
    scale = g.value(f"{x.name}.scale", g.FLOAT, [g.dimensions(x)[0], width // group])
    back = g.value(f"{x.name}.int8", g.FLOAT, g.dimensions(x))
    graph.append(g.node(quantized_ops.DYNAMIC_QUANTIZE, [x], [q, scale], {"group": group}, layer=layer, domain=DOMAIN))
    blocked = {"axis": 1, "block_size": group}
    graph.append(g.node("DequantizeLinear", [q, scale], [back], blocked, layer=layer))
    return back


def add_functions(model: ir.Model) -> None:
    """Give the model the bodies of the ops above that it uses."""
    used = {node.op_identifier() for node in model.graph}
    blocks = [quantized_ops.dequantize_blocks_function(axis=axis) for axis in (0, 1)]
    for function in (*blocks, quantized_ops.dynamic_quantize_function()):
        if function.identifier() in used:
            g.add_function(model, function)


def _component(graph: ir.Graph, name: str, reference: BlockReference, which: Component) -> ir.Value:
    title = name if which == "q" else f"{name}.{which}"
    if title not in graph.initializers:
        tensor = BlockTensor(reference, which, title)
        made = ir.Value(name=title, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(made)
    return graph.initializers[title]
