"""The exported graph against `transformers` on the same weights: prefill, chunks and decode (users-met 32)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny_hf
from graphs import MemoryCheckpoint, PagedRunner, tiny_spec

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.formats import Format
from plankiln.compiler.passes import apply_passes
from plankiln.errors import ExportError

# The boundary is 32 positions; sequences run to three times that.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, all biases, odd sizes": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "intermediate_size": 77},
    ),
    "llama one key/value head": ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama yarn rope, own factors": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "mistral window 8": ("mistral", {"sliding_window": 8}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 window on layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases, yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
}
LENGTH = 100


@pytest.fixture(params=CASES)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, overrides = CASES[request.param]
    return write_tiny_hf(tmp_path / "model", family, **overrides)


@pytest.fixture
def oracle(model_dir: Path) -> Callable[[list[int]], Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")

    def logits(tokens: list[int]) -> Any:
        """[len(tokens), vocab] of one forward pass over the whole sequence."""
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return logits


def runner(model_dir: Path, *, weights: Format = "fp32", kv_cache: Format = "fp32", fused: bool = True) -> PagedRunner:
    with open_checkpoint(str(model_dir), base=model_dir) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        checkpoint.validate(spec.expected_tensors())
        model = export_decoder(spec, checkpoint, weights=weights, max_context=128, kv_cache=kv_cache, block_size=8)
        return PagedRunner(apply_passes(model) if fused else model, blocks=40)


def tokens(seed: int, count: int = LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 33, count)]


def relative(got: Any, expected: Any) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_prefill_chunks_and_decode_match_transformers(model_dir: Path, oracle: Any) -> None:
    """Three sequences in one ragged batch: prefilled at once, in chunks, and token by token."""
    run = runner(model_dir)
    at_once, chunked, stepwise = tokens(1), tokens(2), tokens(3, 40)
    expected = {name: oracle(ids) for name, ids in (("once", at_once), ("chunks", chunked), ("steps", stepwise))}
    assert relative(run.step({"once": at_once}, padding=3), expected["once"]) < 1e-4
    position = 0
    for number, token in enumerate(stepwise):
        chunk = chunked[position : position + 1 + number % 5]
        batch = {"chunks": chunk, "steps": [token]} if chunk else {"steps": [token]}
        got = run.step(batch, padding=number % 2)
        assert (
            relative(got[: len(chunk)], expected["chunks"][position : position + len(chunk)]) < 1e-4 if chunk else True
        )
        assert relative(got[len(chunk) :], expected["steps"][number : number + 1]) < 1e-4
        position += len(chunk)
    assert position == LENGTH


def test_unfused_graph_matches_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = write_tiny_hf(tmp_path / "model", "qwen3", attention_bias=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([tokens(4)])).logits[0].numpy()
    assert relative(runner(path, fused=False).step({"a": tokens(4)}), expected) < 1e-4


def test_only_wanted_rows_are_returned(tmp_path: Path) -> None:
    path = write_tiny_hf(tmp_path / "model", "llama")
    every = runner(path).step({"a": tokens(5, 20), "b": tokens(6, 3)})
    some = runner(path).step({"a": tokens(5, 20), "b": tokens(6, 3)}, logit_rows=[22, 0, 19])
    np.testing.assert_allclose(some, every[[22, 0, 19]], rtol=1e-6, atol=1e-6)


def test_bf16_weights_are_the_files_bits_and_inputs_are_rounded(tmp_path: Path) -> None:
    """A bf16 file keeps its bits; the logits differ from fp32 arithmetic by rounding, and by that only."""
    path = write_tiny_hf(tmp_path / "model", "llama", dtype="bfloat16")
    exact = runner(path).step({"a": tokens(7)})
    rounded = runner(path, weights="bf16").step({"a": tokens(7)})
    cache_too = runner(path, weights="bf16", kv_cache="bf16").step({"a": tokens(7)})
    assert 1e-5 < relative(rounded, exact) < 5e-2
    assert 1e-5 < relative(cache_too, exact) < 8e-2
    assert not np.array_equal(rounded, cache_too)


def test_bf16_linear_rounds_inputs_and_accumulates_in_float32() -> None:
    """One layerless step by hand: the head's input is rounded to bf16, its matrix is bf16, the sum is float32."""
    import ml_dtypes

    spec = tiny_spec("llama", num_hidden_layers=1)
    checkpoint = MemoryCheckpoint(spec)
    for name, array in checkpoint.arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0
    model = export_decoder(spec, checkpoint, weights="bf16", max_context=64, kv_cache="fp32", block_size=4)
    got = PagedRunner(model, blocks=4).step({"a": [3, 5, 8]})

    def bf16(array: Any) -> Any:
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    hidden = bf16(checkpoint.arrays["model.embed_tokens.weight"])[[3, 5, 8]]
    norm = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6) * checkpoint.arrays["model.norm.weight"]
    np.testing.assert_allclose(got, bf16(norm) @ bf16(checkpoint.arrays["lm_head.weight"]).T, rtol=1e-5, atol=1e-5)


def test_graph_contract() -> None:
    import onnx_ir as ir

    model = export_decoder(
        tiny_spec("llama"),
        MemoryCheckpoint(tiny_spec("llama")),
        weights="fp32",
        max_context=64,
        kv_cache="bf16",
        block_size=4,
    )
    described = {str(v.name): (v.dtype, str(v.shape)) for v in model.graph.inputs}
    i32, cache = ir.DataType.INT32, (ir.DataType.BFLOAT16, "[blocks,4,3,8]")
    assert described == {
        "input_ids": (i32, "[tokens]"),
        "positions": (i32, "[tokens]"),
        "seq_starts": (i32, "[sequences_plus_one]"),
        "context_lens": (i32, "[sequences]"),
        "block_table": (i32, "[sequences,table_width]"),
        "logit_rows": (i32, "[rows]"),
        **{f"{kind}_cache.{layer}": cache for layer in range(2) for kind in "kv"},
    }
    outputs = [str(value.name) for value in model.graph.outputs]
    assert outputs == ["logits", "k_cache_out.0", "v_cache_out.0", "k_cache_out.1", "v_cache_out.1"]
    assert str(model.graph.outputs[0].shape) == "[rows,33]"
    aliases = {str(v.name): v.metadata_props["alias"] for v in model.graph.outputs[1:]}
    assert aliases == {name: name.replace("_out", "") for name in outputs[1:]}
    assert all(value.type is not None and value.shape is not None for node in model.graph for value in node.outputs)
    assert len({node.name for node in model.graph}) == len(model.graph)


@pytest.mark.parametrize("max_context", [0, 257])
def test_a_context_the_model_does_not_reach_is_refused(max_context: int) -> None:
    spec = tiny_spec("llama")
    with pytest.raises(ExportError, match=r"outside the model's 1 … 256 positions(.|\n)*hint: .*256 or less"):
        export_decoder(
            spec, MemoryCheckpoint(spec), weights="fp32", max_context=max_context, kv_cache="fp32", block_size=4
        )
