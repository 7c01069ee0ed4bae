"""The gate and up linears of an MLP → one linear; gate and up become its two halves by Split."""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.passes.linears import joined, linear_behind


def fuse_gate_up(model: ir.Model) -> int:
    """Rewrites every (gate * Sigmoid(gate)) * up whose gate and up are linears; returns how many."""
    count = 0
    for node in list(model.graph):
        gate_up = g.silu_mul_operands(node)
        linears = [linear for value in gate_up or () if (linear := linear_behind(value))]
        if len(linears) != 2 or linears[0].width != linears[1].width:
            continue
        packed = joined(model.graph, linears, "gate_proj", "gate_up_proj")
        made_by = packed.producer() if packed else None
        if packed is None or made_by is None:
            continue
        parts = [g.like(linear.output) for linear in linears]
        attributes = {"axis": -1, "num_outputs": 2}
        split = g.node("Split", [packed], parts, attributes, layer=g.layer_of(made_by))
        outputs = {linear.output: part for linear, part in zip(linears, parts, strict=True)}
        g.replace(model.graph, made_by, split, outputs)
        count += 1
    if count:
        g.tidy(model)
    return count
