"""DecoderSpec → ONNX graph under the contract of docs/architecture.md, with every weight a Reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from plankiln.checkpoint import EMBEDDING, LM_HEAD
from plankiln.compiler import graph as g
from plankiln.compiler.activations import add_bfloat16, add_dynamic_quantize, add_functions, prepare_input
from plankiln.compiler.blocks import BlockReference
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.formats import Format, KvFormat
from plankiln.compiler.graph import BFLOAT16, FLOAT, INT32, INT64, Dimension
from plankiln.compiler.kv_cache import cache_inputs, cache_outputs, cache_scales, check_scales
from plankiln.compiler.matrices import MatrixReference, add_matrix
from plankiln.compiler.precision import Precision
from plankiln.compiler.weights import Slice, WeightSource, stored_dimensions, whole
from plankiln.errors import ExportError
from plankiln.plugins.onnx_body import DOMAIN, OPSET
from plankiln.plugins.paged_attention import schema
from plankiln.plugins.paged_attention.onnx_function import paged_attention_function, storage_of
from plankiln.quantize.formats import BlockFormat

IR_VERSION = 11


def export_decoder(
    spec: DecoderSpec,
    checkpoint: WeightSource,
    *,
    weights: Precision | Format,
    max_context: int,
    kv_cache: KvFormat,
    block_size: int,
) -> ir.Model:
    """The decoder's graph. Reads headers, and scales of activations: seconds and megabytes for any model size.

    weights: how matrices and embeddings are stored (norms and biases stay float32); kv_cache: format of the cache
    inputs; max_context, block_size in tokens. A KV output's metadata "alias" names the input whose memory it is, a
    node's "layer" its layer. `Checkpoint.validate(spec.expected_tensors())` must have passed. Raises ExportError when
    max_context is beyond the model's reach, a matrix is not whole groups of its low-bit format, or an fp8 cache has no
    scales.
    """
    if not 1 <= max_context <= spec.max_position:
        raise ExportError(
            f"`max_context` {max_context} is outside the model's 1 … {spec.max_position} positions",
            hint=f"set `engine.max_context` to {spec.max_position} or less",
        )
    precision = Precision(weights) if isinstance(weights, str) else weights
    precision.check(checkpoint, [name for name, shape in spec.expected_tensors().items() if len(shape) == 2])
    check_scales(checkpoint, kv_cache)
    caches = cache_inputs(spec, kv_cache, block_size)
    return _Exporter(spec, checkpoint, precision, max_context, kv_cache, _step_inputs(), caches).model()


def save_onnx(model: ir.Model, path: Path, *, inline_bytes: int = 256) -> None:
    """Write `path` and, beside it, `path`.data with every tensor of more than `inline_bytes`, streamed one by one.

    The protobuf never holds weights, so its 2 GB limit is never met. An existing pair is replaced.
    """
    ir.save(model, path, external_data=path.name + ".data", size_threshold_bytes=inline_bytes)


def _step_inputs() -> dict[str, ir.Value]:
    shapes: dict[str, tuple[Dimension, ...]] = {
        "input_ids": ("tokens",),
        "positions": ("tokens",),
        "seq_starts": ("sequences_plus_one",),
        "context_lens": ("sequences",),
        "block_table": ("sequences", "table_width"),
        "logit_rows": ("rows",),
    }
    return {name: g.value(name, INT32, shape) for name, shape in shapes.items()}


@dataclass
class _Exporter:
    """Builds one graph, layer by layer, in execution order. `caches` has the cache inputs of each layer by name."""

    spec: DecoderSpec
    checkpoint: WeightSource
    precision: Precision
    max_context: int
    kv_cache: KvFormat
    step: dict[str, ir.Value]
    caches: list[dict[str, ir.Value]]

    def __post_init__(self) -> None:
        inputs = [*self.step.values(), *(cache for layer in self.caches for cache in layer.values())]
        self.graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET, DOMAIN: 1}, name=self.spec.architecture)

    def model(self) -> ir.Model:
        hidden, position_ids = self._embed(), self._position_ids()
        cos, sin = self._rope_tables()
        cache_outputs: list[ir.Value] = []
        for layer in range(self.spec.layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, f"{prefix}input_layernorm", layer)
            attended, caches = self._attention(normed, prefix, layer, cos, sin, position_ids)
            cache_outputs += caches
            hidden = self._residual(hidden, attended, f"{prefix}attn_residual", layer)
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm", layer)
            hidden = self._residual(hidden, self._mlp(normed, prefix, layer), f"{prefix}mlp_residual", layer)
        self.graph.outputs.extend([self._logits(hidden), *cache_outputs])
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="plankiln")
        g.add_function(model, paged_attention_function(do_rotary=False, storage=self._storage()))
        add_functions(model)
        return model

    def _storage(self) -> schema.Storage:
        return storage_of(self.caches[0]["k_cache"].dtype)

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
        self.graph.append(g.node(op_type, inputs, [output], attributes, layer=layer))
        return output

    def _matrix(self, tensor: str, *, transposed: bool = False) -> MatrixReference:
        form = self.precision.of(self.checkpoint, tensor)
        if isinstance(form, str):
            return whole(self.checkpoint, tensor, form, transposed=transposed)
        parts = (Slice(tensor, 0, stored_dimensions(self.checkpoint, tensor)[0]),)
        return BlockReference(self.checkpoint, parts, form, transposed, self.precision.clip)

    def _vector(self, tensor: str) -> ir.Value:
        return g.weight(self.graph, tensor, whole(self.checkpoint, tensor, "float32"))

    def _embed(self) -> ir.Value:
        shape, table = ("tokens", self.spec.hidden_size), self._matrix(EMBEDDING)
        if isinstance(table, BlockReference) or table.dtype == "float32":
            inputs = [add_matrix(self.graph, EMBEDDING, table, None), self.step["input_ids"]]
            return self._op("Gather", inputs, "embedded", shape, None, axis=0)
        inputs = [g.weight(self.graph, EMBEDDING, table), self.step["input_ids"]]
        narrow = self._op("Gather", inputs, "embedded.bf16", shape, None, BFLOAT16, axis=0)
        return self._op("Cast", [narrow], "embedded", shape, None, to=FLOAT)

    def _position_ids(self) -> ir.Value:
        wide = self._op("Cast", [self.step["positions"]], "positions.int64", ("tokens",), None, INT64, to=INT64)
        axes = g.int64s(self.graph, [0])
        return self._op("Unsqueeze", [wide, axes], "position_ids", (1, "tokens"), None, INT64)

    def _rope_tables(self) -> tuple[ir.Value, ir.Value]:
        spec, shape = self.spec, (self.max_context, self.spec.head_dim // 2)

        def table(name: str, index: int) -> ir.Value:
            def compute() -> ir.TensorProtocol:
                return ir.tensor(spec.rope.tables(spec.head_dim, shape[0])[index], name=name)

            tensor = ir.LazyTensor(compute, dtype=FLOAT, shape=ir.Shape(shape), name=name)
            made = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(shape), const_value=tensor)
            self.graph.register_initializer(made)
            return made

        return table("cos_cache", 0), table("sin_cache", 1)

    def _norm(self, x: ir.Value, name: str, layer: int | None) -> ir.Value:
        inputs = [x, self._vector(f"{name}.weight")]
        epsilon = self.spec.norm_epsilon
        return self._op("RMSNormalization", inputs, name, g.dimensions(x), layer, axis=-1, epsilon=epsilon)

    def _residual(self, residual: ir.Value, x: ir.Value, name: str, layer: int) -> ir.Value:
        return self._op("Add", [residual, x], name, ("tokens", self.spec.hidden_size), layer)

    def _linear(
        self, x: ir.Value, name: str, layer: int | None, *, bias: bool, rows: str = "tokens", weight: str | None = None
    ) -> ir.Value:
        """x @ W (+ b). `weight` names the checkpoint tensor where it is not `name`.weight (a tied head)."""
        tensor = weight or f"{name}.weight"
        reference = self._matrix(tensor, transposed=True)
        stored = self.precision.input_of(self.checkpoint, tensor)
        x = prepare_input(self.graph, x, stored, name, layer)
        if isinstance(reference, BlockReference):
            dynamic = self.precision.activations != "declared" and stored.rounding is None
            if dynamic and isinstance(reference.format, BlockFormat) and not reference.per_channel:
                x = add_dynamic_quantize(self.graph, x, reference.format.group, layer)
        elif reference.dtype == "bfloat16":
            x = add_bfloat16(self.graph, x, layer)
        matrix = add_matrix(self.graph, f"{name}.weight", reference, layer)
        shape = (rows, reference.shape[1])
        product = self._op("MatMul", [x, matrix], f"{name}.product" if bias else name, shape, layer)
        return self._op("Add", [product, self._vector(f"{name}.bias")], name, shape, layer) if bias else product

    def _attention(
        self, x: ir.Value, prefix: str, layer: int, cos: ir.Value, sin: ir.Value, position_ids: ir.Value
    ) -> tuple[ir.Value, list[ir.Value]]:
        spec, prefix = self.spec, f"{prefix}self_attn."
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
        given = self.caches[layer]
        scales = cache_scales(self.graph, self.checkpoint, self.kv_cache, layer)
        attended = g.value(f"{prefix}attn", FLOAT, ("tokens", spec.heads * spec.head_dim))
        caches = cache_outputs(given, layer)
        step = [self.step[name] for name in ("seq_starts", "context_lens", "block_table")]
        scale_caches = [value for name, value in given.items() if "scale" in name]
        self.graph.append(
            g.node(
                schema.OP_TYPE,
                [query, key, value, given["k_cache"], given["v_cache"], *step, *scales, *scale_caches],
                [attended, *caches],
                attributes.as_dict(),
                layer=layer,
                domain=DOMAIN,
                overload=schema.overload(do_rotary=False, storage=self._storage()),
            )
        )
        return self._linear(attended, f"{prefix}o_proj", layer, bias=spec.o_bias), caches

    def _head_norm(self, x: ir.Value, name: str, heads: int, layer: int) -> ir.Value:
        width = self.spec.head_dim
        per_head = g.int64s(self.graph, [-1, heads, width])
        split = self._op("Reshape", [x, per_head], f"{name}.heads", ("tokens", heads, width), layer)
        normed = self._norm(split, name, layer)
        packed = g.int64s(self.graph, [-1, heads * width])
        return self._op("Reshape", [normed, packed], f"{name}.packed", ("tokens", heads * width), layer)

    def _rotate(
        self, x: ir.Value, name: str, heads: int, layer: int, cos: ir.Value, sin: ir.Value, position_ids: ir.Value
    ) -> ir.Value:
        width, axes = heads * self.spec.head_dim, g.int64s(self.graph, [0])
        batch = self._op("Unsqueeze", [x, axes], f"{name}.batch", (1, "tokens", width), layer)
        inputs = [batch, cos, sin, position_ids]
        turned = self._op("RotaryEmbedding", inputs, f"{name}.turned", (1, "tokens", width), layer, num_heads=heads)
        return self._op("Squeeze", [turned, axes], name, ("tokens", width), layer)

    def _mlp(self, x: ir.Value, prefix: str, layer: int) -> ir.Value:
        bias, prefix, shape = self.spec.mlp_bias, f"{prefix}mlp.", ("tokens", self.spec.intermediate_size)
        gate = self._linear(x, f"{prefix}gate_proj", layer, bias=bias)
        up = self._linear(x, f"{prefix}up_proj", layer, bias=bias)
        sigmoid = self._op("Sigmoid", [gate], f"{prefix}sigmoid", shape, layer)
        silu = self._op("Mul", [gate, sigmoid], f"{prefix}silu", shape, layer)
        product = self._op("Mul", [silu, up], f"{prefix}act", shape, layer)
        return self._linear(product, f"{prefix}down_proj", layer, bias=bias)

    def _logits(self, hidden: ir.Value) -> ir.Value:
        normed = self._norm(hidden, "model.norm", None)
        inputs = [normed, self.step["logit_rows"]]
        wanted = self._op("Gather", inputs, "wanted", ("rows", self.spec.hidden_size), None, axis=0)
        head = EMBEDDING if self.spec.tied_embedding else LM_HEAD
        logits = self._linear(wanted, "lm_head", None, bias=False, rows="rows", weight=head)
        logits.name = "logits"
        return logits
