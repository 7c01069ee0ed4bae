"""The three linears before attention → one linear and a Split."""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.passes.linears import Linear, joined, linear_behind
from plankiln.plugins.onnx_body import DOMAIN
from plankiln.plugins.paged_attention import schema

_BETWEEN = ("Squeeze", "Unsqueeze", "RotaryEmbedding", "Reshape", "RMSNormalization")


def fuse_qkv(model: ir.Model) -> int:
    """Rewrites every attention node whose query, key and value come from linears; returns how many."""
    count = 0
    for node in list(model.graph):
        if not g.is_op(node, schema.OP_TYPE, DOMAIN):
            continue
        linears = [linear for value in node.inputs[:3] if (linear := _linear_upstream(value))]
        if len(linears) == 3:
            count += _fuse(model.graph, linears)
    if count:
        g.tidy(model)
    return count


def _linear_upstream(value: ir.Value | None) -> Linear | None:
    """The linear behind `value`, seen through rotation and per-head norm."""
    while value is not None and (linear := linear_behind(value)) is None:
        node = value.producer()
        if node is None or node.op_type not in _BETWEEN:
            return None
        value = node.inputs[0]
    return linear if value is not None else None


def _fuse(graph: ir.Graph, linears: list[Linear]) -> bool:
    packed = joined(graph, linears, "q_proj", "qkv_proj")
    made_by = packed.producer() if packed else None
    if packed is None or made_by is None:
        return False
    parts = [g.like(linear.output) for linear in linears]
    sizes = g.int64s(graph, [linear.width for linear in linears])
    split = g.node("Split", [packed, sizes], parts, {"axis": -1}, layer=g.layer_of(made_by))
    g.replace(graph, made_by, split, {linear.output: part for linear, part in zip(linears, parts, strict=True)})
    return True
