"""Graph rewrites, one a file. Each takes a model, changes it in place and returns how many places it rewrote."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from plankiln.compiler.passes.fold_prescale import fold_prescale
from plankiln.compiler.passes.fuse_add_norm import fuse_add_norm
from plankiln.compiler.passes.fuse_gate_up import fuse_gate_up
from plankiln.compiler.passes.fuse_qkv import fuse_qkv
from plankiln.compiler.passes.fuse_rope import fuse_rope
from plankiln.compiler.passes.fuse_silu_mul import fuse_silu_mul

Pass = Callable[[ir.Model], int]
PASSES: tuple[Pass, ...] = (fold_prescale, fuse_qkv, fuse_gate_up, fuse_silu_mul, fuse_add_norm, fuse_rope)


def apply_passes(model: ir.Model) -> ir.Model:
    """Run every pass, in order, on `model` itself; returns it. A pattern that does not occur is left alone."""
    for rewrite in PASSES:
        rewrite(model)
    return model
