"""Split into halves, then silu(first) * second → `plankiln::SiluMul`."""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.plugins.fused_ops import SILU_MUL, silu_mul_function
from plankiln.plugins.onnx_body import DOMAIN


def fuse_silu_mul(model: ir.Model) -> int:
    """Rewrites every (gate * Sigmoid(gate)) * up whose gate and up are the halves of one value; returns how many."""
    count = 0
    for node in list(model.graph):
        gate_up = g.silu_mul_operands(node)
        split = g.producer(gate_up[0], "Split") if gate_up else None
        if gate_up is None or split is None or tuple(split.outputs) != gate_up or "num_outputs" not in split.attributes:
            continue
        old = node.outputs[0]
        new = g.like(old)
        fused = g.node(SILU_MUL, [split.inputs[0]], [new], layer=g.layer_of(node), domain=DOMAIN)
        g.replace(model.graph, node, fused, {old: new})
        count += 1
    if count:
        g.add_function(model, silu_mul_function())
        g.tidy(model)
    return count
