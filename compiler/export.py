"""DecoderSpec → ONNX graph under the contract of docs/architecture.md, with every weight a Reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.families import EMBEDDING, LM_HEAD, DecoderSpec
from plankiln.compiler.graph import BFLOAT16, FLOAT, INT32, INT64, Dimension
from plankiln.compiler.weights import Reference, WeightSource, WeightType, whole
from plankiln.errors import ExportError
from plankiln.plugins.onnx_body import DOMAIN, OPSET
from plankiln.plugins.paged_attention import schema
from plankiln.plugins.paged_attention.onnx_function import paged_attention_function

Format = Literal["fp32", "bf16"]
ALIAS = "alias"
IR_VERSION = 11
_WEIGHT_TYPES: dict[Format, WeightType] = {"fp32": "float32", "bf16": "bfloat16"}
_ONNX_TYPES: dict[Format, ir.DataType] = {"fp32": FLOAT, "bf16": BFLOAT16}


def export_decoder(
    spec: DecoderSpec,
    checkpoint: WeightSource,
    *,
    weights: Format,
    max_context: int,
    kv_cache: Format,
    block_size: int,
) -> ir.Model:
    """The decoder's graph. Reads headers only: seconds and megabytes for any model size.

    weights: format of matrices and embeddings (norms and biases stay float32); kv_cache: format of the cache inputs;
    max_context, block_size in tokens. A KV output's metadata "alias" names the input whose memory it is, a node's
    "layer" its layer. `Checkpoint.validate(spec.expected_tensors())` must have passed. Raises ExportError when
    max_context is beyond the model's reach.
    """
    if not 1 <= max_context <= spec.max_position:
        raise ExportError(
            f"`max_context` {max_context} is outside the model's 1 … {spec.max_position} positions",
            hint=f"set `engine.max_context` to {spec.max_position} or less",
        )
    return _Exporter(spec, checkpoint, weights, max_context, kv_cache, block_size).model()


def save_onnx(model: ir.Model, path: Path, *, inline_bytes: int = 256) -> None:
    """Write `path` and, beside it, `path`.data with every tensor of more than `inline_bytes`, streamed one by one.

    The protobuf never holds weights, so its 2 GB limit is never met. An existing pair is replaced.
    """
    ir.save(model, path, external_data=path.name + ".data", size_threshold_bytes=inline_bytes)


class _Exporter:
    """Builds one graph, layer by layer, in execution order."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: WeightSource,
        weights: Format,
        max_context: int,
        kv_cache: Format,
        block_size: int,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._weight_type = _WEIGHT_TYPES[weights]
        self._max_context = max_context
        self._rounded: dict[ir.Value, ir.Value] = {}
        cache_type, cache_shape = _ONNX_TYPES[kv_cache], ("blocks", block_size, spec.kv_heads, spec.head_dim)
        self._caches = [
            (g.value(f"k_cache.{i}", cache_type, cache_shape), g.value(f"v_cache.{i}", cache_type, cache_shape))
            for i in range(spec.layers)
        ]
        self._step = {
            name: g.value(name, INT32, shape)
            for name, shape in {
                "input_ids": ("tokens",),
                "positions": ("tokens",),
                "seq_starts": ("sequences_plus_one",),
                "context_lens": ("sequences",),
                "block_table": ("sequences", "table_width"),
                "logit_rows": ("rows",),
            }.items()
        }
        inputs = [*self._step.values(), *(cache for pair in self._caches for cache in pair)]
        self._graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET, DOMAIN: 1}, name=spec.architecture)

    def model(self) -> ir.Model:
        hidden, position_ids = self._embed(), self._position_ids()
        cos, sin = self._rope_tables()
        cache_outputs: list[ir.Value] = []
        for layer in range(self._spec.layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, f"{prefix}input_layernorm", layer)
            attended, caches = self._attention(normed, prefix, layer, cos, sin, position_ids)
            cache_outputs += caches
            hidden = self._residual(hidden, attended, f"{prefix}attn_residual", layer)
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm", layer)
            hidden = self._residual(hidden, self._mlp(normed, prefix, layer), f"{prefix}mlp_residual", layer)
        self._graph.outputs.extend([self._logits(hidden), *cache_outputs])
        model = ir.Model(self._graph, ir_version=IR_VERSION, producer_name="plankiln")
        g.add_function(model, paged_attention_function(do_rotary=False))
        return model

    def _op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        shape: Iterable[Dimension],
        layer: int | None,
        dtype: ir.DataType = FLOAT,
        **attributes: int | float | Sequence[int],
    ) -> ir.Value:
        """Append a standard op with one output."""
        output = g.value(name, dtype, shape)
        self._graph.append(g.node(op_type, inputs, [output], attributes, layer=layer))
        return output

    def _reference(self, tensor: str, dtype: WeightType, *, transposed: bool = False) -> Reference:
        return whole(self._checkpoint, tensor, dtype, transposed=transposed)

    def _vector(self, tensor: str) -> ir.Value:
        return g.weight(self._graph, tensor, self._reference(tensor, "float32"))

    def _embed(self) -> ir.Value:
        shape = ("tokens", self._spec.hidden_size)
        table = g.weight(self._graph, EMBEDDING, self._reference(EMBEDDING, self._weight_type))
        inputs = [table, self._step["input_ids"]]
        if self._weight_type == "float32":
            return self._op("Gather", inputs, "embedded", shape, None, axis=0)
        narrow = self._op("Gather", inputs, "embedded.bf16", shape, None, BFLOAT16, axis=0)
        return self._op("Cast", [narrow], "embedded", shape, None, to=FLOAT)

    def _position_ids(self) -> ir.Value:
        wide = self._op("Cast", [self._step["positions"]], "positions.int64", ("tokens",), None, INT64, to=INT64)
        axes = g.int64s(self._graph, [0])
        return self._op("Unsqueeze", [wide, axes], "position_ids", (1, "tokens"), None, INT64)

    def _rope_tables(self) -> tuple[ir.Value, ir.Value]:
        spec, shape = self._spec, (self._max_context, self._spec.head_dim // 2)

        def table(name: str, index: int) -> ir.Value:
            def compute() -> ir.TensorProtocol:
                return ir.tensor(spec.rope.tables(spec.head_dim, shape[0])[index], name=name)

            tensor = ir.LazyTensor(compute, dtype=FLOAT, shape=ir.Shape(shape), name=name)
            made = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(shape), const_value=tensor)
            self._graph.register_initializer(made)
            return made

        return table("cos_cache", 0), table("sin_cache", 1)

    def _norm(self, x: ir.Value, name: str, layer: int | None) -> ir.Value:
        inputs = [x, self._vector(f"{name}.weight")]
        epsilon = self._spec.norm_epsilon
        return self._op("RMSNormalization", inputs, name, g.dimensions(x), layer, axis=-1, epsilon=epsilon)

    def _residual(self, residual: ir.Value, x: ir.Value, name: str, layer: int) -> ir.Value:
        return self._op("Add", [residual, x], name, ("tokens", self._spec.hidden_size), layer)

    def _round(self, x: ir.Value, layer: int | None) -> ir.Value:
        """x as bf16 matrix units see it, still float32; made once for all linears that read x."""
        if x not in self._rounded:
            narrow = self._op("Cast", [x], f"{x.name}.bf16", g.dimensions(x), layer, BFLOAT16, to=BFLOAT16)
            self._rounded[x] = self._op("Cast", [narrow], f"{x.name}.rounded", g.dimensions(x), layer, to=FLOAT)
        return self._rounded[x]

    def _linear(
        self, x: ir.Value, name: str, layer: int | None, *, bias: bool, rows: str = "tokens", weight: str | None = None
    ) -> ir.Value:
        """x @ W (+ b). `weight` names the checkpoint tensor where it is not `name`.weight (a tied head)."""
        reference = self._reference(weight or f"{name}.weight", self._weight_type, transposed=True)
        matrix = g.weight(self._graph, f"{name}.weight", reference)
        shape = (rows, reference.shape[1])
        if self._weight_type == "bfloat16":
            x = self._round(x, layer)
            matrix = self._op("Cast", [matrix], f"{name}.weight.float32", reference.shape, layer, to=FLOAT)
        product = self._op("MatMul", [x, matrix], f"{name}.product" if bias else name, shape, layer)
        return self._op("Add", [product, self._vector(f"{name}.bias")], name, shape, layer) if bias else product

    def _attention(
        self, x: ir.Value, prefix: str, layer: int, cos: ir.Value, sin: ir.Value, position_ids: ir.Value
    ) -> tuple[ir.Value, list[ir.Value]]:
        spec, prefix = self._spec, f"{prefix}self_attn."
        query, key, value = (
            self._linear(x, f"{prefix}{name}_proj", layer, bias=spec.qkv_bias) for name in ("q", "k", "v")
        )
        if spec.qk_norm:
            query = self._head_norm(query, f"{prefix}q_norm", spec.heads, layer)
            key = self._head_norm(key, f"{prefix}k_norm", spec.kv_heads, layer)
        query = self._rotate(query, f"{prefix}q_rope", spec.heads, layer, cos, sin, position_ids)
        key = self._rotate(key, f"{prefix}k_rope", spec.kv_heads, layer, cos, sin, position_ids)
        attributes = schema.Attributes(
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.scale,
            local_window_size=spec.windows[layer] or -1,
        )
        k_cache, v_cache = self._caches[layer]
        attended = g.value(f"{prefix}attn", FLOAT, ("tokens", spec.heads * spec.head_dim))
        caches = [g.like(k_cache, f"k_cache_out.{layer}"), g.like(v_cache, f"v_cache_out.{layer}")]
        for output, source in zip(caches, (k_cache, v_cache), strict=True):
            output.metadata_props[ALIAS] = str(source.name)
        step = [self._step[name] for name in ("seq_starts", "context_lens", "block_table")]
        self._graph.append(
            g.node(
                schema.OP_TYPE,
                [query, key, value, k_cache, v_cache, *step],
                [attended, *caches],
                attributes.as_dict(),
                layer=layer,
                domain=DOMAIN,
            )
        )
        return self._linear(attended, f"{prefix}o_proj", layer, bias=spec.o_bias), caches

    def _head_norm(self, x: ir.Value, name: str, heads: int, layer: int) -> ir.Value:
        width = self._spec.head_dim
        per_head = g.int64s(self._graph, [-1, heads, width])
        split = self._op("Reshape", [x, per_head], f"{name}.heads", ("tokens", heads, width), layer)
        normed = self._norm(split, name, layer)
        packed = g.int64s(self._graph, [-1, heads * width])
        return self._op("Reshape", [normed, packed], f"{name}.packed", ("tokens", heads * width), layer)

    def _rotate(
        self, x: ir.Value, name: str, heads: int, layer: int, cos: ir.Value, sin: ir.Value, position_ids: ir.Value
    ) -> ir.Value:
        width, axes = heads * self._spec.head_dim, g.int64s(self._graph, [0])
        batch = self._op("Unsqueeze", [x, axes], f"{name}.batch", (1, "tokens", width), layer)
        inputs = [batch, cos, sin, position_ids]
        turned = self._op("RotaryEmbedding", inputs, f"{name}.turned", (1, "tokens", width), layer, num_heads=heads)
        return self._op("Squeeze", [turned, axes], name, ("tokens", width), layer)

    def _mlp(self, x: ir.Value, prefix: str, layer: int) -> ir.Value:
        bias, prefix, shape = self._spec.mlp_bias, f"{prefix}mlp.", ("tokens", self._spec.intermediate_size)
        gate = self._linear(x, f"{prefix}gate_proj", layer, bias=bias)
        up = self._linear(x, f"{prefix}up_proj", layer, bias=bias)
        sigmoid = self._op("Sigmoid", [gate], f"{prefix}sigmoid", shape, layer)
        silu = self._op("Mul", [gate, sigmoid], f"{prefix}silu", shape, layer)
        product = self._op("Mul", [silu, up], f"{prefix}act", shape, layer)
        return self._linear(product, f"{prefix}down_proj", layer, bias=bias)

    def _logits(self, hidden: ir.Value) -> ir.Value:
        normed = self._norm(hidden, "model.norm", None)
        inputs = [normed, self._step["logit_rows"]]
        wanted = self._op("Gather", inputs, "wanted", ("rows", self._spec.hidden_size), None, axis=0)
        head = EMBEDDING if self._spec.tied_embedding else LM_HEAD
        logits = self._linear(wanted, "lm_head", None, bias=False, rows="rows", weight=head)
        logits.name = "logits"
        return logits
