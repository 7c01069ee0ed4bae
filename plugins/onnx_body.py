"""Writes model-local ONNX functions: the body of standard ops that lets any ONNX runtime execute a custom op."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

DOMAIN = "plankiln"
OPSET = 23


class Body:
    """Collects the nodes of one function. Inputs and outputs are named; attributes are read with `attribute`."""

    def __init__(self, op_type: str, inputs: Sequence[str], overload: str = "") -> None:
        self._op_type = op_type
        self._overload = overload
        self._nodes: list[ir.Node] = []
        self._attributes: dict[str, ir.Attr] = {}
        self.inputs = {name: ir.Value(name=name) for name in inputs}

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: int | float | Sequence[int]) -> ir.Value:
        """Append a node with one output."""
        node = ir.node(op_type, inputs, attributes)
        self._nodes.append(node)
        return node.outputs[0]

    def split(self, value: ir.Value, parts: int) -> Sequence[ir.Value]:
        """Equal parts along the last axis."""
        node = ir.node("Split", [value], {"axis": -1, "num_outputs": parts}, num_outputs=parts)
        self._nodes.append(node)
        return node.outputs

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        return self.op("Constant", value_ints=values)

    def scalar(self, value: int | float) -> ir.Value:
        """A constant int64 or float scalar."""
        if isinstance(value, int):
            return self.op("Constant", value_int=value)
        return self.op("Constant", value_float=value)

    def reference(self, name: str, kind: ir.AttributeType) -> ir.Attr:
        """Declares the function's attribute `name`; the result is given to a node under the same name."""
        self._attributes[name] = ir.Attr(name, kind, None)
        return ir.RefAttr(name, name, kind)

    def attribute(self, name: str, kind: ir.AttributeType) -> ir.Value:
        """The function's attribute `name` as a scalar value (FLOAT or INT)."""
        self._attributes[name] = ir.Attr(name, kind, None)
        field = "value_float" if kind == ir.AttributeType.FLOAT else "value_int"
        node = ir.Node("", "Constant", [], [ir.RefAttr(field, name, kind)])
        self._nodes.append(node)
        return node.outputs[0]

    def declare(self, name: str, kind: ir.AttributeType) -> None:
        """An attribute that callers set and the body does not need."""
        self._attributes[name] = ir.Attr(name, kind, None)

    def node(self, op_type: str, inputs: Sequence[ir.Value], attributes: Sequence[ir.Attr]) -> ir.Value:
        """Append a node whose attributes may refer to the function's own."""
        node = ir.Node("", op_type, inputs, attributes)
        self._nodes.append(node)
        return node.outputs[0]

    def function(self, **outputs: ir.Value) -> ir.Function:
        """The finished function; keyword names become the outputs' names, in order."""
        for name, value in outputs.items():
            value.name = name
        graph = ir.Graph(
            list(self.inputs.values()),
            list(outputs.values()),
            nodes=self._nodes,
            opset_imports={"": OPSET},
            name=self._op_type,
        )
        return ir.Function(DOMAIN, self._op_type, self._overload, graph=graph, attributes=self._attributes)
