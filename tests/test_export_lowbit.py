"""Low-bit graphs in ONNX Runtime: standard ops and function bodies say what the numpy formats say."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoints import write_tiny_hf
from graphs import PagedRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.blocks import BlockTensor
from plankiln.compiler.export import export_decoder, save_onnx
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.precision import Precision
from plankiln.quantize.formats import BlockFormat, from_gguf, matmul_int8, quantize, quantize_activations

SEED = int(os.environ["PLANKILN_SEED"])
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
FORMATS = [
    Precision("int4_rtn"),
    Precision("int4_rtn", minimum=True),
    Precision("int8_rtn"),
    Precision("int4_rtn", minimum=True, activations="declared"),
    Precision("int8_rtn", activations="declared"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", "llama", tie_word_embeddings=True, **SIZES)


def graph(source: Path, precision: Precision) -> ir.Model:
    checkpoint = open_checkpoint(str(source), base=source)
    spec = decoder_spec(checkpoint.config)
    return export_decoder(spec, checkpoint, weights=precision, max_context=64, kv_cache="fp32", block_size=16)


@pytest.mark.parametrize("precision", FORMATS, ids=str)
def test_passes_change_nothing_and_leave_the_stored_bits(source: Path, precision: Precision) -> None:
    before, after = graph(source, precision), apply_passes(graph(source, precision))
    assert sum(node.op_type == "MatMul" for node in after.graph) == 2 * 4 + 1
    rng = np.random.default_rng(SEED)
    runners = [PagedRunner(model, 8, SEED) for model in (before, after)]
    for chunk in (17, 1, 5):
        tokens = {"a": rng.integers(0, 33, chunk).tolist(), "b": rng.integers(0, 33, 3).tolist()}
        plain, fused = (runner.step(tokens) for runner in runners)
        # int8 rounds what differs by an ulp after a pass; one step of 1/127 of a group may flip
        tolerance = 1e-5 if precision.activations == "declared" else 2e-2
        assert np.abs(plain - fused).max() <= tolerance * np.abs(plain).max()


@pytest.mark.parametrize("precision", FORMATS[3:], ids=str)
def test_the_reference_variant_is_the_dequantized_model(source: Path, precision: Precision) -> None:
    low = graph(source, precision)
    exact = graph(source, Precision("fp32"))
    for value in exact.graph.initializers.values():
        stored = low.graph.initializers.get(str(value.name))
        if stored is not None and isinstance(stored.const_value, BlockTensor):
            reference = stored.const_value.reference
            array = reference.blocks().dequantize()
            value.const_value = ir.tensor(array.T if reference.transposed else array, name=value.name)
    tokens = {"a": np.random.default_rng(SEED).integers(0, 33, 20).tolist()}
    got, want = (PagedRunner(model, 4, SEED).step(tokens) for model in (low, exact))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("precision", FORMATS[:3], ids=str)
def test_saved_initializers_are_the_low_bit_bytes(source: Path, precision: Precision, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = apply_passes(graph(source, precision))
    save_onnx(model, path, inline_bytes=0)
    onnx.checker.check_model(str(path))
    floats = sum(
        int(np.prod(value.shape.numpy()))  # type: ignore[union-attr]
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and len(value.shape or ()) == 2 and "cache" not in str(value.name)
    )
    assert floats == 0, "a matrix is stored in float32"
    loaded = onnx.load(str(path))
    stored = {tensor.name: tensor for tensor in loaded.graph.initializer}
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, BlockTensor):
            assert stored[str(value.name)].raw_data == value.const_value.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.floats(-7, 4),
    st.integers(0, 2**32 - 1),
)
def test_round_trip_is_within_half_a_step(bits: int, group: int, minimum: bool, power: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((3, 2 * group)) * 10**power).astype(np.float32)
    weight[0, :group] = 0
    weight[1, :group] = weight[1, 0]
    blocks = quantize(weight, BlockFormat(bits, group, minimum))  # type: ignore[arg-type]
    error = np.abs(blocks.dequantize() - weight).reshape(3, 2, group).max(-1)
    scale = np.abs(blocks.scale.astype(np.float32))
    # half a step, a whole one at the clipped end, and what float16 loses of scale and minimum (subnormals included)
    levels = 1 << bits
    low = np.zeros_like(scale) if blocks.minimum is None else np.abs(blocks.minimum.astype(np.float32))
    assert (error <= scale + (levels * scale + low) * 2**-10 + levels * 2.0**-24).all()
    assert (blocks.dequantize()[0, :group] == 0).all()
    again = quantize(blocks.dequantize(), blocks.format)
    assert np.abs(again.dequantize() - blocks.dequantize()).max() <= scale.max() * 2.0**-5 + levels * 2.0**-24


def test_a_scale_beyond_float16_is_an_overflow() -> None:
    with pytest.raises(OverflowError, match="does not fit float16"):
        quantize(np.full((1, 32), 1e7, np.float32), BlockFormat(4, 32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_dequantize_as_the_gguf_package_does(kind: str) -> None:
    import gguf

    rng = np.random.default_rng(SEED)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(rng.standard_normal((5, 96)).astype(np.float32), type_)
    assert np.array_equal(from_gguf(raw, kind).dequantize(), gguf.quants.dequantize(raw, type_))


def test_int8_activations_are_within_half_a_step_and_products_agree() -> None:
    rng = np.random.default_rng(SEED)
    x = (rng.standard_normal((4, 128)) * rng.choice([1e-3, 1, 1e3], (4, 1))).astype(np.float32)
    x[0, :32] = 0
    q, scale = quantize_activations(x, 32)
    assert np.abs(q).max() == 127
    assert (np.abs(q.reshape(4, 4, 32) * scale[..., None] - x.reshape(4, 4, 32)) <= 0.5001 * scale[..., None]).all()
    weight = quantize(rng.standard_normal((7, 128)), BlockFormat(4, 32, True))
    exact = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    assert np.abs(matmul_int8(x, weight) - exact).max() <= 0.02 * np.abs(exact).max()
