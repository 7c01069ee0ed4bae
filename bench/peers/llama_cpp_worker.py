"""llama.cpp as what is measured: `llama_cpp_worker.py MODEL.gguf`. $LLAMA_CPP_LIB_PATH names the built libraries.

The loop is the one of its server: every running sequence's next token and whole prompts share a batch. There is no
HTTP here, and the most likely token is taken straight from the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import worker
from llama_cpp import llama_cpp as lib
from losses import mean_loss

_BATCH = 2048
_UBATCH = 512


@dataclass
class _Sequence:
    request: int
    tokens: list[int]
    left: int
    position: int = 0


class LlamaCpp:
    """A context per number of sequences, so that a single stream does not pay for the memory of 32."""

    def __init__(self, model: str) -> None:
        self._path = model
        self._context: Any = None
        self._shape = (0, 0)
        self._waiting: list[_Sequence] = []
        self._running: dict[int, _Sequence] = {}

    def load(self, threads: int) -> dict[str, Any]:
        self._threads = threads
        lib.llama_log_set(_silent, None)
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(self._path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"cannot load {self._path}")
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)
        b = self._batch
        self._arrays = [np.ctypeslib.as_array(a, (_BATCH,)) for a in (b.token, b.pos, b.n_seq_id, b.logits)]
        self.prepare(1, 512)
        return {"version": "llama-cpp-python 0.3.36"}

    def prepare(self, concurrency: int, longest: int) -> None:
        if self._shape[0] == concurrency and self._shape[1] >= longest:
            return
        if self._context:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx = concurrency * -(-longest // 256) * 256
        params.n_seq_max = concurrency
        params.n_batch, params.n_ubatch = _BATCH, _UBATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._shape = (concurrency, longest)

    def add(self, request: int, prompt: list[int], tokens: int) -> None:
        self._waiting.append(_Sequence(request, prompt, tokens))

    def step(self) -> Sequence[int]:
        chosen: list[tuple[int, list[int]]] = [(slot, s.tokens) for slot, s in self._running.items()]
        room = _BATCH - len(chosen)
        free = [slot for slot in range(self._shape[0]) if slot not in self._running]
        while self._waiting and free and len(self._waiting[0].tokens) <= room:
            sequence, slot = self._waiting.pop(0), free.pop(0)
            self._running[slot] = sequence
            chosen.append((slot, sequence.tokens))
            room -= len(sequence.tokens)
        got = []
        for slot, token in zip((slot for slot, _ in chosen), self._decode(chosen), strict=True):
            sequence = self._running[slot]
            got.append(sequence.request)
            sequence.position += len(sequence.tokens)
            sequence.tokens = [token]
            sequence.left -= 1
            if not sequence.left:
                lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), slot, -1, -1)
                del self._running[slot]
        return got

    def loss(self, ids: list[int]) -> float:
        self.prepare(1, len(ids))
        count = self._fill([(0, ids)], 0)
        self._arrays[3][:count] = 1
        self._run(count)
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (count, self._vocab))
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, -1, -1)
        return mean_loss(logits[:-1], ids[1:])

    def _decode(self, chosen: list[tuple[int, list[int]]]) -> list[int]:
        """The most likely token after each sequence's new tokens."""
        positions = [self._running[slot].position for slot, _ in chosen]
        self._run(self._fill(chosen, *positions))
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (len(chosen), self._vocab))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best

    def _fill(self, chosen: list[tuple[int, list[int]]], *positions: int) -> int:
        token, position, owners, wanted = self._arrays
        end = 0
        for (slot, ids), start in zip(chosen, positions, strict=True):
            first, end = end, end + len(ids)
            token[first:end] = ids
            position[first:end] = np.arange(start, start + len(ids))
            owners[first:end] = 1
            wanted[first:end] = 0
            wanted[end - 1] = 1
            for i in range(first, end):
                self._batch.seq_id[i][0] = slot
        return end

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        if status := lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")


@lib.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


if __name__ == "__main__":
    worker.main(LlamaCpp(sys.argv[1]))
