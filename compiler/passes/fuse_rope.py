"""RotaryEmbedding before an attention node → the node's own rotation (do_rotary = 1)."""

from __future__ import annotations

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.plugins.onnx_body import DOMAIN
from plankiln.plugins.paged_attention import schema
from plankiln.plugins.paged_attention.onnx_function import paged_attention_function, storage_of

_POSITIONS_INPUT = 3


def fuse_rope(model: ir.Model) -> int:
    """Rewrites every attention node whose query and key are both rotated by the same tables; returns how many."""
    storages: list[schema.Storage] = []
    for node in list(model.graph):
        if not g.is_op(node, schema.OP_TYPE, DOMAIN) or node.attributes["do_rotary"].as_int():
            continue
        query, key = _rotation(node.inputs[0]), _rotation(node.inputs[1])
        if query is None or key is None or query.inputs[1:] != key.inputs[1:]:
            continue
        positions = _positions(query)
        if positions is None:
            continue
        storages.append(_rotate_inside(node, query, key, positions))
    for storage in set(storages):
        g.add_function(model, paged_attention_function(do_rotary=True, storage=storage))
    if storages:
        g.tidy(model)
    return len(storages)


def _rotation(value: ir.Value | None) -> ir.Node | None:
    """The RotaryEmbedding in Squeeze(RotaryEmbedding(Unsqueeze(x), …))."""
    squeeze = g.producer(value, "Squeeze")
    rotation = g.producer(squeeze.inputs[0], "RotaryEmbedding") if squeeze else None
    return rotation if rotation and g.producer(rotation.inputs[0], "Unsqueeze") else None


def _positions(rotation: ir.Node) -> ir.Value | None:
    """The int32 positions in Unsqueeze(Cast(positions))."""
    unsqueeze = g.producer(rotation.inputs[_POSITIONS_INPUT], "Unsqueeze")
    cast = g.producer(unsqueeze.inputs[0], "Cast") if unsqueeze else None
    return cast.inputs[0] if cast else None


def _rotate_inside(node: ir.Node, query: ir.Node, key: ir.Node, positions: ir.Value) -> schema.Storage:
    inputs = [_unrotated(query), _unrotated(key), *node.inputs[2:], *query.inputs[1:_POSITIONS_INPUT], positions]
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    cache = node.inputs[3]
    storage = storage_of(cache.dtype if cache else None)
    node.overload = schema.overload(do_rotary=True, storage=storage)
    return storage


def _unrotated(rotation: ir.Node) -> ir.Value | None:
    unsqueeze = g.producer(rotation.inputs[0], "Unsqueeze")
    return unsqueeze.inputs[0] if unsqueeze else None
