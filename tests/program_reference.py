"""The numpy twin of a compiled plan: interprets a Program call by call, for comparison with the generated code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plankiln.compiler.cpu.program import Buffer, Call, Int8, Program, Weight
from plankiln.compiler.formats import KvFormat
from plankiln.quantize.formats import Blocks, Fp8Weight, fake_quantize_e4m3, quantize_activations, quantize_static
from plankiln.runtime.engine import Step

Array = NDArray[Any]


def rounded(x: Array, element: str | Int8) -> Array:
    """x as the element type can hold it, in float32."""
    if isinstance(element, Int8):
        q, scale = quantize_activations(x.astype(np.float32), element.group)
        return (q.reshape(*scale.shape, -1) * scale[..., None]).reshape(x.shape)
    return x.astype(ml_dtypes.bfloat16).astype(np.float32) if element == "bfloat16" else x.astype(np.float32)


def cached(x: Array, kv: KvFormat, scale: float) -> Array:
    """x [heads, dim] as the cache holds it. scale: the layer's, for fp8."""
    if kv in ("fp8", "fp8_cast"):
        return fake_quantize_e4m3(x.astype(np.float32), scale)
    return rounded(x, {"fp32": "float32", "bf16": "bfloat16", "int8": Int8(x.shape[1])}[kv])


@dataclass
class ReferencePlan:
    """Runs steps of `program` in float64 between the roundings the plan declares.

    int8: whether activations are rounded to int8 where the plan does so.
    k, v: the cache, [layer][block, slot, head, dim].
    """

    program: Program
    blocks: int
    block_size: int
    int8: bool = True
    k: list[Array] = field(default_factory=list)
    v: list[Array] = field(default_factory=list)
    values: dict[Buffer, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.blocks, self.block_size, self.program.kv_heads, self.program.head_dim)
        self.k = [np.full(shape, np.nan) for _ in range(self.program.layers)]
        self.v = [np.full(shape, np.nan) for _ in range(self.program.layers)]

    def execute(self, step: Step) -> Array:
        for call in self.program.calls:
            getattr(self, call.kernel)(call, step, dict(call.params))
        return self.values[self.program.calls[-1].write[0]]

    def put(self, buffer: Buffer, value: Array) -> None:
        assert value.shape[1] == buffer.width
        element = "float32" if isinstance(buffer.element, Int8) and not self.int8 else buffer.element
        self.values[buffer] = rounded(value, element)

    @staticmethod
    def weight(weight: Weight) -> Array:
        read = weight.read()
        return (read.dequantize() if isinstance(read, Blocks | Fp8Weight) else read).astype(np.float64)

    def embed(self, call: Call, step: Step, _: Any) -> None:
        self.put(call.write[0], self.weight(call.weights[0])[step.input_ids])

    def norm(self, x: Array, weight: Weight, epsilon: float) -> Array:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * self.weight(weight).reshape(-1)

    def rms_norm(self, call: Call, step: Step, params: Any) -> None:
        x = self.values[call.read[0]].astype(np.float64)
        self.put(call.write[0], self.norm(x, call.weights[0], params["epsilon"]))

    def add_rms_norm(self, call: Call, step: Step, params: Any) -> None:
        residual, x = call.read
        self.put(residual, self.values[residual] + self.values[x])
        self.put(call.write[0], self.norm(self.values[residual].astype(np.float64), call.weights[0], params["epsilon"]))

    def head_norm(self, call: Call, step: Step, p: Any) -> None:
        x = self.values[call.read[0]]
        part = x[:, p["offset"] : p["offset"] + p["heads"] * p["dim"]].reshape(len(x), p["heads"], p["dim"])
        x[:, p["offset"] : p["offset"] + p["heads"] * p["dim"]] = self.norm(
            part.astype(np.float64), call.weights[0], p["epsilon"]
        ).reshape(len(x), -1)

    def linear(self, call: Call, step: Step, params: Any) -> None:
        product = self.values[call.read[0]].astype(np.float64) @ self.weight(call.weights[0]).T
        self.put_columns(call.write[0], product, params["offset"])

    def put_columns(self, buffer: Buffer, value: Array, offset: int) -> None:
        """Some columns of a float buffer; the first ones make it."""
        if value.shape[1] == buffer.width:
            self.put(buffer, value)
            return
        if offset == 0:
            self.put(buffer, np.full((len(value), buffer.width), np.nan))
        self.values[buffer][:, offset : offset + value.shape[1]] = value

    def prescaled(self, call: Call, params: Any) -> tuple[Array, float | None]:
        """What a rounding kernel rounds, and its static scale."""
        x, weights = self.values[call.read[0]].astype(np.float32), list(call.weights)
        if params["prescale"]:
            x = x * self.weight(weights.pop(0)).reshape(-1).astype(np.float32)
        return x, float(self.weight(weights[0]).reshape(())) if params["static"] else None

    def quantize_rows(self, call: Call, step: Step, params: Any) -> None:
        x, scale = self.prescaled(call, params)
        if scale is not None and self.int8:
            self.values[call.write[0]] = quantize_static(x, scale).astype(np.float32) * np.float32(scale)
        else:
            self.put(call.write[0], x)

    def round_e4m3_rows(self, call: Call, step: Step, params: Any) -> None:
        self.put(call.write[0], fake_quantize_e4m3(*self.prescaled(call, params)))

    def scale_rows(self, call: Call, step: Step, _: Any) -> None:
        self.put(call.write[0], self.values[call.read[0]] * self.weight(call.weights[0]).reshape(-1))

    def narrow_rows(self, call: Call, step: Step, _: Any) -> None:
        self.put(call.write[0], self.values[call.read[0]])

    def add_bias(self, call: Call, step: Step, params: Any) -> None:
        columns = slice(params["offset"], params["offset"] + params["width"])
        self.values[call.write[0]][:, columns] += self.weight(call.weights[0]).reshape(-1)

    def silu_mul(self, call: Call, step: Step, _: Any) -> None:
        gate, up = np.split(self.values[call.read[0]].astype(np.float64), 2, axis=1)
        self.put(call.write[0], gate / (1 + np.exp(-gate)) * up)

    def gather_rows(self, call: Call, step: Step, _: Any) -> None:
        self.put(call.write[0], self.values[call.read[0]][step.logit_rows])

    def rope_and_cache(self, call: Call, step: Step, p: Any) -> None:
        program, x = self.program, self.values[call.write[0]].astype(np.float64)
        dim = program.head_dim
        cos, sin = (self.weight(w)[step.positions][:, None] for w in call.weights[:2])
        scales = [float(self.weight(w).reshape(())) for w in call.weights[2:]] or [1.0, 1.0]

        def rotate(part: Array) -> Array:
            a, b = part[..., : dim // 2], part[..., dim // 2 :]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        q = rotate(x[:, p["q"] : p["q"] + program.heads * dim].reshape(len(x), -1, dim)) * p["scale"]
        k = rotate(x[:, p["k"] : p["k"] + program.kv_heads * dim].reshape(len(x), -1, dim))
        v = x[:, p["v"] : p["v"] + program.kv_heads * dim].reshape(len(x), -1, dim)
        x[:, p["q"] : p["q"] + program.heads * dim] = q.reshape(len(x), -1)
        self.put(call.write[0], x)
        for s, row, place in self.rows(step):
            block = step.block_table[s, place // self.block_size], place % self.block_size
            self.k[p["layer"]][block] = cached(k[row], program.kv_format, scales[0])
            self.v[p["layer"]][block] = cached(v[row], program.kv_format, scales[1])

    def attention(self, call: Call, step: Step, p: Any) -> None:
        program, x = self.program, self.values[call.read[0]].astype(np.float64)
        dim, group = program.head_dim, program.heads // program.kv_heads
        out = np.zeros((len(x), program.heads * dim))
        for s, row, place in self.rows(step):
            first = max(0, place - p["window"] + 1) if p["window"] >= 0 else 0
            seen = np.arange(first, place + 1)
            slots = step.block_table[s][seen // self.block_size], seen % self.block_size
            keys, values = self.k[p["layer"]][slots], self.v[p["layer"]][slots]
            for h in range(program.heads):
                scores = keys[:, h // group] @ x[row, p["q"] + h * dim : p["q"] + (h + 1) * dim]
                weights = np.exp(scores - scores.max())
                out[row, h * dim : (h + 1) * dim] = weights @ values[:, h // group] / weights.sum()
        self.put(call.write[0], out)

    @staticmethod
    def rows(step: Step) -> list[tuple[int, int, int]]:
        """(sequence, packed row, cache position) of every new token."""
        return [
            (s, row, int(step.context_lens[s]) + row - int(step.seq_starts[s]))
            for s in range(len(step.context_lens))
            for row in range(step.seq_starts[s], step.seq_starts[s + 1])
        ]
