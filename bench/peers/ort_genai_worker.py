"""ONNX Runtime GenAI as what is measured: `ort_genai_worker.py MODEL_DIR`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as og
import worker
from losses import mean_loss


class OrtGenai:
    """Generator API: one batch of equal prompts at a time. Its Engine API does not run on CPUs."""

    def __init__(self, model: str) -> None:
        self._directory = model
        self._waiting: list[tuple[int, list[int], int]] = []
        self._generator: og.Generator | None = None
        self._running: list[int] = []
        self._left = 0

    def load(self, threads: int) -> dict[str, Any]:
        config = og.Config(self._directory)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        return {"version": og.__version__}

    def prepare(self, concurrency: int, longest: int) -> None:
        pass

    def add(self, request: int, prompt: list[int], tokens: int) -> None:
        self._waiting.append((request, prompt, tokens))

    def step(self) -> Sequence[int]:
        if self._generator is None:
            self._generator = self._begin()
        self._generator.generate_next_token()
        self._left -= 1
        if not self._left:
            self._generator = None
        return self._running

    def loss(self, ids: list[int]) -> float:
        generator = self._make(1, len(ids) + 1)
        generator.append_tokens(np.array(ids, np.int32))
        logits = generator.get_output("logits")[0]
        if len(logits) != len(ids):
            raise worker.UnsupportedError(f"it gives logits of {len(logits)} positions only")
        return mean_loss(logits[:-1], ids[1:])

    def _begin(self) -> og.Generator:
        self._running = [request for request, _, _ in self._waiting]
        prompts = [prompt for _, prompt, _ in self._waiting]
        tokens = {count for _, _, count in self._waiting}
        self._waiting = []
        if len(tokens) > 1 or len({len(prompt) for prompt in prompts}) > 1:
            raise worker.UnsupportedError("it batches requests of one length only")
        (self._left,) = tokens
        generator = self._make(len(prompts), len(prompts[0]) + self._left)
        generator.append_tokens(np.array(prompts if len(prompts) > 1 else prompts[0], np.int32))
        return generator

    def _make(self, batch: int, length: int) -> og.Generator:
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
        return og.Generator(self._model, params)


if __name__ == "__main__":
    worker.main(OrtGenai(sys.argv[1]))
