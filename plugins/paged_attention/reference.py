"""`plankiln::PagedAttention` in plain numpy, row by row and head by head in float64: the oracle of every kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plankiln.plugins.paged_attention.schema import Attributes

Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Cache = NDArray[Any]


class Rotary(NamedTuple):
    """cos_cache, sin_cache [P, D/2] and positions [T]: the inputs that only do_rotary = 1 has."""

    cos: Floats
    sin: Floats
    positions: Int32s


def paged_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    k_cache: Cache,
    v_cache: Cache,
    seq_starts: Int32s,
    context_lens: Int32s,
    block_table: Int32s,
    attributes: Attributes,
    rotary: Rotary | None = None,
) -> tuple[Floats, Cache, Cache]:
    """(attn [T, H*D], k_cache_out, v_cache_out); shapes as in `schema`. The caches are copied, in their own type."""
    if bool(attributes.do_rotary) != (rotary is not None):
        raise ValueError("rotary inputs are given exactly when do_rotary is 1")
    head_dim = k_cache.shape[3]
    queries = query.reshape(len(query), attributes.num_heads, head_dim)
    keys = key.reshape(len(key), attributes.kv_num_heads, head_dim)
    values = value.reshape(len(value), attributes.kv_num_heads, head_dim)
    if rotary is not None:
        queries, keys = rotate(queries, rotary), rotate(keys, rotary)
    k_out, v_out, attn = k_cache.copy(), v_cache.copy(), np.zeros(queries.shape, np.float32)
    for s, context in enumerate(context_lens):
        start, stop = int(seq_starts[s]), int(seq_starts[s + 1])
        for row in range(start, stop):
            block, slot = _slot(block_table[s], int(context) + row - start, k_cache.shape[1])
            k_out[block, slot], v_out[block, slot] = keys[row], values[row]
        for row in range(start, stop):
            position = int(context) + row - start
            attn[row] = _attend(queries[row], k_out, v_out, block_table[s], position, attributes)
    return attn.reshape(query.shape), k_out, v_out


def rotate(heads: Floats, rotary: Rotary) -> Floats:
    """[T, heads, D] with each head's halves turned against each other by its row's angles, in float32."""
    cos, sin = rotary.cos[rotary.positions][:, None, :], rotary.sin[rotary.positions][:, None, :]
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _slot(blocks: Int32s, position: int, block_size: int) -> tuple[int, int]:
    return int(blocks[position // block_size]), position % block_size


def _attend(
    query: Floats, k_cache: Cache, v_cache: Cache, blocks: Int32s, position: int, attributes: Attributes
) -> Floats:
    """One row: query [H, D] over the visible slots of its sequence, [H, D]."""
    window = attributes.local_window_size
    first = max(0, position - window + 1) if window > 0 else 0
    slots = [_slot(blocks, p, k_cache.shape[1]) for p in range(first, position + 1)]
    keys = np.stack([k_cache[slot] for slot in slots]).astype(np.float64)  # [visible, KV, D]
    values = np.stack([v_cache[slot] for slot in slots]).astype(np.float64)
    group = attributes.num_heads // attributes.kv_num_heads
    output = np.empty_like(query)
    for head in range(attributes.num_heads):
        scores = keys[:, head // group] @ query[head].astype(np.float64) * attributes.scale
        if attributes.softcap > 0:
            scores = attributes.softcap * np.tanh(scores / attributes.softcap)
        weights = np.exp(scores - scores.max())
        output[head] = (weights / weights.sum()) @ values[:, head // group]
    return output
