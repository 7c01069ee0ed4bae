"""The KV cache as a pool of blocks: who holds which, and how many there are."""

from __future__ import annotations

import os
from pathlib import Path

from plankiln.errors import EngineError
from plankiln.runtime.engine import Capabilities


class BlockPool:
    """Reference counts of `total` blocks, numbered from 0; free + used = total at all times."""

    def __init__(self, total: int) -> None:
        self.references = [0] * total
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

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Ask can_allocate first."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each block; those without any are free again."""
        for block in reversed(blocks):
            if not self.references[block]:
                raise ValueError(f"block {block} is already free")
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens of one sequence."""
    return -(-tokens // block_size)


def default_blocks(capabilities: Capabilities, available_bytes: int) -> int:
    """Blocks for `max_sequences` full contexts, or as many as `kv_memory` and half of `available_bytes` hold.

    Raises EngineError when not even one block fits.
    """
    wanted = capabilities.max_sequences * blocks_for(capabilities.max_context, capabilities.block_size)
    block_bytes = capabilities.block_size * capabilities.kv_bytes_per_token
    affordable = available_bytes // 2 // block_bytes
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


def available_memory() -> int:
    """Bytes this process may still use: what the kernel calls available, within the control group's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("/sys/fs/cgroup/memory.max", "/proc/meminfo"):
        try:
            text = Path(name).read_text()
        except OSError:
            continue
        if name.endswith("meminfo"):
            limits += [int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:")]
        elif text.strip().isdigit():
            limits.append(int(text))
    return min(limits)
