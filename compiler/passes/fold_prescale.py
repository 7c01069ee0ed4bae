"""A pre-scale of what a norm yields → into the norm's weight.

Where a pre-scale follows anything else (attention before o_proj, the gated activation before down_proj), it stays a
Mul: `explicit_prescales` names the linears it belongs to.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.activations import constant

_SUFFIX = ".pre_quant_scale"


def fold_prescale(model: ir.Model) -> int:
    """Rewrites every Mul(RMSNormalization(x, weight), factors) whose norm nobody else reads; returns how many."""
    count = 0
    for node in list(model.graph):
        factors = _factors(node)
        norm = g.producer(node.inputs[0], "RMSNormalization") if factors else None
        if norm is None or factors is None or len(norm.outputs[0].uses()) != 1:
            continue
        weight = norm.inputs[1]
        assert weight is not None
        assert weight.const_value is not None
        assert factors.const_value is not None
        folded = np.asarray(weight.const_value.numpy(), np.float32) * factors.const_value.numpy()
        norm.replace_input_with(1, constant(model.graph, f"{weight.name}.prescaled", folded))
        for user, index in list(node.outputs[0].uses()):
            user.replace_input_with(index, norm.outputs[0])
        count += 1
    if count:
        g.tidy(model)
    return count


def explicit_prescales(model: ir.Model) -> list[str]:
    """The linears whose input is multiplied by a pre-scale at run time."""
    return [str(factors.name).removesuffix(_SUFFIX) for node in model.graph if (factors := _factors(node))]


def _factors(node: ir.Node) -> ir.Value | None:
    value = node.inputs[1] if g.is_op(node, "Mul") else None
    return value if value is not None and str(value.name).endswith(_SUFFIX) else None
