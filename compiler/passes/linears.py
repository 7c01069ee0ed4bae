"""Recognises the linears that export writes, and joins several that read the same input into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.matrices import MatrixReference, add_matrix, joined_reference, matrix_behind
from plankiln.compiler.weights import concatenated, reference_of


@dataclass(frozen=True)
class Linear:
    """`output` = x @ W (+ bias); `matrix` is the reference behind W."""

    output: ir.Value
    matmul: ir.Node
    matrix: MatrixReference
    bias: ir.Value | None

    @property
    def x(self) -> ir.Value | None:
        return self.matmul.inputs[0]

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.matrix.shape[1]


def linear_behind(value: ir.Value | None) -> Linear | None:
    """The linear whose output `value` is."""
    add = g.producer(value, "Add")
    bias = add.inputs[1] if add and add.inputs[1] is not None and reference_of(add.inputs[1]) else None
    matmul = g.producer(add.inputs[0], "MatMul") if add and bias else g.producer(value, "MatMul")
    if matmul is None or value is None:
        return None
    matrix = matrix_behind(matmul.inputs[1])
    return None if matrix is None else Linear(value, matmul, matrix, bias)


def joined(graph: ir.Graph, linears: Sequence[Linear], old: str, new: str) -> ir.Value | None:
    """One linear whose output columns are those of all, put after the last of them; its output.

    Its matrix is a reference to all their rows, or, where they read different inputs or differ in format, their outputs
    are put side by side by Concat. `old` → `new` turns the first one's names into the joint ones. None, and nothing
    changed, when they do not agree about bias or layer.
    """
    first = linears[0]
    alike = {(linear.bias is None, g.layer_of(linear.matmul)) for linear in linears}
    if len(alike) != 1 or len({linear.matmul for linear in linears}) != len(linears):
        return None
    try:
        reference = joined_reference([linear.matrix for linear in linears])
    except ValueError:
        return _side_by_side(graph, linears, old, new)
    if len({linear.x for linear in linears}) != 1:
        return _side_by_side(graph, linears, old, new)
    layer, anchor = g.layer_of(first.matmul), last_of(graph, [linear.matmul for linear in linears])
    name = str(first.output.name).replace(old, new)
    matrix = add_matrix(graph, f"{name}.weight", reference, layer, after=anchor)
    anchor = matrix.producer() or anchor
    shape = [g.dimensions(first.output)[0], sum(linear.width for linear in linears)]
    product = g.value(f"{name}.product" if first.bias else name, g.FLOAT, shape)
    anchor = _after(graph, anchor, g.node("MatMul", [first.x, matrix], [product], layer=layer))
    if first.bias is None:
        return product
    bias = _joint_weight(graph, [linear.bias for linear in linears if linear.bias is not None], old, new)
    output = g.value(name, g.FLOAT, shape)
    _after(graph, anchor, g.node("Add", [product, bias], [output], layer=layer))
    return output


def _side_by_side(graph: ir.Graph, linears: Sequence[Linear], old: str, new: str) -> ir.Value:
    shape = [g.dimensions(linears[0].output)[0], sum(linear.width for linear in linears)]
    output = g.value(str(linears[0].output.name).replace(old, new), g.FLOAT, shape)
    ends = [node for linear in linears if (node := linear.output.producer())]
    outputs = [linear.output for linear in linears]
    concat = g.node("Concat", outputs, [output], {"axis": -1}, layer=g.layer_of(linears[0].matmul))
    _after(graph, last_of(graph, ends), concat)
    return output


def last_of(graph: ir.Graph, nodes: Sequence[ir.Node]) -> ir.Node:
    """The one of `nodes` that stands last in the graph."""
    wanted = set(nodes)
    return next(node for node in reversed(graph) if node in wanted)


def _after(graph: ir.Graph, anchor: ir.Node, node: ir.Node) -> ir.Node:
    graph.insert_after(anchor, node)
    return node


def _joint_weight(graph: ir.Graph, values: Sequence[ir.Value], old: str, new: str) -> ir.Value:
    references = [reference for value in values if (reference := reference_of(value)) is not None]
    return g.weight(graph, str(values[0].name).replace(old, new), concatenated(references))
