"""The CPU engine: loads a compiled plan through its C interface (plugins/cpu/abi.h) and runs steps on it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.errors import BundleError, EngineError
from plankiln.host import usable_cores
from plankiln.runtime.engine import Capabilities, FloatArray, Int32Array, Step

ABI = 2
MAX_THREADS = 256
SPIN = 2_000  # polls before a waiting thread parks, some tens of microseconds

_i32, _i64, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Info(ctypes.Structure):
    _fields_ = [
        *((name, _i32) for name in ("abi", "layers", "kv_heads", "head_dim", "kv_row_bytes", "vocab")),
        ("max_context", _i32),
        ("arena_bytes_per_token", _i64),
        ("weight_bytes", _i64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("weights", _ptr),
        ("arena", _ptr),
        ("max_tokens", _i64),
        *((n, _i32) for n in ("tokens", "sequences", "blocks_per_sequence", "wanted", "block_size")),
        *((n, _ptr) for n in ("input_ids", "positions", "seq_starts", "context_lens", "block_table", "logit_rows")),
        *((n, _ptr) for n in ("k_cache", "v_cache", "logits")),
    ]


class ThreadPool:
    """The process's worker threads. They live in the first plan that is loaded and are lent to every other.

    One step runs at a time: `run` waits for a step that another thread of the process has begun.
    """

    _current: ThreadPool | None = None
    _lock = threading.Lock()

    def __init__(self, plan: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self.users = 0
        self._plan = plan
        self._handle = self._start()

    def _start(self) -> int:
        handle: int | None = self._plan.pk_pool_create(self.threads, SPIN if self.threads <= usable_cores() else 0)
        if not handle:
            raise EngineError(f"{self.threads} threads could not be started", "thread pool", "lower `threads`")
        return handle

    @classmethod
    def join(cls, plan: ctypes.CDLL, threads: int | None) -> ThreadPool:
        """The pool, for one more user. A size other than the present one is possible only when nobody uses it.

        Raises EngineError for a size outside 1 … MAX_THREADS, or one that differs from a pool in use.
        """
        if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
            raise EngineError(f"`threads` must be a whole number, 1 … {MAX_THREADS}, not `{threads!r}`")
        with cls._lock:
            pool = cls._current
            if pool is None or (pool.users == 0 and pool.threads != (threads or usable_cores())):
                if pool is not None and pool._handle:
                    pool._plan.pk_pool_destroy(pool._handle)
                    cls._current = None
                pool = cls._current = cls(plan, threads or usable_cores())
            elif threads not in (None, pool.threads):
                raise EngineError(
                    f"`threads` is {threads}, but the process's pool has {pool.threads} and is in use",
                    hint="load every bundle with the same `threads`, or close the others first",
                )
            pool.users += 1
            return pool

    def leave(self) -> None:
        """One user fewer."""
        self.users -= 1

    def run(self, plan: ctypes.CDLL, step: _Step) -> None:
        """One step of a plan on all threads."""
        with self._lock:
            if not self._handle:
                self._handle = self._start()
            plan.pk_run(self._handle, ctypes.byref(step))

    @classmethod
    def _forget(cls) -> None:
        """In a forked child the workers are gone: the next step starts its own."""
        cls._lock = threading.Lock()
        if cls._current is not None:
            cls._current._handle = 0


os.register_at_fork(after_in_child=ThreadPool._forget)


def _open_plan(code: Path) -> ctypes.CDLL:
    try:
        plan = ctypes.CDLL(str(code))
        plan.pk_plan_info.restype = ctypes.POINTER(_Info)
        plan.pk_run.argtypes = [_ptr, ctypes.POINTER(_Step)]
        plan.pk_run.restype = None
        plan.pk_pool_create.argtypes = [_i32, _i32]
        plan.pk_pool_create.restype = _ptr
        plan.pk_pool_destroy.argtypes = [_ptr]
        plan.pk_pool_destroy.restype = None
    except (OSError, AttributeError) as error:
        raise BundleError(f"the plan cannot be loaded: {error}", str(code), "build the bundle again here") from None
    return plan


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """nbytes of memory that starts on a cache line; pages are touched only when used."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class CpuEngine:
    """Engine over one compiled plan. Not thread-safe: one step at a time.

    code: the plan's shared object. weights: uint8 [weight_bytes], 64-byte aligned (an mmapped weights.bin is).
    capabilities: limits the plan was packaged with. threads: size of the process's pool, by default the affinity.
    """

    def __init__(
        self, code: Path, weights: NDArray[np.uint8], capabilities: Capabilities, threads: int | None = None
    ) -> None:
        self._plan = _open_plan(code)
        self._info = self._plan.pk_plan_info().contents
        if self._info.abi != ABI:
            raise BundleError(
                f"the plan speaks interface {self._info.abi}, this runtime {ABI}",
                str(code),
                "build the bundle again with this version of plankiln",
            )
        self._check_capabilities(capabilities, weights, code)
        self._capabilities = capabilities
        self._weights = weights
        self._pool = ThreadPool.join(self._plan, threads)
        self._leave = weakref.finalize(self, self._pool.leave)
        self._arena = _aligned(self._info.arena_bytes_per_token * capabilities.max_tokens_per_step)
        self._logits = np.empty((capabilities.max_logit_rows, capabilities.vocab_size), np.float32)
        self._cache: list[NDArray[np.uint8]] = []
        self._blocks = 0
        self._step = _Step(
            weights=weights.ctypes.data,
            arena=self._arena.ctypes.data,
            max_tokens=capabilities.max_tokens_per_step,
            block_size=capabilities.block_size,
            logits=self._logits.ctypes.data,
        )
        self._open = True

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def allocate_kv(self, blocks: int) -> None:
        """Make the cache: `blocks` blocks in every layer. Earlier contents are dropped."""
        self._check_open()
        info, size = self._info, self._capabilities.block_size
        nbytes = blocks * size * info.kv_heads * info.kv_row_bytes
        self._cache = []
        try:
            self._cache = [_aligned(nbytes) for _ in range(2 * info.layers)]
        except MemoryError:
            raise EngineError(
                f"no memory for {blocks} KV blocks ({2 * info.layers * nbytes / 2**20:.0f} MiB)",
                "KV cache",
                "lower `engine.kv_memory` in the recipe, or pass fewer `kv_blocks`",
            ) from None
        pointers = (_ptr * len(self._cache))(*(array.ctypes.data for array in self._cache))
        self._pointers = pointers
        self._step.k_cache = ctypes.addressof(pointers)
        self._step.v_cache = ctypes.addressof(pointers) + info.layers * ctypes.sizeof(_ptr)
        self._blocks = blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""
        self._check_open()
        for source, destination in pairs:
            if not (0 <= source < self._blocks and 0 <= destination < self._blocks):
                raise EngineError(f"block {source} → {destination} of {self._blocks}", "copy_blocks")
            for array in self._cache:
                blocks = array.reshape(self._blocks, -1)
                blocks[destination] = blocks[source]

    def execute(self, step: Step) -> FloatArray:
        """Run one step; logits [R, vocab] float32, a view that the next step overwrites."""
        self._check_open()
        c, s = self._capabilities, self._step
        sequences = len(step.seq_starts) - 1
        tokens, wanted = int(step.seq_starts[-1]), len(step.logit_rows)
        self._check_step(step, sequences, tokens, wanted)
        s.tokens, s.sequences, s.wanted = tokens, sequences, wanted
        s.blocks_per_sequence = step.block_table.shape[1]
        s.input_ids, s.positions = step.input_ids.ctypes.data, step.positions.ctypes.data
        s.seq_starts, s.context_lens = step.seq_starts.ctypes.data, step.context_lens.ctypes.data
        s.block_table, s.logit_rows = step.block_table.ctypes.data, step.logit_rows.ctypes.data
        self._pool.run(self._plan, s)
        return self._logits[:wanted, : c.vocab_size]

    def close(self) -> None:
        """Drop the cache and the arena; the plan's code stays mapped (its threads may be lent to others)."""
        self._leave()
        self._open = False
        self._cache = []
        self._arena = self._logits = np.empty(0, np.uint8)  # type: ignore[assignment]

    def _check_capabilities(self, limits: Capabilities, weights: NDArray[np.uint8], code: Path) -> None:
        """The limits, which come from a manifest, must be those the code was compiled for."""
        info = self._info
        kv_bytes = 2 * info.layers * info.kv_heads * info.kv_row_bytes
        for what, has, needs in (
            ("bytes of weights", weights.nbytes, info.weight_bytes),
            ("bytes from a cache line to the weights", weights.ctypes.data % 64, 0),
            ("vocabulary entries", limits.vocab_size, info.vocab),
            ("KV bytes per token", limits.kv_bytes_per_token, kv_bytes),
            ("tokens of context", limits.max_context, info.max_context),
            ("tokens left over in a block of 16", limits.block_size % 16, 0),
        ):
            if has != needs:
                raise BundleError(
                    f"{has} {what} where the compiled plan has {needs}", str(code), "build the bundle again"
                )

    def _check_open(self) -> None:
        if not self._open:
            raise EngineError("the engine is closed", "engine")

    def _check_step(self, step: Step, sequences: int, tokens: int, wanted: int) -> None:
        """Everything the native code relies on: a wrong step is an EngineError, never a wild read."""
        c = self._capabilities
        for name, array in vars(step).items():
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise EngineError(f"`{name}` is not a C-contiguous int32 array", "step")
        if not 0 < tokens <= c.max_tokens_per_step or tokens > len(step.input_ids) or tokens > len(step.positions):
            raise EngineError(f"{tokens} tokens (limit {c.max_tokens_per_step})", "step")
        if wanted > min(tokens, c.max_logit_rows) or _outside(step.logit_rows, tokens):
            raise EngineError(f"{wanted} logit rows of {tokens} tokens (limit {c.max_logit_rows})", "step")
        if sequences != len(step.context_lens) or sequences != len(step.block_table) or step.seq_starts[0]:
            raise EngineError("`seq_starts`, `context_lens` and `block_table` disagree", "step")
        lengths = np.diff(step.seq_starts)
        ends = step.context_lens.astype(np.int64) + lengths
        if (lengths < 0).any() or (step.context_lens < 0).any() or ends.max(initial=0) > c.max_context:
            raise EngineError(f"a sequence outside 0 … {c.max_context}", "step")
        if _outside(step.input_ids[:tokens], c.vocab_size) or _outside(step.positions[:tokens], c.max_context):
            raise EngineError("a token or position out of range", "step")
        needed = -(-ends // c.block_size)
        width = step.block_table.shape[1]
        used = step.block_table[np.arange(width) < needed[:, None]]
        if needed.max(initial=0) > width or _outside(used, self._blocks):
            raise EngineError(f"a block outside the pool of {self._blocks}", "step")


def _outside(values: Int32Array | NDArray[Any], limit: int) -> bool:
    return bool(values.size) and (int(values.min()) < 0 or int(values.max()) >= limit)
