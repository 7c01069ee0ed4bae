"""The KV cache in the graph: each layer's inputs, the outputs that are the same memory, and its scales."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from plankiln.compiler import graph as g
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.formats import KV_ONNX, KvFormat
from plankiln.compiler.graph import FLOAT, Dimension
from plankiln.compiler.weights import WeightSource
from plankiln.errors import ExportError

ALIAS = "alias"


def check_scales(checkpoint: WeightSource, kv: KvFormat) -> None:
    """Raises ExportError when the format needs scales and the checkpoint has none."""
    if kv == "fp8" and (checkpoint.quantization is None or checkpoint.quantization.kv_cache is None):
        raise ExportError(
            "the checkpoint has no KV cache scales, which `kv_cache: fp8` needs",
            str(checkpoint.origin),
            "set `quantize.kv_cache` to bf16 or int8, to fp8_cast for scales of 1, or calibrate the weights with it",
        )


def cache_inputs(spec: DecoderSpec, kv: KvFormat, block_size: int) -> list[dict[str, ir.Value]]:
    """Each layer's graph inputs by the names that PagedAttention has for them, in its order."""
    slots: tuple[Dimension, ...] = ("blocks", block_size, spec.kv_heads)
    kinds = dict.fromkeys(("k_cache", "v_cache"), (KV_ONNX[kv], (*slots, spec.head_dim)))
    if kv == "int8":
        kinds |= dict.fromkeys(("k_scale_cache", "v_scale_cache"), (FLOAT, slots))
    return [{name: g.value(f"{name}.{i}", *kind) for name, kind in kinds.items()} for i in range(spec.layers)]


def cache_outputs(inputs: dict[str, ir.Value], layer: int) -> list[ir.Value]:
    """An output for each input, whose memory it is."""
    outputs = [g.like(value, f"{name}_out.{layer}") for name, value in inputs.items()]
    for output, source in zip(outputs, inputs.values(), strict=True):
        output.metadata_props[ALIAS] = str(source.name)
    return outputs


def cache_scales(graph: ir.Graph, checkpoint: WeightSource, kv: KvFormat, layer: int) -> list[ir.Value]:
    """Scalar scales of the layer's keys and values, for the formats that have them."""
    if kv == "fp8_cast":
        return [_scalar(graph, "kv_unit_scale", 1.0)] * 2
    if kv != "fp8":
        return []
    assert checkpoint.quantization is not None
    scales = zip("kv", checkpoint.quantization.kv_scales(layer), strict=True)
    return [_scalar(graph, f"model.layers.{layer}.self_attn.{which}_scale", scale) for which, scale in scales]


def _scalar(graph: ir.Graph, name: str, number: float) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(number, np.float32), name=name)
        made = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(()), const_value=tensor)
        graph.register_initializer(made)
    return graph.initializers[name]
