"""`plankiln::PagedAttention` as a model-local ONNX function of standard ops, so that ONNX Runtime executes it.

Every row is scored against every sequence's cache and a mask keeps its own; that is wasteful and simple, which is what
an oracle should be. Shapes in comments use the letters of `schema`; L = S*B*block_size is all gathered cache slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from plankiln.plugins.onnx_body import Body
from plankiln.plugins.paged_attention import schema

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _Sizes:
    rows: ir.Value
    heads: ir.Value
    kv_heads: ir.Value
    group: ir.Value
    head_dim: ir.Value
    block_size: ir.Value
    sequences: ir.Value
    table_width: ir.Value


@dataclass(frozen=True)
class _Stored:
    """A cache after the write: its values and, where it has them, scales: a scalar, or [N, block_size, KV]."""

    values: ir.Value
    scale: ir.Value | None = None


@dataclass(frozen=True)
class _Rows:
    """Per packed row: whether it is not padding, its sequence, its cache position. Per sequence: its length."""

    live: ir.Value
    owner: ir.Value
    position: ir.Value
    lengths: ir.Value


def storage_of(cache: ir.DataType | None) -> schema.Storage:
    """How a cache of this element type stores numbers."""
    if cache == ir.DataType.INT8:
        return "int8"
    return "fp8" if cache == ir.DataType.FLOAT8E4M3FN else "float"


def paged_attention_function(*, do_rotary: bool, storage: schema.Storage) -> ir.Function:
    """The body for nodes with this do_rotary and a cache of this kind; schema.overload names it."""
    names = [operand.name for operand in schema.inputs(do_rotary=do_rotary, storage=storage)]
    body = Body(schema.OP_TYPE, names, overload=schema.overload(do_rotary=do_rotary, storage=storage))
    for name in ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved"):
        body.declare(name, ir.AttributeType.INT)
    sizes = _sizes(body)
    query = _heads(body, body.inputs["query"], sizes.rows, sizes.heads, sizes.head_dim)
    key = _heads(body, body.inputs["key"], sizes.rows, sizes.kv_heads, sizes.head_dim)
    value = _heads(body, body.inputs["value"], sizes.rows, sizes.kv_heads, sizes.head_dim)
    if do_rotary:
        query, key = _rotate(body, query), _rotate(body, key)
    rows = _place_rows(body, sizes)
    slots = _slots(body, sizes, rows)
    keys = _write(body, "k", key, rows, slots, storage)
    values = _write(body, "v", value, rows, slots, storage)
    attn = _attend(body, sizes, rows, query, keys, values)
    made = {"attn": attn, "k_cache_out": keys.values, "v_cache_out": values.values}
    if storage == "int8":
        assert keys.scale is not None
        assert values.scale is not None
        made |= {"k_scale_cache_out": keys.scale, "v_scale_cache_out": values.scale}
    return body.function(**made)


def _sizes(body: Body) -> _Sizes:
    def size(name: str, axis: int) -> ir.Value:
        return body.op("Shape", body.inputs[name], start=axis, end=axis + 1)

    head_dim, kv_heads = size("k_cache", 3), size("k_cache", 2)
    heads = body.op("Div", size("query", 1), head_dim)
    return _Sizes(
        rows=size("query", 0),
        heads=heads,
        kv_heads=kv_heads,
        group=body.op("Div", heads, kv_heads),
        head_dim=head_dim,
        block_size=size("k_cache", 1),
        sequences=size("block_table", 0),
        table_width=size("block_table", 1),
    )


def _shaped(body: Body, value: ir.Value, *shape: ir.Value) -> ir.Value:
    return body.op("Reshape", value, body.op("Concat", *shape, axis=0))


def _heads(body: Body, packed: ir.Value, rows: ir.Value, heads: ir.Value, head_dim: ir.Value) -> ir.Value:
    """[T, heads*D] → [T, heads, D]"""
    return _shaped(body, packed, rows, heads, head_dim)


def _range(body: Body, count: ir.Value) -> ir.Value:
    """0 … count-1 for a count of shape [1]"""
    return body.op("Range", body.scalar(0), body.op("Squeeze", count), body.scalar(1))


def _int64(body: Body, value: ir.Value) -> ir.Value:
    return body.op("Cast", value, to=ir.DataType.INT64)


def _column(body: Body, vector: ir.Value) -> ir.Value:
    return body.op("Unsqueeze", vector, body.ints(1))


def _row(body: Body, vector: ir.Value) -> ir.Value:
    return body.op("Unsqueeze", vector, body.ints(0))


def _rotate(body: Body, heads: ir.Value) -> ir.Value:
    """[T, heads, D], rotated by each row's position"""
    batch = _row(body, body.op("Transpose", heads, perm=[1, 0, 2]))
    positions = _row(body, _int64(body, body.inputs["positions"]))
    rotated = body.op("RotaryEmbedding", batch, body.inputs["cos_cache"], body.inputs["sin_cache"], positions)
    return body.op("Transpose", body.op("Squeeze", rotated, body.ints(0)), perm=[1, 0, 2])


def _place_rows(body: Body, sizes: _Sizes) -> _Rows:
    number = _range(body, sizes.rows)
    starts = _int64(body, body.inputs["seq_starts"])
    context = _int64(body, body.inputs["context_lens"])
    firsts = body.op("Slice", starts, body.ints(0), sizes.sequences)
    ends = body.op("Slice", starts, body.ints(1), body.op("Add", sizes.sequences, body.ints(1)))
    past = body.op("GreaterOrEqual", _column(body, number), _row(body, ends))
    passed = body.op("ReduceSum", _int64(body, past), body.ints(1), keepdims=0)
    owner = body.op("Min", passed, body.op("Sub", sizes.sequences, body.ints(1)))
    offset = body.op("Sub", number, body.op("Gather", firsts, owner))
    return _Rows(
        live=body.op("Less", passed, sizes.sequences),
        owner=owner,
        position=body.op("Add", body.op("Gather", context, owner), offset),
        lengths=body.op("Add", context, body.op("Sub", ends, firsts)),
    )


def _slots(body: Body, sizes: _Sizes, rows: _Rows) -> ir.Value:
    """[live rows, 2]: the block and the slot in it that each row writes"""
    position = body.op("Compress", rows.position, rows.live, axis=0)
    owner = body.op("Compress", rows.owner, rows.live, axis=0)
    logical = body.op("Concat", _column(body, owner), _column(body, body.op("Div", position, sizes.block_size)), axis=1)
    block = body.op("GatherND", _int64(body, body.inputs["block_table"]), logical)
    slot = body.op("Mod", position, sizes.block_size)
    return body.op("Concat", _column(body, block), _column(body, slot), axis=1)


def _write(body: Body, which: str, heads: ir.Value, rows: _Rows, slots: ir.Value, storage: schema.Storage) -> _Stored:
    """The cache `which` ("k" or "v") with the live rows' heads in their slots."""
    cache, live = body.inputs[f"{which}_cache"], body.op("Compress", heads, rows.live, axis=0)
    if storage == "float":
        return _Stored(body.op("ScatterND", cache, slots, body.op("CastLike", live, cache)))
    if storage == "fp8":  # ScatterND on float8 is not in ONNX Runtime; going through float32 changes no value
        scale = body.inputs[f"{which}_scale"]
        rounded = _float(body, body.op("Cast", body.op("Div", live, scale), to=ir.DataType.FLOAT8E4M3FN))
        written = body.op("ScatterND", _float(body, cache), slots, rounded)
        return _Stored(body.op("Cast", written, to=ir.DataType.FLOAT8E4M3FN), scale)
    peak = body.op("ReduceMax", body.op("Abs", live), body.ints(-1), keepdims=1)
    tiny = body.op("Less", peak, body.scalar(1e-30))
    inverse = body.op("Where", tiny, body.scalar(0.0), body.op("Div", body.scalar(127.0), peak))
    rounded = body.op("Cast", body.op("Round", body.op("Mul", live, inverse)), to=ir.DataType.INT8)
    scales = body.op("Squeeze", body.op("Mul", peak, body.scalar(1.0 / 127.0)), body.ints(-1))
    return _Stored(
        body.op("ScatterND", cache, slots, rounded),
        body.op("ScatterND", body.inputs[f"{which}_scale_cache"], slots, scales),
    )


def _float(body: Body, value: ir.Value) -> ir.Value:
    return body.op("Cast", value, to=ir.DataType.FLOAT)


def _attend(body: Body, sizes: _Sizes, rows: _Rows, query: ir.Value, keys: _Stored, values: _Stored) -> ir.Value:
    block_starts = body.op("Mul", _range(body, sizes.table_width), sizes.block_size)
    needed = body.op("Less", _row(body, block_starts), _column(body, rows.lengths))
    table = body.op("Where", needed, _int64(body, body.inputs["block_table"]), body.scalar(0))
    per_sequence = body.op("Mul", sizes.table_width, sizes.block_size)
    slot_position = _range(body, per_sequence)
    used = body.op("Less", _row(body, slot_position), _column(body, rows.lengths))  # [S, B*block_size]

    def gathered(cache: _Stored) -> ir.Value:
        """[KV, L, D] float32; slots never written hold anything, even NaN, and become zero"""
        blocks = body.op("Gather", _float(body, cache.values), table)
        flat = _shaped(body, blocks, body.ints(-1), sizes.kv_heads, sizes.head_dim)
        if cache.scale is not None and "k_scale_cache" in body.inputs:
            scales = _shaped(body, body.op("Gather", cache.scale, table), body.ints(-1), sizes.kv_heads, body.ints(1))
            flat = body.op("Mul", flat, scales)
        elif cache.scale is not None:
            flat = body.op("Mul", flat, cache.scale)
        keep = body.op("Reshape", used, body.ints(-1, 1, 1))
        clean = body.op("Where", keep, flat, body.scalar(0.0))
        return body.op("Transpose", clean, perm=[1, 0, 2])

    grouped = _shaped(body, query, sizes.rows, sizes.kv_heads, sizes.group, sizes.head_dim)
    by_kv_head = _shaped(
        body, body.op("Transpose", grouped, perm=[1, 2, 0, 3]), sizes.kv_heads, body.ints(-1), sizes.head_dim
    )
    turned = body.op("Transpose", gathered(keys), perm=[0, 2, 1])
    scores = _capped(body, body.op("Mul", body.op("MatMul", by_kv_head, turned), _float_attribute(body, "scale")))
    by_row = _shaped(body, scores, sizes.kv_heads, sizes.group, sizes.rows, body.ints(-1))  # [KV, H/KV, T, L]
    visible = _visible(body, sizes, rows, slot_position)
    weights = body.op("Softmax", body.op("Where", visible, by_row, body.scalar(_LOWEST)), axis=-1)
    flat = body.op("Reshape", weights, body.op("Concat", sizes.kv_heads, body.ints(-1), _last(body, weights), axis=0))
    mixed = _shaped(
        body, body.op("MatMul", flat, gathered(values)), sizes.kv_heads, sizes.group, sizes.rows, sizes.head_dim
    )
    packed = _shaped(body, body.op("Transpose", mixed, perm=[2, 0, 1, 3]), sizes.rows, body.ints(-1))
    return body.op("Where", _column(body, rows.live), packed, body.scalar(0.0))


def _last(body: Body, value: ir.Value) -> ir.Value:
    return body.op("Shape", value, start=-1)


def _visible(body: Body, sizes: _Sizes, rows: _Rows, slot_position: ir.Value) -> ir.Value:
    """[T, L]: the slot is the row's own sequence's, not in its future, not before its window"""
    per_sequence = body.op("Concat", sizes.sequences, _last(body, slot_position), axis=0)
    slot_owner = body.op(
        "Reshape", body.op("Expand", _column(body, _range(body, sizes.sequences)), per_sequence), body.ints(-1)
    )
    slot_at = body.op("Reshape", body.op("Expand", slot_position, per_sequence), body.ints(-1))
    same = body.op("Equal", _column(body, rows.owner), _row(body, slot_owner))
    distance = body.op("Sub", _column(body, rows.position), _row(body, slot_at))
    window = body.attribute("local_window_size", ir.AttributeType.INT)
    near = body.op("Or", body.op("Less", distance, window), body.op("Less", window, body.scalar(1)))
    past = body.op("GreaterOrEqual", distance, body.scalar(0))
    return body.op("And", same, body.op("And", near, past))


def _capped(body: Body, scores: ir.Value) -> ir.Value:
    cap = _float_attribute(body, "softcap")
    divisor = body.op("Max", cap, body.scalar(1e-30))
    capped = body.op("Mul", body.op("Tanh", body.op("Div", scores, divisor)), cap)
    return body.op("Where", body.op("Greater", cap, body.scalar(0.0)), capped, scores)


def _float_attribute(body: Body, name: str) -> ir.Value:
    return body.attribute(name, ir.AttributeType.FLOAT)
