"""Small onnx-ir helpers that export and the passes share: naming, layers, constants, cleaning up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from plankiln.compiler.weights import Reference, ReferenceTensor
from plankiln.plugins.onnx_body import DOMAIN

Dimension = int | str | ir.SymbolicDim
FLOAT = ir.DataType.FLOAT
BFLOAT16 = ir.DataType.BFLOAT16
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
LAYER = "layer"


def value(name: str, dtype: ir.DataType, shape: Iterable[Dimension]) -> ir.Value:
    """A named, typed value; a string dimension is symbolic."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def dimensions(value: ir.Value) -> list[Dimension]:
    """The shape of a value that has one."""
    assert value.shape is not None
    return list(value.shape)


def like(other: ir.Value, name: str | None = None) -> ir.Value:
    """A new value of another's type and shape."""
    return ir.Value(name=name, type=other.type, shape=other.shape)


def node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    attributes: Mapping[str, int | float | Sequence[int]] | None = None,
    *,
    layer: int | None = None,
    domain: str = "",
    overload: str = "",
) -> ir.Node:
    """A node named after its first output. `layer` is kept in its metadata; None for what belongs to no layer."""
    return ir.node(
        op_type,
        inputs,
        dict(attributes or {}),
        domain=domain,
        overload=overload,
        outputs=outputs,
        name=outputs[0].name,
        metadata_props=None if layer is None else {LAYER: str(layer)},
    )


def layer_of(node: ir.Node) -> int | None:
    """The layer a node belongs to."""
    text = node.metadata_props.get(LAYER)
    return None if text is None else int(text)


def is_op(node: ir.Node | None, op_type: str, domain: str = "") -> bool:
    """Whether `node` is there and is this op."""
    return node is not None and node.op_type == op_type and node.domain == domain


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value` if it is this op."""
    made_by = None if value is None else value.producer()
    return made_by if is_op(made_by, op_type, domain) else None


def silu_mul_operands(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """(gate, up) when `node` is the outer product of (gate * Sigmoid(gate)) * up."""
    silu = producer(node.inputs[0], "Mul") if is_op(node, "Mul") else None
    sigmoid = producer(silu.inputs[1], "Sigmoid") if silu else None
    if silu is None or sigmoid is None or sigmoid.inputs[0] is not silu.inputs[0]:
        return None
    gate, up = silu.inputs[0], node.inputs[1]
    return (gate, up) if gate is not None and up is not None else None


def weight(graph: ir.Graph, name: str, reference: Reference) -> ir.Value:
    """The initializer `name`, made on first use."""
    if name not in graph.initializers:
        tensor = ReferenceTensor(reference, name)
        made = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(reference.shape), const_value=tensor
        )
        graph.register_initializer(made)
    return graph.initializers[name]


def int64s(graph: ir.Graph, values: Sequence[int]) -> ir.Value:
    """An int64 vector as an initializer; equal ones are shared."""
    name = "ints." + "_".join(str(v) for v in values)
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(values, dtype=np.int64), name=name)
        made = ir.Value(name=name, type=ir.TensorType(INT64), shape=ir.Shape([len(values)]), const_value=tensor)
        graph.register_initializer(made)
    return graph.initializers[name]


def replace(graph: ir.Graph, anchor: ir.Node, new: ir.Node, outputs: Mapping[ir.Value, ir.Value]) -> None:
    """Put `new` after `anchor` and let it take over: each old value's readers and name go to its replacement (`anchor`
    goes on reading the old).

    What nobody reads any more stays until `tidy`. No old value may be an output of the graph.
    """
    for old, replacement in outputs.items():
        replacement.name, old.name = old.name, f"{old.name}.replaced"
        if made_by := old.producer():
            made_by.name = made_by.outputs[0].name
    new.name = new.outputs[0].name
    graph.insert_after(anchor, new)
    for old, replacement in outputs.items():
        for user, index in list(old.uses()):
            if user not in (new, anchor):
                user.replace_input_with(index, replacement)


def add_function(model: ir.Model, function: ir.Function) -> None:
    """Give the model the body of a custom op, once."""
    model.functions.setdefault(function.identifier(), function)
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def tidy(model: ir.Model) -> None:
    """Drop nodes, initializers and functions that nothing needs any more; put the rest in order of execution."""
    RemoveUnusedNodesPass()(model)
    for unused in set(model.functions) - {node.op_identifier() for node in model.graph}:
        del model.functions[unused]
    model.graph.sort()
