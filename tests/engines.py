"""Engines for tests: logits are a function of a sequence's tokens as read back through its paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from plankiln.errors import EngineError
from plankiln.runtime.engine import Capabilities, FloatArray, Int32Array, Step

VOCAB = 33
_POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, np.uint64))


def capabilities(
    *,
    block_size: int = 4,
    max_sequences: int = 8,
    max_tokens_per_step: int = 64,
    max_context: int = 64,
    max_logit_rows: int = 16,
    kv_memory: int = 1 << 30,
    vocab_size: int = VOCAB,
) -> Capabilities:
    return Capabilities(
        kv="paged",
        kv_dtype="fp32",
        kv_bytes_per_token=16,
        block_size=block_size,
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens_per_step,
        max_context=max_context,
        max_logit_rows=max_logit_rows,
        kv_memory=kv_memory,
        vocab_size=vocab_size,
    )


class FunctionEngine:
    """logits row = function(tokens of its sequence up to that row).

    The tokens come out of the cache blocks that the step's table names, so a block that is shared by mistake, freed
    too early or skipped shows as other tokens. A step outside the contract is an AssertionError.
    """

    def __init__(self, function: Callable[[Int32Array], FloatArray], limits: Capabilities | None = None) -> None:
        self.capabilities = limits or capabilities()
        self.function = function
        self.steps: list[int] = []
        self.closed = False

    def allocate_kv(self, blocks: int) -> None:
        self.cache = np.full((blocks, self.capabilities.block_size, 2), -1, np.int64)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("nothing shares blocks yet")

    def close(self) -> None:
        self.closed = True

    def execute(self, step: Step) -> FloatArray:
        limits, size = self.capabilities, self.capabilities.block_size
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in vars(step).values())
        sequences, tokens, starts = step.context_lens.size, step.input_ids.size, step.seq_starts
        assert 1 <= sequences <= limits.max_sequences
        assert sequences <= tokens <= limits.max_tokens_per_step
        assert step.logit_rows.size <= min(tokens, limits.max_logit_rows)
        assert starts.shape == (sequences + 1,)
        assert step.block_table.shape[0] == sequences
        assert starts[0] == 0
        assert starts[-1] == tokens
        assert step.positions.size == tokens
        self.steps.append(tokens)
        logits: dict[int, FloatArray] = {}
        seen: set[int] = set()
        for s in range(sequences):
            first, end, before = int(starts[s]), int(starts[s + 1]), int(step.context_lens[s])
            total = before + end - first
            assert end > first
            assert total <= limits.max_context
            table = step.block_table[s, : -(-total // size)]
            assert not seen & set(table.tolist())
            seen |= set(table.tolist())
            at = np.arange(before, total)
            self.cache[table[at // size], at % size] = np.stack(
                [step.input_ids[first:end], step.positions[first:end]], axis=1
            )
            known = self.cache[table].reshape(-1, 2)[:total]
            assert (known[:, 1] == np.arange(total)).all()
            for row in step.logit_rows[(step.logit_rows >= first) & (step.logit_rows < end)].tolist():
                logits[row] = self.function(known[: before + row - first + 1, 0].astype(np.int32))
        assert len(logits) == step.logit_rows.size
        if not logits:
            return np.zeros((0, limits.vocab_size), np.float32)
        return np.stack([logits[row] for row in step.logit_rows.tolist()])


def hash_logits(tokens: Int32Array) -> FloatArray:
    """Normally distributed logits [VOCAB], seeded by every token and its place."""
    key = ((tokens.astype(np.uint64) + np.uint64(1)) * _POWERS[: tokens.size]).sum()
    return np.random.Generator(np.random.Philox(key=int(key))).standard_normal(VOCAB).astype(np.float32)


def hash_engine(limits: Capabilities | None = None) -> FunctionEngine:
    return FunctionEngine(hash_logits, limits)


def scripted_engine(scripts: Mapping[int, Sequence[int]], limits: Capabilities | None = None) -> FunctionEngine:
    """After a prompt of the single token `key`, the most likely tokens are scripts[key], then 0 for ever."""
    vocab = (limits or capabilities()).vocab_size

    def function(tokens: Int32Array) -> FloatArray:
        script = scripts[int(tokens[0])]
        logits = np.zeros(vocab, np.float32)
        logits[script[tokens.size - 1] if tokens.size <= len(script) else 0] = 9
        return logits

    return FunctionEngine(function, limits)


class FailingEngine(FunctionEngine):
    """A hash engine whose execute raises on the calls (counted from 0) in `failures`."""

    def __init__(self, failures: Iterable[int], limits: Capabilities | None = None) -> None:
        super().__init__(hash_logits, limits)
        self.failures = set(failures)
        self.calls = -1

    def execute(self, step: Step) -> FloatArray:
        self.calls += 1
        if self.calls in self.failures:
            raise EngineError("the device fell off", "step")
        return super().execute(step)
