"""The block pool: free + used = total, whatever happens."""

from __future__ import annotations

import pytest
from engines import capabilities
from hypothesis import given
from hypothesis import strategies as st

from plankiln.errors import EngineError
from plankiln.runtime.blocks import BlockPool, blocks_for, default_blocks
from plankiln.runtime.engine import Int32Array


@given(total=st.integers(1, 20), data=st.data())
def test_free_and_used_are_always_all(total: int, data: st.DataObject) -> None:
    pool = BlockPool(total)
    tables: list[Int32Array] = []
    for want in data.draw(st.lists(st.integers(-3, 8))):
        if want < 0 and tables:
            pool.release(tables.pop(want % len(tables)))
        elif want >= 0 and pool.can_allocate(want):
            tables.append(pool.allocate(want))
        held = [block for table in tables for block in table.tolist()]
        assert len(set(held)) == len(held) == pool.used
        assert pool.free + pool.used == pool.total == total
        assert pool.references.tolist() == [held.count(block) for block in range(total)]


def test_too_many_and_twice_are_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="already free"):
        pool.release(blocks)
    assert pool.free == 3


def test_default_size_holds_every_context_or_half_the_memory() -> None:
    limits = capabilities(block_size=16, max_sequences=4, max_context=100)
    assert blocks_for(100, 16) == 7
    assert default_blocks(limits, 1 << 40) == default_blocks(limits, None) == 28
    block_bytes = 16 * limits.kv_bytes_per_token
    assert default_blocks(limits, 20 * block_bytes) == 10
    with pytest.raises(EngineError, match="more than half"):
        default_blocks(limits, block_bytes)


def test_the_cache_keeps_to_its_budget_of_bytes() -> None:
    limits = capabilities(block_size=16, kv_memory=5 * 16 * 16 + 15)
    assert default_blocks(limits, 1 << 40) == 5
    with pytest.raises(EngineError, match="more than the plan's budget of 100"):
        default_blocks(capabilities(block_size=16, kv_memory=100), 1 << 40)
