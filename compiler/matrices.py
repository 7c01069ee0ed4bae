"""How a matrix stands in the graph: initializers and the nodes that turn them into float32, and the way back.

float32: the initializer itself. bf16: Cast. Symmetric blocks: DequantizeLinear, blocked along K, with float16 scales
cast to float32 first so that products stay exact. One scale a row (int8, e4m3): DequantizeLinear along N. Blocks with a
minimum: plankiln::DequantizeBlocks.
"""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.blocks import BlockReference, BlockTensor, Component, concatenated_blocks
from plankiln.compiler.weights import Reference, concatenated, reference_of
from plankiln.plugins import quantized_ops
from plankiln.plugins.onnx_body import DOMAIN
from plankiln.quantize.formats import BlockFormat

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
    elif reference.per_channel:
        q, scale = (_component(graph, name, reference, which) for which in ("q", "scale"))
        value = op("DequantizeLinear", [q, scale], "float32", axis=1 if reference.transposed else 0)
    else:
        assert isinstance(reference.format, BlockFormat)
        group, axis = reference.format.group, 0 if reference.transposed else 1
        if reference.rows_columns[1] % group:
            raise ValueError(f"`{name}` has {reference.rows_columns[1]} columns, not whole groups of {group}")
        q, scale = (_component(graph, name, reference, which) for which in ("q", "scale"))
        if reference.format.minimum:
            minimum = _component(graph, name, reference, "minimum")
            inputs = [q, scale, minimum]
            value = op(quantized_ops.DEQUANTIZE_BLOCKS, inputs, "float32", DOMAIN, axis=axis, group=group)
        else:
            if reference.format.scales == "float16":
                scale = op("Cast", [scale], "scale.float32", to=int(g.FLOAT))
            value = op("DequantizeLinear", [q, scale], "float32", axis=axis, block_size=group)
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


def _component(graph: ir.Graph, name: str, reference: BlockReference, which: Component) -> ir.Value:
    title = name if which == "q" else f"{name}.{which}"
    if title not in graph.initializers:
        tensor = BlockTensor(reference, which, title)
        made = ir.Value(name=title, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(made)
    return graph.initializers[title]
