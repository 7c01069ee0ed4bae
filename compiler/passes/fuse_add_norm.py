"""Residual Add followed by RMSNormalization → `plankiln::AddRMSNormalization`, which yields both."""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.weights import reference_of
from plankiln.plugins.fused_ops import ADD_RMS_NORMALIZATION, add_rms_normalization_function
from plankiln.plugins.onnx_body import DOMAIN


def fuse_add_norm(model: ir.Model) -> int:
    """Rewrites every RMSNormalization(Add(residual, x)) of two computed values; returns how many."""
    count = 0
    for norm in list(model.graph):
        add = g.producer(norm.inputs[0], "Add") if g.is_op(norm, "RMSNormalization") else None
        if add is None or any(value is None or reference_of(value) for value in add.inputs):
            continue
        residual, x = add.inputs
        total, normed = add.outputs[0], norm.outputs[0]
        if total.is_graph_output() or normed.is_graph_output():
            continue
        new_normed, new_total = g.like(normed), g.like(total)
        fused = g.node(
            ADD_RMS_NORMALIZATION,
            [x, residual, norm.inputs[1]],
            [new_normed, new_total],
            {"epsilon": norm.attributes["epsilon"].as_float()},
            layer=g.layer_of(add),
            domain=DOMAIN,
        )
        g.replace(model.graph, add, fused, {total: new_total, normed: new_normed})
        count += 1
    if count:
        g.add_function(model, add_rms_normalization_function())
        g.tidy(model)
    return count
