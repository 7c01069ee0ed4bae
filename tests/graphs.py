"""Runs an exported graph through ONNX Runtime, step by step, with a paged KV cache that the caller plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from plankiln.compiler.families import DecoderSpec, decoder_spec

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    dtype: str = "F32"


class MemoryCheckpoint:
    """Random float32 weights of a spec's shapes: norms around one, everything else around zero."""

    origin = Path("memory")
    quantization = None

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.arrays: dict[str, Floats] = {}
        for name, shape in spec.expected_tensors().items():
            array = random.standard_normal(shape).astype(np.float32) * np.float32(0.3)
            self.arrays[name] = array + 1 if name.endswith("norm.weight") else array
        self.tensors = {name: Header(array.shape) for name, array in self.arrays.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Floats:
        return self.arrays[name][start:stop]


TINY: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def tiny_spec(family: str, **config: Any) -> DecoderSpec:
    """The spec of a two-layer model of odd sizes."""
    return decoder_spec({**TINY, "model_type": family, **config})


def session(model: ir.Model) -> ort.InferenceSession:
    """`model` (small: it is serialised whole) ready to run, with graph optimisations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


_NOT_SHARED = (ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN)


def with_float_caches(model: ir.Model) -> ir.Model:
    """A copy that takes and gives float32 for caches of types that numpy and ONNX Runtime do not share."""
    model = model.clone()
    graph = model.graph
    for index, inner in enumerate(graph.inputs):
        if inner.dtype not in _NOT_SHARED:
            continue
        name, inner.name = str(inner.name), f"{inner.name}.narrow"
        outer = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=inner.shape)
        node = ir.node("Cast", [outer], {"to": int(inner.dtype)})
        for user, at in list(inner.uses()):
            user.replace_input_with(at, node.outputs[0])
        graph.inputs[index] = outer
        graph.insert_before(graph[0], node)
    for index, inner in enumerate(graph.outputs):
        if inner.dtype not in _NOT_SHARED:
            continue
        name, inner.name = str(inner.name), f"{inner.name}.narrow"
        outer = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=inner.shape)
        graph.append(ir.node("Cast", [inner], {"to": int(ir.DataType.FLOAT)}, outputs=[outer]))
        graph.outputs[index] = outer
    return model


@dataclass
class Held:
    """One sequence in the cache: its blocks and how many tokens stand in them."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class PagedRunner:
    """A graph with its cache of `blocks` blocks; blocks that no sequence owns hold NaN, so that reading one shows."""

    def __init__(self, model: ir.Model, blocks: int, seed: int = 0) -> None:
        model = with_float_caches(model)
        self._session = session(model)
        names = [str(value.name) for value in model.graph.inputs]
        self._cache_names = [name for name in names if "_cache." in name]
        self.caches: dict[str, Any] = {}
        for value in model.graph.inputs:
            if value.name in self._cache_names:
                shape = [int(size) for size in value.shape[1:]]  # type: ignore[index,arg-type]
                integers = value.dtype == ir.DataType.INT8
                filler = np.int8(-77) if integers else np.float32(np.nan)
                self.caches[value.name] = np.full((blocks, *shape), filler)
                self.block_size = shape[0]
        self._free = list(np.random.default_rng(seed).permutation(blocks))
        self.sequences: dict[str, Held] = {}

    def feeds(
        self, tokens: Mapping[str, Sequence[int]], logit_rows: Sequence[int] | None = None, padding: int = 0
    ) -> dict[str, Any]:
        """Inputs of a step that appends `tokens` to each named sequence; blocks are taken as they are needed."""
        for name, new in tokens.items():
            sequence = self.sequences.setdefault(name, Held())
            while len(sequence.blocks) * self.block_size < sequence.length + len(new):
                sequence.blocks.append(int(self._free.pop()))
        owners = [self.sequences[name] for name in tokens]
        counts = [len(new) for new in tokens.values()]
        rows = sum(counts)
        width = max(len(owner.blocks) for owner in owners) + 1
        table = np.full((len(owners), width), -1, np.int32)
        for row, owner in zip(table, owners, strict=True):
            row[: len(owner.blocks)] = owner.blocks
        ids = [token for new in tokens.values() for token in new] + [0] * padding
        positions = [owner.length + i for owner, n in zip(owners, counts, strict=True) for i in range(n)] + [
            0
        ] * padding
        return {
            "input_ids": np.array(ids, np.int32),
            "positions": np.array(positions, np.int32),
            "seq_starts": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array([owner.length for owner in owners], np.int32),
            "block_table": table,
            "logit_rows": np.arange(rows, dtype=np.int32) if logit_rows is None else np.array(logit_rows, np.int32),
        }

    def step(
        self, tokens: Mapping[str, Sequence[int]], logit_rows: Sequence[int] | None = None, padding: int = 0
    ) -> Floats:
        """Run one step; logits [R, vocab], by default of every row that is not padding."""
        feeds = self.feeds(tokens, logit_rows, padding)
        outputs = dict(
            zip(
                [o.name for o in self._session.get_outputs()], self._session.run(None, feeds | self.caches), strict=True
            )
        )
        for name in self._cache_names:
            self.caches[name] = outputs[name.replace("_cache.", "_cache_out.")]
        for name, new in tokens.items():
            self.sequences[name].length += len(new)
        logits: Floats = outputs["logits"]
        return logits
