"""Each graph rewrite: it fires where it should, nowhere else, and changes no result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graphs import MemoryCheckpoint, PagedRunner, tiny_spec

from plankiln.compiler import graph as g
from plankiln.compiler.export import export_decoder
from plankiln.compiler.formats import Format
from plankiln.compiler.passes import PASSES, apply_passes
from plankiln.compiler.passes.fuse_add_norm import fuse_add_norm
from plankiln.compiler.passes.fuse_gate_up import fuse_gate_up
from plankiln.compiler.passes.fuse_qkv import fuse_qkv
from plankiln.compiler.passes.fuse_rope import fuse_rope
from plankiln.compiler.passes.fuse_silu_mul import fuse_silu_mul
from plankiln.compiler.weights import Slice, reference_of

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, all biases, tied": {
        "family": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"family": "mistral", "sliding_window": 5},
    "qwen2, mixed windows": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "qwen3", "attention_bias": True},
}
# Each step appends tokens to some sequences: prefills, chunks, decodes, one exactly filling a block of 4.
STEPS: list[dict[str, list[int]]] = [
    {"a": [1, 2, 3, 4, 5], "b": [7, 8]},
    {"b": [9, 10], "a": [6], "c": [11] * 9},
    {"c": [12], "a": [13], "b": [14, 15, 16, 17, 18]},
    {"a": [19]},
]


def exported(model: dict[str, Any], weights: Format = "fp32", kv_cache: Format = "fp32") -> ir.Model:
    spec = tiny_spec(**model)
    checkpoint = MemoryCheckpoint(spec)
    return export_decoder(spec, checkpoint, weights=weights, max_context=64, kv_cache=kv_cache, block_size=4)


def assert_same_results(before: ir.Model, after: ir.Model) -> None:
    """Equal logits and caches over STEPS; unowned blocks hold NaN in both, and every step has padding rows."""
    first, second = PagedRunner(before, blocks=16), PagedRunner(after, blocks=16)
    for number, tokens in enumerate(STEPS):
        padding = number % 3
        expected, got = first.step(tokens, padding=padding), second.step(tokens, padding=padding)
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
        for name, cache in first.caches.items():
            np.testing.assert_allclose(second.caches[name], cache, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rewrite", PASSES[1:], ids=lambda rewrite: rewrite.__name__)  # the first needs a pre-scale
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_alone_changes_no_result(name: str, rewrite: Callable[[ir.Model], int]) -> None:
    after = exported(MODELS[name])
    if rewrite is fuse_silu_mul:
        fuse_gate_up(after)
    assert rewrite(after) == (4 if rewrite is fuse_add_norm else 2)
    assert_same_results(exported(MODELS[name]), after)
    assert rewrite(after) == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("bf16", "bf16")], ids=lambda f: f"weights {f[0]}, cache {f[1]}")
def test_all_passes_change_no_result(name: str, formats: tuple[Format, Format]) -> None:
    after = apply_passes(exported(MODELS[name], *formats))
    assert_same_results(exported(MODELS[name], *formats), after)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(PASSES))[::17], ids=lambda o: "-".join(p.__name__ for p in o)
)
def test_any_order_changes_no_result(order: tuple[Callable[[ir.Model], int], ...]) -> None:
    after = exported(MODELS["qwen3"])
    for rewrite in order:
        rewrite(after)
    assert_same_results(exported(MODELS["qwen3"]), after)


def test_the_fused_layer_is_this_list_of_ops() -> None:
    model = apply_passes(exported(MODELS["llama"]))
    layer = [node.op_type for node in model.graph if g.layer_of(node) == 1]
    assert layer == [
        *("MatMul", "Split", "PagedAttention", "MatMul", "AddRMSNormalization"),
        *("MatMul", "SiluMul", "MatMul", "AddRMSNormalization"),
    ]
    outside = [node.op_type for node in model.graph if g.layer_of(node) is None]
    assert outside == ["Gather", "Gather", "MatMul"]
    assert {key[1:] for key in model.functions} == {
        ("PagedAttention", "rotary"),
        ("SiluMul", ""),
        ("AddRMSNormalization", ""),
    }


def test_bf16_weights_are_fused_under_one_rounding_of_their_input() -> None:
    model = apply_passes(exported(MODELS["llama"], "bf16"))
    for node in model.graph:
        if node.op_type == "MatMul":
            rounded, matrix = (g.producer(value, "Cast") for value in node.inputs)
            assert rounded is not None
            assert matrix is not None
            assert g.producer(rounded.inputs[0], "Cast") is not None
            assert matrix.inputs[0] is not None
            assert matrix.inputs[0].dtype == ir.DataType.BFLOAT16


def test_fused_weights_are_references_with_parts() -> None:
    model = apply_passes(exported(MODELS["llama, all biases, tied"]))
    prefix = "model.layers.1."
    packed = reference_of(model.graph.initializers[f"{prefix}self_attn.qkv_proj.weight"])
    assert packed is not None
    assert packed.parts == (
        Slice(f"{prefix}self_attn.q_proj.weight", 0, 48),
        Slice(f"{prefix}self_attn.k_proj.weight", 0, 24),
        Slice(f"{prefix}self_attn.v_proj.weight", 0, 24),
    )
    assert packed.shape == packed.array().shape == (24, 96)
    bias = reference_of(model.graph.initializers[f"{prefix}mlp.gate_up_proj.bias"])
    assert bias is not None
    assert bias.shape == bias.array().shape == (42,)
    head = reference_of(model.graph.initializers["lm_head.weight"])
    table = reference_of(model.graph.initializers["model.embed_tokens.weight"])
    assert head is not None
    assert table is not None
    assert head.parts == table.parts
    assert head.transposed
    assert not table.transposed


def test_linears_that_read_different_inputs_are_put_side_by_side() -> None:
    model = exported(MODELS["llama"])
    value = next(node for node in model.graph if node.name == "model.layers.0.self_attn.v_proj")
    value.replace_input_with(0, next(n.outputs[0] for n in model.graph if n.name == "embedded"))
    assert fuse_qkv(model) == 2
    assert "model.layers.0.self_attn.qkv_proj.weight" not in model.graph.initializers
    assert [node.name for node in model.graph if node.op_type == "Concat"] == ["model.layers.0.self_attn.qkv_proj"]


def test_query_and_key_rotated_by_different_tables_are_left_alone() -> None:
    model = exported(MODELS["llama"])
    rotation = next(node for node in model.graph if node.name == "model.layers.0.self_attn.k_rope.turned")
    rotation.replace_input_with(1, model.graph.initializers["sin_cache"])
    assert fuse_rope(model) == 1


def test_a_value_read_elsewhere_survives_its_fusion() -> None:
    """The sum of a residual is read by the norm and, as the new residual, two nodes later; both must be fed."""
    model = exported(MODELS["llama"])
    fuse_add_norm(model)
    fused = [node for node in model.graph if node.op_type == "AddRMSNormalization"]
    assert [len(node.outputs[1].uses()) for node in fused] == [1, 1, 1, 0]
    assert [g.layer_of(node) for node in fused] == [0, 0, 1, 1]
    residuals = [node.inputs[1] for node in fused]
    assert [value.name for value in residuals[:1] if value] == ["embedded"]
    assert residuals[1:] == [node.outputs[1] for node in fused[:-1]]


def test_an_empty_graph_passes_through() -> None:
    empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}), ir_version=11)
    assert [rewrite(empty) for rewrite in PASSES] == [0] * len(PASSES)
