"""The CPU engine: loads a compiled plan through its C interface (plugins/cpu/abi.h) and runs steps on it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.errors import BundleError, EngineError
from plankiln.runtime.engine import Capabilities, FloatArray, Int32Array, Step

ABI = 1
SPIN = 20_000  # polls before a waiting thread parks, some tens of microseconds

_i32, _i64, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Info(ctypes.Structure):
    _fields_ = [
        *((name, _i32) for name in ("abi", "layers", "kv_heads", "head_dim", "kv_element_bytes", "vocab")),
        ("arena_bytes_per_token", _i64),
        ("weight_bytes", _i64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("weights", _ptr),
        ("arena", _ptr),
        ("max_tokens", _i64),
        *((n, _i32) for n in ("tokens", "sequences", "blocks_per_sequence", "wanted", "kv_blocks", "block_size")),
        *((n, _ptr) for n in ("input_ids", "positions", "seq_starts", "context_lens", "block_table", "logit_rows")),
        *((n, _ptr) for n in ("k_cache", "v_cache", "logits")),
    ]


class ThreadPool:
    """The process's worker threads. They live in the first plan that is loaded and are lent to every other."""

    _shared: ThreadPool | None = None

    def __init__(self, plan: ctypes.CDLL, threads: int) -> None:
        available = len(os.sched_getaffinity(0))
        self.threads = threads
        self.handle = plan.pk_pool_create(threads, SPIN if threads <= available else 0)
        if not self.handle:
            raise EngineError(f"{threads} threads could not be started", "thread pool", "lower `threads`")
        self._plan = plan

    @classmethod
    def shared(cls, plan: ctypes.CDLL, threads: int | None) -> ThreadPool:
        """The pool, made on first use. A later caller may ask for no size, or for the size it has."""
        if cls._shared is None or cls._shared.handle is None:
            cls._shared = cls(plan, threads or len(os.sched_getaffinity(0)))
        elif threads not in (None, cls._shared.threads):
            cls._shared.close()
            cls._shared = cls(plan, threads or 1)
        return cls._shared

    def close(self) -> None:
        """Stop the workers."""
        if self.handle:
            self._plan.pk_pool_destroy(self.handle)
        self.handle = None


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
        if weights.nbytes != self._info.weight_bytes or weights.ctypes.data % 64:
            raise BundleError(
                f"weights are {weights.nbytes} bytes where the plan needs {self._info.weight_bytes}, 64-byte aligned",
                str(code),
            )
        self._capabilities = capabilities
        self._weights = weights
        self._threads = threads
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
        nbytes = blocks * size * info.kv_heads * info.head_dim * info.kv_element_bytes
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
        self._step.kv_blocks = self._blocks = blocks

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
        pool = ThreadPool.shared(self._plan, self._threads)
        self._plan.pk_run(pool.handle, ctypes.byref(s))
        return self._logits[:wanted, : c.vocab_size]

    def close(self) -> None:
        """Drop the cache and the arena; the plan's code stays mapped (its threads may be lent to others)."""
        self._open = False
        self._cache = []
        self._arena = self._logits = np.empty(0, np.uint8)  # type: ignore[assignment]

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
        ends = step.context_lens + lengths
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
