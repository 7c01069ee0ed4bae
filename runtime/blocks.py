"""The KV cache as a pool of blocks: who holds which, and how many there are."""

from __future__ import annotations

import numpy as np

from plankiln.errors import EngineError
from plankiln.runtime.engine import Capabilities, Int32Array

_MAX_BLOCKS = 2**31 - 1  # block tables are int32


class BlockPool:
    """Reference counts of `total` blocks, numbered from 0; free + used = total at all times.

    `allocate` and `release` end in plain stores with no call between them, so an interrupt (which Python raises at
    calls and loops) finds all of it done or nothing; so do the callers that store what they are given.
    """

    def __init__(self, total: int) -> None:
        self.references = np.zeros(total, np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def can_allocate(self, count: int) -> bool:
        return count <= self.free

    def allocate(self, count: int) -> Int32Array:
        """Take `count` free blocks, each with one reference: int32 [count]. Ask can_allocate first."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        first = self.free - count
        blocks = np.array(self._free[first:][::-1], np.int32)
        self.references[blocks] = 1
        del self._free[first:]
        return blocks

    def release(self, blocks: Int32Array) -> None:
        """Drop one reference of each block; those without any are free again."""
        counts = self.references[blocks]
        if not counts.all():
            raise ValueError(f"block {blocks[counts == 0][0]} is already free")
        freed = blocks[counts == 1][::-1].tolist()
        self.references[blocks] = counts - 1
        self._free += freed


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens of one sequence."""
    return -(-tokens // block_size)


def default_blocks(capabilities: Capabilities, available_bytes: int | None) -> int:
    """Blocks for `max_sequences` full contexts, or as many as `kv_memory` and half of `available_bytes` hold.

    available_bytes: None where the system does not tell, and then no bound.
    Raises EngineError when not even one block fits.
    """
    wanted = capabilities.max_sequences * blocks_for(capabilities.max_context, capabilities.block_size)
    block_bytes = capabilities.block_size * capabilities.kv_bytes_per_token
    affordable = wanted if available_bytes is None else available_bytes // 2 // block_bytes
    budgeted = capabilities.kv_memory // block_bytes
    if not budgeted:
        raise EngineError(
            f"a KV block takes {block_bytes} bytes, more than the plan's budget of {capabilities.kv_memory}",
            hint="build with a larger `engine.kv_memory`, or set `kv_blocks`",
        )
    if not affordable:
        raise EngineError(
            f"a KV block takes {block_bytes} bytes, more than half of the {available_bytes} available",
            hint="free memory on this machine, or set `kv_blocks`",
        )
    return min(wanted, affordable, budgeted)


def pool_size(capabilities: Capabilities, available_bytes: int | None, wanted: int | None) -> int:
    """`wanted` blocks, or `default_blocks`. Raises EngineError when it is no number or more than memory holds."""
    if wanted is None:
        return default_blocks(capabilities, available_bytes)
    if isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or wanted < 1:
        raise EngineError(f"`kv_blocks` must be a whole number of at least 1, not `{wanted!r}`")
    block_bytes = capabilities.block_size * capabilities.kv_bytes_per_token
    most = min(_MAX_BLOCKS, _MAX_BLOCKS if available_bytes is None else available_bytes // block_bytes)
    if wanted > most:
        raise EngineError(
            f"no memory for {wanted} KV blocks ({int(wanted) * block_bytes / 2**20:.0f} MiB)",
            hint=f"set `kv_blocks` to {most} or less, or leave it out",
        )
    return int(wanted)
