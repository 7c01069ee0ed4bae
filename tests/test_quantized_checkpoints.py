"""Checkpoints that modelopt exported: read, exported to ONNX, compiled, and compared with modelopt's arithmetic."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import PagedRunner
from plans import VARIANTS, fused_graph, packed_step, plan
from program_reference import ReferencePlan
from quantized_checkpoints import fake_quant_logits, write_quantized_hf

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.export import save_onnx
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.passes.fold_prescale import explicit_prescales
from plankiln.compiler.precision import Precision
from plankiln.errors import CheckpointError, ExportError

RUNNABLE = ("fp8", "fp8_per_token", "int8_smoothquant", "int4_awq", "w4a8_awq", "mixed")
DECLARED = Precision("keep", activations="declared")
TOKENS = 37
SCALES = ("model.layers.1.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.input_scale")
SEED = int(os.environ.get("PLANKILN_SEED", "0"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    return {name: write_quantized_hf(root / name, name) for name in (*RUNNABLE, "nvfp4")}


@pytest.mark.parametrize("algorithm", [*RUNNABLE, "nvfp4"])
def test_every_linear_is_recognised(quantized: dict[str, Path], algorithm: str) -> None:
    with open_checkpoint(str(quantized[algorithm]), base=Path()) as checkpoint:
        assert checkpoint.quantization is not None
        modules = checkpoint.quantization.modules
        assert len(modules) == 2 * 7
        kinds = {linear.algorithm for linear in modules.values()}
        assert kinds == ({"fp8", "int4_awq"} if algorithm == "mixed" else {algorithm})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_the_reference_plan_computes_what_modelopt_does(
    quantized: dict[str, Path], tmp_path: Path, algorithm: str, variant: str
) -> None:
    """Weights and roundings are the same numbers, and so float32 sums in another order are all that differs: 1e-5 of
    the logits. Now and then that moves an activation over a rounding boundary, by one step (1/16 of it in e4m3, 1/254
    of the largest in int8), and the prompt's logits with it; that happens to few of many short prompts."""
    program, engine = plan(quantized[algorithm], tmp_path / "plan", weights=DECLARED, target=variant)
    ids = np.random.default_rng(SEED).integers(0, program.vocab, (16, 3))
    engine.allocate_kv(16)
    got = engine.execute(packed_step(ids[:16].tolist()[:8], [0] * 8, [[i] for i in range(8)])).copy()
    got = np.concatenate([got, engine.execute(packed_step(ids.tolist()[8:], [0] * 8, [[i] for i in range(8)]))])
    want = fake_quant_logits(quantized[algorithm], ids).reshape(got.shape)
    errors = (np.abs(got - want).reshape(16, -1).max(-1)) / np.abs(want).max()
    assert np.median(errors) <= 1e-5
    assert errors.max() <= 0.1


def test_an_fp8_cache_holds_what_modelopt_rounds(tmp_path: Path) -> None:
    source = write_quantized_hf(tmp_path / "source", "fp8", kv_fp8=True)
    program, engine = plan(source, tmp_path / "plan", weights=DECLARED, kv="fp8")
    ids = np.random.default_rng(SEED).integers(0, program.vocab, (8, 7))
    engine.allocate_kv(8)
    got = engine.execute(packed_step(ids.tolist(), [0] * 8, [[i] for i in range(8)]))
    want = fake_quant_logits(source, ids).reshape(got.shape)
    errors = np.abs(got - want).reshape(8, -1).max(-1) / np.abs(want).max()
    assert np.median(errors) <= 2e-2  # 56 keys and values a layer of 64 numbers each: some lie at an edge
    assert np.quantile(np.abs(got - want) / np.abs(want).max(), 0.5) <= 2e-3


def test_linears_that_read_the_same_numbers_are_one(quantized: dict[str, Path]) -> None:
    """q, k and v of one rounded input: one rounding and one matrix, whatever the scales of its rows."""
    model = fused_graph(quantized["fp8"], Precision("keep"), "fp32", 64)
    kinds = [node.op_type for node in model.graph if "layers.0." in str(node.outputs[0].name)]
    assert kinds.count("QuantizeLinear") == 4
    assert kinds.count("MatMul") == 4


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_chunks_and_twin_agree_where_activations_are_rounded(
    quantized: dict[str, Path], tmp_path: Path, algorithm: str
) -> None:
    """The fast plan and its numpy twin, and a prompt in one piece and in two: the same bits."""
    program, engine = plan(quantized[algorithm], tmp_path / "plan", weights=Precision("keep"))
    ids = np.random.default_rng(SEED).integers(0, program.vocab, TOKENS).tolist()
    engine.allocate_kv(3)
    whole = engine.execute(packed_step([ids], [0], [[2, 0, 1]])).copy()
    first = engine.execute(packed_step([ids[:19]], [0], [[0, 1, 2]])).copy()
    second = engine.execute(packed_step([ids[19:]], [19], [[0, 1, 2]])).copy()
    assert np.array_equal(whole, np.concatenate([first, second]))
    twin = ReferencePlan(program, 3, 16).execute(packed_step([ids], [0], [[2, 0, 1]]))
    assert np.median(np.abs(whole - twin)) <= 1e-2 * np.abs(twin).max()


@pytest.mark.parametrize("algorithm", RUNNABLE)
def test_the_graph_runs_elsewhere_and_holds_low_bits_only(
    quantized: dict[str, Path], tmp_path: Path, algorithm: str
) -> None:
    """onnx.checker passes, ONNX Runtime computes the plan's logits, and no quantized matrix is left in floats."""
    model = fused_graph(quantized[algorithm], DECLARED, "fp32", 64)
    save_onnx(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx")
    big = [
        i for i in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer if len(i.dims) == 2
    ]
    floats = {i.name for i in big if i.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16)}
    assert {name for name in floats if "scale" not in name} <= {
        *("model.embed_tokens.weight", "lm_head.weight", "cos_cache", "sin_cache")
    }
    program, engine = plan(quantized[algorithm], tmp_path / "plan", weights=DECLARED)
    ids = np.random.default_rng(SEED).integers(0, program.vocab, 11).tolist()
    engine.allocate_kv(1)
    got = engine.execute(packed_step([ids], [0], [[0]]))
    want = PagedRunner(model, 2).step({"a": ids})
    error = np.abs(got - want) / np.abs(want).max()
    assert np.median(error) <= 1e-3
    assert error.max() <= 0.1


def test_pre_scales_are_folded_into_norms_and_others_stay(quantized: dict[str, Path]) -> None:
    model = fused_graph(quantized["int8_smoothquant"], DECLARED, "fp32", 64)
    assert explicit_prescales(model) == [
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]


def test_nvfp4_is_refused_as_it_is_and_dequantizes(quantized: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="NVFP4, which no CPU kernel multiplies"):
        fused_graph(quantized["nvfp4"], Precision("keep"), "fp32", 64)
    _, engine = plan(quantized["nvfp4"], tmp_path / "plan", weights="fp32")
    engine.allocate_kv(3)
    assert np.isfinite(engine.execute(packed_step([[1, 2, 3]], [0], [[0, 1, 2]]))).all()


def test_a_quantized_checkpoint_dequantizes_exactly(quantized: dict[str, Path], tmp_path: Path) -> None:
    """weights: fp32 of a quantized source is its dequantization, which the gate compares with."""
    _, engine = plan(quantized["int4_awq"], tmp_path / "plan", weights="fp32")
    ids = np.random.default_rng(SEED).integers(0, 96, (1, TOKENS))
    engine.allocate_kv(3)
    got = engine.execute(packed_step(ids.tolist(), [0], [[0, 1, 2]]))
    want = fake_quant_logits(quantized["int4_awq"], ids)[0]
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def with_scales(source: Path, out: Path, change: Any) -> Path:
    """A copy whose tensors `change` has edited."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def refused(path: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(str(path), base=Path()) as checkpoint:
        checkpoint.validate(decoder_spec(checkpoint.config).expected_tensors())
    return [problem.what for problem in caught.value.problems]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized_hf(tmp_path_factory.mktemp("cached") / "model", "fp8", kv_fp8=True)


class TestScalesThatCannotBeTrue:
    @pytest.mark.parametrize("value", [1.0, 0.02])
    def test_kv_scales_that_nobody_measured(self, cached: Path, tmp_path: Path, value: float) -> None:
        """users-met 22: all 1.0, or all alike."""

        def change(tensors: dict[str, Any]) -> None:
            for name in tensors:
                if name.endswith((".k_scale", ".v_scale")):
                    tensors[name].fill_(value)

        (what,) = refused(with_scales(cached, tmp_path / "model", change))
        assert what == f"every scale of the FP8 KV cache is {value:g}: it was not measured"

    def test_kv_scales_that_are_missing(self, cached: Path, tmp_path: Path) -> None:
        """users-met 23: no falling back to 1."""
        path = with_scales(cached, tmp_path / "model", lambda t: t.pop("model.layers.1.self_attn.v_proj.v_scale"))
        (what,) = refused(path)
        assert "the FP8 KV cache has no scale `model.layers.1.self_attn.v_proj.v_scale`" in what

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
    @pytest.mark.parametrize("name", SCALES)
    def test_scales_that_are_no_scales(self, cached: Path, tmp_path: Path, name: str, bad: float) -> None:
        path = with_scales(cached, tmp_path / "model", lambda tensors: tensors[name].fill_(bad))
        assert refused(path) == [f"tensor `{name}` holds scales that are not positive numbers"]

    @pytest.mark.parametrize("name", SCALES)
    def test_scales_that_are_missing(self, cached: Path, tmp_path: Path, name: str) -> None:
        path = with_scales(cached, tmp_path / "model", lambda tensors: tensors.pop(name))
        assert any(name.rpartition(".")[0] in what for what in refused(path))

    @pytest.mark.parametrize("algorithm", ["fp8", "fp8_per_token", "int8_smoothquant"])
    def test_scales_in_another_legal_shape(self, quantized: dict[str, Path], tmp_path: Path, algorithm: str) -> None:
        """[1] for a scalar and [N, 1] for [N]: the same plan, byte for byte."""

        def change(tensors: dict[str, Any]) -> None:
            for name in tensors:
                if name.endswith(".weight_scale"):
                    tensors[name] = tensors[name].reshape(-1, 1) if tensors[name].ndim else tensors[name].reshape(1)

        other = with_scales(quantized[algorithm], tmp_path / "model", change)
        for number, path in enumerate((quantized[algorithm], other)):
            plan(path, tmp_path / str(number), weights=Precision("keep"))
        assert (tmp_path / "0/weights.bin").read_bytes() == (tmp_path / "1/weights.bin").read_bytes()


class TestDeclarationsThatCannotBeHonoured:
    def declared(self, source: Path, out: Path, **change: Any) -> list[str]:
        shutil.copytree(source, out)
        file = out / "hf_quant_config.json"
        content = json.loads(file.read_text())
        content["quantization"] |= change
        file.write_text(json.dumps(content))
        return refused(out)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"quant_algo": "W3A16"}, "unknown quantization `W3A16`"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]}, "`quantized_layers` is no object"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "has the unknown quantization `None`"),
            ({"quant_algo": "W4A16_AWQ", "group_size": "32"}, "`group_size` of"),
            ({"kv_cache_quant_algo": "NVFP4"}, "KV cache algorithm `NVFP4` is not supported"),
            ({"kv_cache_quant_algo": "FP8"}, "the FP8 KV cache has no scale"),
        ],
    )
    def test_file(self, quantized: dict[str, Path], tmp_path: Path, change: dict[str, Any], what: str) -> None:
        assert what in self.declared(quantized["fp8"], tmp_path / "model", **change)[0]

    def test_a_layer_with_a_strange_name_and_a_scale_of_two_numbers(self, cached: Path, tmp_path: Path) -> None:
        import torch

        def change(tensors: dict[str, Any]) -> None:
            tensors["model.layers.99999999999.x"] = torch.zeros(1)
            tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.ones(2)

        found = refused(with_scales(cached, tmp_path / "model", change))
        assert "the FP8 KV cache has no scale `model.layers.1.self_attn.k_proj.k_scale`" in found[0]

    def test_a_quantized_embedding(self, quantized: dict[str, Path], tmp_path: Path) -> None:
        import torch

        def change(tensors: dict[str, Any]) -> None:
            name = "model.embed_tokens.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.tensor(0.5)

        (what,) = refused(with_scales(quantized["fp8"], tmp_path / "model", change))
        assert what == "`model.embed_tokens` is quantized, which only linears may be"
