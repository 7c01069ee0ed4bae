"""The numpy oracle of PagedAttention against attention written out densely, and the ONNX body against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graphs import session, with_float_caches

from plankiln.compiler import graph as g
from plankiln.plugins.onnx_body import DOMAIN, OPSET
from plankiln.plugins.paged_attention import schema
from plankiln.plugins.paged_attention.onnx_function import paged_attention_function, storage_of
from plankiln.plugins.paged_attention.reference import KvCache, Rotary, paged_attention
from plankiln.plugins.paged_attention.schema import Attributes

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 6, 3, 4, 4, 24
PLAIN = Attributes(num_heads=HEADS, kv_num_heads=KV_HEADS, scale=0.4)
VARIANTS = {
    "plain": PLAIN,
    "window": replace(PLAIN, local_window_size=3),
    "window of one": replace(PLAIN, local_window_size=1),
    "softcap": replace(PLAIN, softcap=0.7),
    "rotary": replace(PLAIN, do_rotary=1),
    "all": replace(PLAIN, do_rotary=1, softcap=1.5, local_window_size=5),
}
# (tokens in the cache, new tokens) of each sequence: prefill, chunks and decodes across the edges of blocks of 4.
BATCHES = {
    "one prefill": [(0, 7)],
    "one decode": [(9, 1)],
    "block edges": [(3, 1), (4, 1), (0, 4), (0, 5), (7, 2), (8, 8)],
    "ragged": [(0, 1), (11, 3), (5, 1), (0, 9), (2, 1)],
    "idle sequence": [(6, 0), (2, 2)],
}


def make_inputs(batch: list[tuple[int, int]], kv: Any, *, padding: int, seed: int) -> dict[str, Any]:
    """Random inputs; slots that no token stands in, and blocks that no sequence owns, are NaN (int8: their scales).

    kv: the caches' numpy type.
    """
    random = np.random.default_rng(seed)
    new = [count for _, count in batch]
    rows = sum(new) + padding
    free = list(random.permutation(BLOCKS))
    table = np.full((len(batch), 6), -7, np.int32)
    caches = [np.full((BLOCKS, BLOCK, KV_HEADS, HEAD_DIM), np.nan, np.float32) for _ in range(2)]
    for row, (context, count) in zip(table, batch, strict=True):
        for logical in range(-(-(context + count) // BLOCK)):
            row[logical] = free.pop()
        for position in range(context):
            for cache in caches:
                cache[row[position // BLOCK], position % BLOCK] = random.standard_normal((KV_HEADS, HEAD_DIM))
    caches, scales = stored(caches, kv)
    positions = [context + i for context, count in batch for i in range(count)] + [0] * padding
    angles = random.standard_normal((32, HEAD_DIM // 2)).astype(np.float32)
    return {
        "query": random.standard_normal((rows, HEADS * HEAD_DIM)).astype(np.float32),
        "key": random.standard_normal((rows, KV_HEADS * HEAD_DIM)).astype(np.float32),
        "value": random.standard_normal((rows, KV_HEADS * HEAD_DIM)).astype(np.float32),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "seq_starts": np.cumsum([0, *new]).astype(np.int32),
        "context_lens": np.array([context for context, _ in batch], np.int32),
        "block_table": table,
        "cos_cache": np.cos(angles),
        "sin_cache": np.sin(angles),
        "positions": np.array(positions, np.int32),
        **scales,
    }


def stored(caches: list[Any], kv: Any) -> tuple[list[Any], dict[str, Any]]:
    """float32 caches in another type, and the inputs that hold their scales."""
    if kv == ml_dtypes.float8_e4m3fn:
        scales = np.float32(0.011), np.float32(0.006)
        with np.errstate(invalid="ignore"):
            codes = [np.clip(c / s, -448, 448).astype(kv) for c, s in zip(caches, scales, strict=True)]
        return codes, {"k_scale": scales[0], "v_scale": scales[1]}
    if kv == np.int8:
        peaks = [np.abs(cache).max(-1) for cache in caches]
        codes = [np.rint(np.nan_to_num(c * 127 / p[..., None])).astype(kv) for c, p in zip(caches, peaks, strict=True)]
        return codes, {"k_scale_cache": peaks[0] / np.float32(127), "v_scale_cache": peaks[1] / np.float32(127)}
    return [cache.astype(kv) for cache in caches], {}


def reference(inputs: dict[str, Any], attributes: Attributes) -> tuple[Any, dict[str, Any]]:
    """The attention, and the caches after it by the names of the outputs."""
    plain = {name: inputs[name] for name in ("query", "key", "value", "seq_starts", "context_lens", "block_table")}
    scales = tuple(inputs[name] for name in inputs if "_scale" in name)
    rotary = Rotary(inputs["cos_cache"], inputs["sin_cache"], inputs["positions"]) if attributes.do_rotary else None
    cache = KvCache(inputs["k_cache"], inputs["v_cache"], scales)
    attn, after = paged_attention(**plain, cache=cache, attributes=attributes, rotary=rotary)
    made = {"k_cache_out": after.k, "v_cache_out": after.v}
    if after.k.dtype == np.int8:
        made |= {"k_scale_cache_out": after.scales[0], "v_scale_cache_out": after.scales[1]}
    return attn, made


def body_session(attributes: Attributes, kv: ir.DataType) -> ort.InferenceSession:
    """One PagedAttention node, executed through its function body."""
    types = {"float32": g.FLOAT, "int32": g.INT32, "kv": kv}
    sizes: dict[str, int] = {"block_size": BLOCK, "KV": KV_HEADS, "D": HEAD_DIM, "H*D": HEADS * HEAD_DIM}
    rotary, storage = bool(attributes.do_rotary), storage_of(kv)

    def values(operands: list[schema.Operand]) -> list[ir.Value]:
        return [g.value(o.name, types[o.type], [sizes.get(size, size) for size in o.shape]) for o in operands]

    inputs = values(schema.inputs(do_rotary=rotary, storage=storage))
    outputs = values(schema.outputs(storage))
    overload = schema.overload(do_rotary=rotary, storage=storage)
    node = g.node(schema.OP_TYPE, inputs, outputs, attributes.as_dict(), domain=DOMAIN, overload=overload)
    graph = ir.Graph(inputs, outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="attention")
    function = paged_attention_function(do_rotary=rotary, storage=storage)
    return session(with_float_caches(ir.Model(graph, ir_version=11, functions=[function])))


# Rotation may differ in float32's last bit, which can round to the neighbouring element of the cache: that changes a
# cached number by one part in `slack` of it, and the output by about as much.
KV_TYPES: dict[str, tuple[Any, ir.DataType, float]] = {
    "fp32": (np.float32, g.FLOAT, 2e-6),
    "bf16": (ml_dtypes.bfloat16, g.BFLOAT16, 2**-7),
    "fp8": (ml_dtypes.float8_e4m3fn, ir.DataType.FLOAT8E4M3FN, 2**-3),
    "int8": (np.int8, ir.DataType.INT8, 2**-6),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv", KV_TYPES)
def test_onnx_body_equals_the_reference(variant: str, kv: str) -> None:
    attributes = VARIANTS[variant]
    numpy_type, onnx_type, slack = KV_TYPES[kv]
    run = body_session(attributes, onnx_type)
    inputs_of_run = {value.name: value.type for value in run.get_inputs()}
    names = [value.name for value in run.get_outputs()]
    for seed, batch in enumerate(BATCHES.values()):
        for padding in (0, 3):
            inputs = make_inputs(batch, numpy_type, padding=padding, seed=seed)
            attn, caches = reference(inputs, attributes)
            feeds = {
                name: np.asarray(inputs[name], np.float32) if kind == "tensor(float)" else inputs[name]
                for name, kind in inputs_of_run.items()
            }
            got = dict(zip(names, run.run(None, feeds), strict=True))
            atol = 2e-6 if kv == "fp32" or not attributes.do_rotary else 5e-3 if kv == "bf16" else slack
            np.testing.assert_allclose(got.pop("attn"), attn, rtol=0, atol=atol)
            assert got.keys() == caches.keys()
            for name, array in got.items():
                mine = caches[name].astype(np.float32)
                exact = name.startswith(("k_scale", "v_scale")) or not attributes.do_rotary or kv == "fp32"
                one = 1 if array.dtype == np.int8 and not exact else 1e-6
                np.testing.assert_allclose(array.astype(np.float32), mine, rtol=1e-6 if exact else slack, atol=one)


def dense(inputs: dict[str, Any], attributes: Attributes, sequence: int) -> Any:
    """One sequence's output by textbook attention over its own contiguous keys and values."""
    start, stop = inputs["seq_starts"][sequence : sequence + 2]
    context = int(inputs["context_lens"][sequence])
    length, new = context + stop - start, slice(start, stop)

    def history(cache: str, fresh: str) -> Any:
        blocks = inputs["block_table"][sequence, : -(-length // BLOCK)]
        past = inputs[cache][blocks].reshape(-1, KV_HEADS, HEAD_DIM)[:context]
        return np.concatenate([past, inputs[fresh][new].reshape(-1, KV_HEADS, HEAD_DIM)]).astype(np.float64)

    keys, values = (
        np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (history("k_cache", "key"), history("v_cache", "value"))
    )
    query = inputs["query"][new].reshape(-1, HEADS, HEAD_DIM)
    scores = np.einsum("qhd,khd->hqk", query, keys) * attributes.scale
    if attributes.softcap:
        scores = np.tanh(scores / attributes.softcap) * attributes.softcap
    distance = np.arange(context, length)[:, None] - np.arange(length)[None, :]
    hidden = distance < 0
    if attributes.local_window_size > 0:
        hidden |= distance >= attributes.local_window_size
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(-1, HEADS * HEAD_DIM)


@pytest.mark.parametrize("variant", ["plain", "window", "window of one", "softcap"])
@pytest.mark.parametrize("batch", BATCHES)
def test_reference_equals_dense_attention(variant: str, batch: str) -> None:
    inputs = make_inputs(BATCHES[batch], np.float32, padding=2, seed=5)
    attn, _ = reference(inputs, VARIANTS[variant])
    for sequence in range(len(BATCHES[batch])):
        start, stop = inputs["seq_starts"][sequence : sequence + 2]
        np.testing.assert_allclose(attn[start:stop], dense(inputs, VARIANTS[variant], sequence), rtol=1e-5, atol=1e-6)


def test_only_owned_slots_are_written_and_padding_is_zero() -> None:
    inputs = make_inputs(BATCHES["ragged"], np.float32, padding=4, seed=9)
    attn, caches = reference(inputs, PLAIN)
    k_out = caches["k_cache_out"]
    changed = ~np.isclose(k_out, inputs["k_cache"], equal_nan=True).all(axis=(2, 3))
    expected = np.zeros_like(changed)
    for row, (context, count) in zip(inputs["block_table"], BATCHES["ragged"], strict=True):
        for position in range(context, context + count):
            expected[row[position // BLOCK], position % BLOCK] = True
    np.testing.assert_array_equal(changed, expected)
    assert not attn[-4:].any()
    assert np.isfinite(attn).all()


def test_rotation_turns_each_half_pair_by_its_angle() -> None:
    inputs = make_inputs([(0, 1)], np.float32, padding=0, seed=1)
    angle = np.float32(np.pi / 2)
    inputs["cos_cache"], inputs["sin_cache"] = np.full((32, 2), np.cos(angle)), np.full((32, 2), np.sin(angle))
    k_out = reference(inputs, VARIANTS["rotary"])[1]["k_cache_out"]
    head = inputs["key"].reshape(KV_HEADS, HEAD_DIM)
    turned = np.concatenate([-head[:, 2:], head[:, :2]], axis=1)
    np.testing.assert_allclose(k_out[inputs["block_table"][0, 0], 0], turned, atol=1e-6)


def test_the_cache_is_read_after_rounding() -> None:
    inputs = make_inputs([(0, 3)], ml_dtypes.bfloat16, padding=0, seed=2)
    rounded = dict(inputs)
    for name in ("key", "value"):
        rounded[name] = inputs[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(reference(inputs, PLAIN)[0], reference(rounded, PLAIN)[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_heads": 5},
        {"kv_num_heads": 0},
        {"local_window_size": 0},
        {"local_window_size": -2},
        {"softcap": -1.0},
        {"do_rotary": 2},
        {"rotary_interleaved": 1},
    ],
)
def test_impossible_attributes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads|local_window_size|unsupported"):
        replace(PLAIN, **wrong)


def test_rotary_inputs_come_exactly_with_do_rotary() -> None:
    inputs = make_inputs([(0, 1)], np.float32, padding=0, seed=3)
    plain = {name: inputs[name] for name in ("query", "key", "value", "seq_starts", "context_lens", "block_table")}
    with pytest.raises(ValueError, match="do_rotary"):
        paged_attention(**plain, cache=KvCache(inputs["k_cache"], inputs["v_cache"]), attributes=VARIANTS["rotary"])
