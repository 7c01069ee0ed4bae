"""Which tokens of which requests the next step computes.

One token budget per step is shared by decodes, which go first, and prefill chunks, first come first served.
A request is admitted only when the pool has every block it can ever need (prompt + max_tokens), so a running
request never waits for memory, nothing deadlocks and nothing is computed twice. At most `slots` requests run
at a time: every decode then fits in every step, and the oldest prefill gets at least one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from plankiln.errors import RequestError
from plankiln.runtime.blocks import BlockPool, blocks_for
from plankiln.runtime.engine import Capabilities, Step
from plankiln.runtime.request import Request


@dataclass(frozen=True)
class Chunk:
    """The next `count` tokens of a request, which start at `request.computed`."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk's last row predicts a new token."""
        return self.count == self.request.pending


@dataclass(frozen=True)
class Plan:
    """One step on paper: the waiting requests it admits, and the chunks it computes in packed order."""

    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]


class Scheduler:
    """Waiting and running requests over a block pool.

    A step is: `remove` what `take_cancelled` gives, `plan` (changes nothing), `admit`, compute, then a
    `Request.commit` or `remove` for each chunk. Each of these happens whole or not at all, wherever an interrupt comes.
    """

    def __init__(self, capabilities: Capabilities, pool: BlockPool) -> None:
        self.pool = pool
        self.slots = min(capabilities.max_sequences, capabilities.max_tokens_per_step, capabilities.max_logit_rows)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._capabilities = capabilities
        self._cancelled: deque[int] = deque()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def room(self, prompt_length: int, max_tokens: int | None) -> int:
        """The most tokens that a prompt of this length may generate: `max_tokens`, or all that fit when it is None.

        Raises RequestError when the request could never run: it exceeds the plan's context or the whole pool.
        """
        context, size = self._capabilities.max_context, self._capabilities.block_size
        capacity = self.pool.total * size
        most = min(context - prompt_length, capacity + 1 - prompt_length)
        if 1 <= (max_tokens or 1) <= most:
            return max_tokens or most
        asked = f"the prompt has {prompt_length} tokens"
        if max_tokens:
            asked += f" and max_tokens is {max_tokens}, together {prompt_length + max_tokens}"
        if prompt_length + (max_tokens or 1) > context:
            limit = f"but the plan's context is {context}"
            hint = "shorten the prompt, or build with a larger `engine.max_context`"
        else:
            need = blocks_for(prompt_length + (max_tokens or 1) - 1, size)
            limit = f"which takes {need} KV blocks of {size} tokens, but the pool has {self.pool.total}"
            hint = "shorten the prompt, or raise `kv_blocks`"
        if most >= 1:
            hint = f"lower max_tokens to {most} or less, " + hint
        raise RequestError(f"{asked}, {limit}", hint=hint)

    def submit(self, request: Request) -> None:
        """Queue a request that `room` has allowed."""
        self.waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Have a request in the next `take_cancelled`; unknown and finished ones are ignored. Any thread may."""
        self._cancelled.append(request_id)

    def take_cancelled(self) -> Iterator[Request]:
        """Requests cancelled since the last call, for the caller to remove; an interrupted call is made up for."""
        ids = list(self._cancelled)
        wanted = set(ids)
        if wanted:
            yield from [request for request in chain(self.running.values(), self.waiting) if request.id in wanted]
        for _ in ids:
            self._cancelled.popleft()

    def plan(self) -> Plan:
        """The next step, empty only when there is nothing to do. Nothing is changed."""
        chunks = [Chunk(r, 1) for r in self.running.values() if r.generated]
        budget = self._capabilities.max_tokens_per_step - len(chunks)
        admitted: list[Request] = []
        blocks, slots = self.pool.free, self.slots - len(self.running)
        for request in chain((r for r in self.running.values() if not r.generated), self.waiting):
            if not budget:
                break
            if request.id not in self.running:
                blocks -= self.blocks_needed(request)
                slots -= 1
                if blocks < 0 or slots < 0:
                    break
                admitted.append(request)
            chunks.append(Chunk(request, min(budget, request.pending)))
            budget -= chunks[-1].count
        return Plan(tuple(admitted), tuple(chunks))

    def admit(self, plan: Plan) -> None:
        """Give the plan's new requests their blocks and let them run."""
        for request in plan.admitted:
            need = self.blocks_needed(request)
            request.blocks = self.pool.allocate(need)
            self.running[request.id] = request
            del self.waiting[0]

    def remove(self, request: Request) -> None:
        """Take a request out, finished or not, and free its blocks."""
        if request.id in self.running:
            self.pool.release(request.blocks)
            del self.running[request.id]
        else:
            at = self.waiting.index(request)
            del self.waiting[at]

    def blocks_needed(self, request: Request) -> int:
        return blocks_for(request.cache_tokens, self._capabilities.block_size)


class StepBuffers:
    """Arrays of the largest step, made once; `pack` fills their beginnings."""

    def __init__(self, capabilities: Capabilities) -> None:
        tokens, sequences = capabilities.max_tokens_per_step, capabilities.max_sequences
        self._ids = np.zeros(tokens, np.int32)
        self._positions = np.zeros(tokens, np.int32)
        self._starts = np.zeros(sequences + 1, np.int32)
        self._context = np.zeros(sequences, np.int32)
        self._table = np.zeros((sequences, blocks_for(capabilities.max_context, capabilities.block_size)), np.int32)
        self._rows = np.zeros(sequences, np.int32)
        self._counting = np.arange(capabilities.max_context, dtype=np.int32)

    def pack(self, chunks: tuple[Chunk, ...]) -> Step:
        """The step that computes the chunks; its arrays are views that the next call overwrites.

        logit_rows has one row per chunk that samples, in the chunks' order.
        """
        end = wanted = 0
        for s, chunk in enumerate(chunks):
            request, start, first = chunk.request, end, chunk.request.computed
            end += chunk.count
            self._ids[start:end] = request.tokens[first : first + chunk.count]
            self._positions[start:end] = self._counting[first : first + chunk.count]
            self._starts[s + 1] = end
            self._context[s] = first
            self._table[s, : len(request.blocks)] = request.blocks
            if chunk.samples:
                self._rows[wanted] = end - 1
                wanted += 1
        count = len(chunks)
        return Step(
            input_ids=self._ids[:end],
            positions=self._positions[:end],
            seq_starts=self._starts[: count + 1],
            context_lens=self._context[:count],
            block_table=self._table[:count],
            logit_rows=self._rows[:wanted],
        )
