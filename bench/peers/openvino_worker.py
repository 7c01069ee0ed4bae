"""OpenVINO GenAI as what is measured: `openvino_worker.py MODEL_DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import worker
from losses import mean_loss


class OpenvinoGenai:
    """The continuous-batching pipeline. Perplexity comes from the same model files in plain OpenVINO, for the
    pipeline gives no logits."""

    def __init__(self, model: str) -> None:
        self._directory = model
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def load(self, threads: int) -> dict[str, Any]:
        self._properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(self._directory, scheduler, "CPU", self._properties)
        return {"version": openvino_genai.get_version()}

    def prepare(self, concurrency: int, longest: int) -> None:
        pass

    def add(self, request: int, prompt: list[int], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._handles[request] = self._pipeline.add_request(request, ids, config)
        self._left[request] = tokens

    def step(self) -> Sequence[int]:
        self._pipeline.step()
        got: list[int] = []
        for request, handle in list(self._handles.items()):
            if handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                got += [request] * count
                self._left[request] -= count
                if not self._left[request]:
                    del self._handles[request]
        return got

    def loss(self, ids: list[int]) -> float:
        model = openvino.Core().compile_model(Path(self._directory) / "openvino_model.xml", "CPU", self._properties)
        count = len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = {name for port in model.inputs for name in port.names}
        result = model({name: value for name, value in feeds.items() if name in names})
        logits = result["logits"][0]
        if len(logits) != count:
            raise worker.UnsupportedError(f"it gives logits of {len(logits)} positions only")
        return mean_loss(logits[:-1], ids[1:])


if __name__ == "__main__":
    worker.main(OpenvinoGenai(sys.argv[1]))
