"""The contract between the scheduler and whatever executes a plan (CPU, TensorRT, a test's script)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Capabilities:
    """Limits a plan was built for. Sizes are in tokens; `kv_memory` is what the cache may take, in bytes."""

    kv: Literal["paged", "linear"]
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    max_sequences: int
    max_tokens_per_step: int
    max_context: int
    max_logit_rows: int
    kv_memory: int
    vocab_size: int


@dataclass(frozen=True)
class Step:
    """One packed forward pass over T new tokens of S sequences; all arrays are C-contiguous int32.

    input_ids, positions [T]: the new tokens, sequence after sequence.
    seq_starts [S+1]: sequence s owns rows seq_starts[s] … seq_starts[s+1]; rows past seq_starts[S] are padding.
    context_lens [S]: tokens of s already in the cache.
    block_table [S, B]: physical block of each logical block (entries past a sequence's need are ignored).
    logit_rows [R]: packed rows whose logits are wanted, R ≤ min(T, max_logit_rows).
    """

    input_ids: Int32Array
    positions: Int32Array
    seq_starts: Int32Array
    context_lens: Int32Array
    block_table: Int32Array
    logit_rows: Int32Array


class Engine(Protocol):
    """Executes steps over a KV cache that it owns and the scheduler addresses by block number."""

    @property
    def capabilities(self) -> Capabilities: ...

    def allocate_kv(self, blocks: int) -> None:
        """Make (or remake) the cache with `blocks` blocks. Raises EngineError when memory does not suffice."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer: copy-on-write."""

    def execute(self, step: Step) -> FloatArray:
        """Run one step; returns logits [R, vocab] float32, valid until the next call."""

    def close(self) -> None:
        """Free everything; further calls raise EngineError."""
