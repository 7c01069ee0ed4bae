"""`plankiln::PagedAttention` in plain numpy, row by row and head by head in float64: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plankiln.plugins.paged_attention.schema import Attributes

Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Cache = NDArray[Any]

LARGEST_E4M3 = 448.0
SMALLEST_PEAK = 1e-30  # below it a head's values count as zero


class Rotary(NamedTuple):
    """cos_cache, sin_cache [P, D/2] and positions [T]: the inputs that only do_rotary = 1 has."""

    cos: Floats
    sin: Floats
    positions: Int32s


@dataclass(frozen=True)
class KvCache:
    """k, v [N, block_size, KV, D] in their own type. scales: of keys and of values; () for float caches, a float each
    for float8_e4m3fn, and float32 [N, block_size, KV] each for int8."""

    k: Cache
    v: Cache
    scales: tuple[Any, ...] = ()

    def copy(self) -> KvCache:
        """The same in memory of its own."""
        return KvCache(self.k.copy(), self.v.copy(), tuple(np.copy(scale) for scale in self.scales))

    def write(self, slot: tuple[int, int], key: Floats, value: Floats) -> None:
        """Round one token's key and value [KV, D] into their slot."""
        for i, (cache, heads) in enumerate(((self.k, key), (self.v, value))):
            if cache.dtype == np.int8:
                cache[slot], self.scales[i][slot] = quantize_heads(heads)
            elif self.scales:
                cache[slot] = np.clip(heads / np.float32(self.scales[i]), -LARGEST_E4M3, LARGEST_E4M3)
            else:
                cache[slot] = heads

    def read(self, slots: list[tuple[int, int]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What stands in the slots: keys and values [slots, KV, D]."""
        blocks, places = np.array(slots).T
        keys, values = (cache[blocks, places].astype(np.float64) for cache in (self.k, self.v))
        if self.k.dtype == np.int8:
            k_scale, v_scale = (scale[blocks, places][..., None] for scale in self.scales)
            return keys * k_scale, values * v_scale
        k_scale, v_scale = self.scales or (1.0, 1.0)
        return keys * k_scale, values * v_scale


def quantize_heads(heads: Floats) -> tuple[NDArray[np.int8], Floats]:
    """[KV, D] → int8 [KV, D] and scales [KV]: max|x| / 127 of each head, in float32."""
    peak = np.abs(heads).max(-1)
    inverse = np.divide(np.float32(127.0), peak, out=np.zeros_like(peak), where=peak >= SMALLEST_PEAK)
    return np.rint(heads * inverse[:, None]).astype(np.int8), peak * np.float32(1.0 / 127.0)


def paged_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    cache: KvCache,
    seq_starts: Int32s,
    context_lens: Int32s,
    block_table: Int32s,
    attributes: Attributes,
    rotary: Rotary | None = None,
) -> tuple[Floats, KvCache]:
    """(attn [T, H*D], the cache after it); shapes as in `schema`. The given cache stays as it is."""
    if bool(attributes.do_rotary) != (rotary is not None):
        raise ValueError("rotary inputs are given exactly when do_rotary is 1")
    block_size, head_dim = cache.k.shape[1], cache.k.shape[3]
    queries = query.reshape(len(query), attributes.num_heads, head_dim)
    keys = key.reshape(len(key), attributes.kv_num_heads, head_dim)
    values = value.reshape(len(value), attributes.kv_num_heads, head_dim)
    if rotary is not None:
        queries, keys = rotate(queries, rotary), rotate(keys, rotary)
    cache, attn = cache.copy(), np.zeros(queries.shape, np.float32)
    for s, context in enumerate(context_lens):
        start, stop = int(seq_starts[s]), int(seq_starts[s + 1])
        for row in range(start, stop):
            cache.write(_slot(block_table[s], int(context) + row - start, block_size), keys[row], values[row])
        for row in range(start, stop):
            attn[row] = _attend(queries[row], cache, block_table[s], int(context) + row - start, attributes)
    return attn.reshape(query.shape), cache


def rotate(heads: Floats, rotary: Rotary) -> Floats:
    """[T, heads, D] with each head's halves turned against each other by its row's angles, in float32."""
    cos, sin = rotary.cos[rotary.positions][:, None, :], rotary.sin[rotary.positions][:, None, :]
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _slot(blocks: Int32s, position: int, block_size: int) -> tuple[int, int]:
    return int(blocks[position // block_size]), position % block_size


def _attend(query: Floats, cache: KvCache, blocks: Int32s, position: int, attributes: Attributes) -> Floats:
    """One row: query [H, D] over the visible slots of its sequence, [H, D]."""
    window = attributes.local_window_size
    first = max(0, position - window + 1) if window > 0 else 0
    keys, values = cache.read([_slot(blocks, p, cache.k.shape[1]) for p in range(first, position + 1)])
    group = attributes.num_heads // attributes.kv_num_heads
    output = np.empty_like(query)
    for head in range(attributes.num_heads):
        scores = keys[:, head // group] @ query[head].astype(np.float64) * attributes.scale
        if attributes.softcap > 0:
            scores = attributes.softcap * np.tanh(scores / attributes.softcap)
        weights = np.exp(scores - scores.max())
        output[head] = (weights / weights.sum()) @ values[:, head // group]
    return output
