"""Calibration: our recipes' formats through modelopt, on models made for it."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tiny_hf
from plans import fused_graph, plan

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.groups import with_group
from plankiln.compiler.precision import Precision
from plankiln.console import QuietProgress
from plankiln.errors import BuildError, CheckpointError, RecipeError
from plankiln.quantize.awq import best_factors
from plankiln.quantize.calibrate import calibrate
from plankiln.quantize.clip import quantize_clipped
from plankiln.quantize.datasets import TextError
from plankiln.quantize.formats import BlockFormat
from plankiln.quantize.outliers import outlier_layers
from plankiln.quantize.rounding import round_matrix
from plankiln.quantize.statistics import InputStatistics
from plankiln.recipe import CALIBRATED, Quantize, Text

SHAPE: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 192, "vocab_size": 288},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
CONFIG: dict[str, Any] = {
    **SHAPE,
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True},
    **{"max_position_embeddings": 256, "rope_theta": 1e4, "num_hidden_layers": 1},
}
FEW = Text(samples=4, max_tokens=48)
OUTLIER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("models") / "model", "llama", **SHAPE)


def settings(weights: str, **more: Any) -> Quantize:
    group = {"group_size": 32} if weights in ("int4_awq", "w4a8_awq") else {}
    return Quantize.model_validate({"weights": weights, "calibration": FEW, **group, **more})


def run(source: Path, quantize: Quantize, out: Path) -> dict[str, Any]:
    out.mkdir()
    with open_checkpoint(str(source), base=Path()) as checkpoint:
        return calibrate(checkpoint, quantize, out, QuietProgress(), mirrored=True)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("weights", CALIBRATED)
def test_every_format_gives_a_checkpoint_that_we_read(model: Path, tmp_path: Path, weights: str) -> None:
    """All linears of the decoder, in the format's bytes; the same inputs give the same bytes."""
    report = run(model, settings(weights), tmp_path / "out")
    assert (report["samples"], report["tokens"]) == (4, 4 * 48)
    with (
        open_checkpoint(str(tmp_path / "out"), base=Path()) as made,
        open_checkpoint(str(model), base=Path()) as source,
    ):
        made.validate(decoder_spec(made.config).expected_tensors())
        assert made.quantization is not None
        assert {linear.algorithm for linear in made.quantization.modules.values()} == {weights}
        assert len(made.quantization.modules) == 2 * 7
        assert made.tokenizer_json == source.tokenizer_json
        assert made.eos_token_ids == source.eos_token_ids
        assert made.special_tokens == source.special_tokens
        stored = sum(made.tensors[f"{name}.weight"].nbytes for name in made.quantization.modules)
        whole = sum(source.tensors[f"{name}.weight"].nbytes for name in made.quantization.modules)
        assert whole == stored * (4 if weights in ("fp8", "fp8_per_token", "int8_smoothquant") else 8)
    run(model, settings(weights), tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_an_fp8_cache_has_measured_scales(model: Path, tmp_path: Path, weights: str) -> None:
    run(model, settings(weights, kv_cache="fp8"), tmp_path / "out")
    with open_checkpoint(str(tmp_path / "out"), base=Path()) as made:
        assert made.quantization is not None
        assert made.quantization.kv_cache == "fp8"
        scales = [made.quantization.kv_scales(layer) for layer in range(2)]
        assert len({scale for pair in scales for scale in pair}) == 4
    plan(tmp_path / "out", tmp_path / "plan", weights=Precision("keep"), kv="fp8")


def test_layer_by_layer_gives_the_same_checkpoint(model: Path, tmp_path: Path) -> None:
    whole = run(model, settings("fp8"), tmp_path / "whole")
    layers = run(model, settings("fp8", layerwise=True), tmp_path / "layers")
    assert whole["tokens"] == layers["tokens"]
    for name in ("model.safetensors", "hf_quant_config.json", "config.json"):
        assert digests(tmp_path / "layers")[name] == digests(tmp_path / "whole")[name], name


def test_int4_goes_layer_by_layer_anyway(model: Path, tmp_path: Path) -> None:
    run(model, settings("int4_awq"), tmp_path / "whole")
    run(model, settings("int4_awq", layerwise=True), tmp_path / "layers")
    assert digests(tmp_path / "layers") == digests(tmp_path / "whole")


def test_an_interrupted_layerwise_calibration_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    class Interrupted(QuietProgress):
        def __init__(self, after: int) -> None:
            super().__init__()
            self.left = after

        def __call__(self, what: str, done: int, total: int) -> None:
            self.left -= what == "calibrate"
            if self.left < 0:
                raise KeyboardInterrupt

    quantize, resume = settings("fp8", layerwise=True), tmp_path / "resume"
    with open_checkpoint(str(model), base=Path()) as checkpoint:
        steps = Interrupted(10**6)
        (tmp_path / "whole").mkdir()
        calibrate(checkpoint, quantize, tmp_path / "whole", steps, mirrored=True)
        taken = 10**6 - steps.left
        (tmp_path / "killed").mkdir()
        with pytest.raises(KeyboardInterrupt):
            calibrate(checkpoint, quantize, tmp_path / "killed", Interrupted(taken - 1), mirrored=True, resume=resume)
        assert any(resume.rglob("*"))
        rest = Interrupted(10**6)
        (tmp_path / "again").mkdir()
        calibrate(checkpoint, quantize, tmp_path / "again", rest, mirrored=True, resume=resume)
    assert 10**6 - rest.left < taken
    assert digests(tmp_path / "again") == digests(tmp_path / "whole")


def test_an_outlier_that_smoothing_cannot_spread_is_found() -> None:
    """users-met 18. Rare and huge: one scale for all wastes int8's range on it, and the weights cannot take it up. An
    input that is as large in every column, or a column that is large all the time, is none."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=False)
    x = torch.randn(4096, 64)
    always, rare = x.clone(), x.clone()
    always[:, 7] *= 1000
    rare[5, 7] = 3000.0
    found = {}
    for name, values in (("plain", x), ("always", always), ("rare", rare)):
        square = (values**2).mean(0)
        seen = InputStatistics(values.abs().amax(0), square, float(values.abs().mean()), len(values))
        found |= outlier_layers({name: linear}, {name: seen}, 0.5)
    assert list(found) == ["rare"]
    assert found["rare"]["absmax"] == 3000
    assert found["rare"]["absmax_over_mean"] > 1000


def test_outlier_layers_keep_int8_weights_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"absmax": 3000.0, "absmax_over_mean": 3.0e4, "signal_to_noise_db": 9.0}
    monkeypatch.setattr("plankiln.quantize.calibrate.outlier_layers", lambda *_: {OUTLIER: seen})
    report = run(model, settings("int8_smoothquant"), tmp_path / "out")
    assert report["outlier_layers"] == {OUTLIER: 3.0e4}
    with open_checkpoint(str(tmp_path / "out"), base=Path()) as made:
        assert made.quantization is not None
        assert made.quantization.modules[OUTLIER].algorithm == "int8"
        kinds = {linear.algorithm for name, linear in made.quantization.modules.items() if name != OUTLIER}
        assert kinds == {"int8_smoothquant"}


def test_exclude_takes_patterns_and_refuses_typos(model: Path, tmp_path: Path) -> None:
    """users-met 26."""
    run(model, settings("fp8", exclude=("*.o_proj", "model.layers.0.mlp.*")), tmp_path / "out")
    with open_checkpoint(str(tmp_path / "out"), base=Path()) as made:
        assert made.quantization is not None
        assert len(made.quantization.modules) == 2 * 7 - 2 - 3
    with pytest.raises(RecipeError) as caught:
        run(model, settings("fp8", exclude=("model.layers.0.mlp.dwon_proj", "*.o_proj")), tmp_path / "typo")
    (problem,) = caught.value.problems
    assert "`model.layers.0.mlp.dwon_proj` matches no module" in problem.what
    assert "model.layers.0.mlp.down_proj" in problem.hint
    assert list((tmp_path / "typo").iterdir()) == []


def test_nothing_is_downloaded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """users-met 21: with sockets blocked, the built-in text calibrates."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", fail)
    monkeypatch.setattr(socket, "create_connection", fail)
    assert run(model, settings("fp8"), tmp_path / "out")["text_source"] == "built-in calibration"


def test_own_chats_go_through_the_models_template(tmp_path: Path) -> None:
    """users-met 18 and 20: own data is first class, and what a file is says the recipe, not its name."""
    source = write_tiny_hf(tmp_path / "model", "llama", **SHAPE)
    settings_file = source / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"chat_template": template}))
    rows = [{"chat": [{"role": "user", "content": f"number {i}"}]} for i in range(3)]
    file = tmp_path / "whatever.txt"
    file.write_text("\n".join(map(json.dumps, rows)))
    text = Text(kind="jsonl", path=str(file), field="chat", samples=3, max_tokens=200)
    report = run(source, settings("fp8").model_copy(update={"calibration": text}), tmp_path / "out")
    assert report["text_source"] == str(file)
    assert report["tokens"] == 3 * len(b"user:number 0;")
    assert report["text"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_too_little_text_is_said_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plankiln.quantize.calibrate.torch_model", lambda _: pytest.fail("loaded"))
    file = tmp_path / "short.txt"
    file.write_text("a short text")
    text = Text(kind="text", path=str(file), samples=99, max_tokens=48)
    with pytest.raises(TextError, match="the recipe asks for 99"):
        run(model, settings("fp8").model_copy(update={"calibration": text}), tmp_path / "out")


def test_a_quantized_source_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    run(model, settings("fp8"), tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="quantized already"):
        run(tmp_path / "fp8", settings("int8_smoothquant"), tmp_path / "out")


class TestGroups:
    def test_a_width_that_is_not_whole_groups_is_refused_before_calibration(self, tmp_path: Path) -> None:
        """users-met 19: 231 groups of 128 cannot be shared by two ranks; the pairs that are legal are listed."""
        shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 231 * 128, "num_hidden_layers": 1}
        config = {
            **shape,
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
        spec = decoder_spec({**config, "max_position_embeddings": 256, "rope_theta": 1e4})
        quantize = Quantize(weights="int4_awq", group_size=128)
        assert with_group(spec, quantize, 1) == quantize
        with pytest.raises(BuildError) as caught:
            with_group(spec, quantize, 2)
        down = next(problem for problem in caught.value.problems if "down_proj" in problem.what)
        assert "14784 columns on each of 2 ranks, not whole groups of 128" in down.what
        assert "64 with `tensor_parallel: 2`" in down.hint
        assert "128 with `tensor_parallel: 1`" in down.hint
        auto = with_group(spec, Quantize(weights="int4_awq", group_size="auto"), 2)
        assert auto.group_size == 64

    def test_what_fits_no_group(self) -> None:
        spec = decoder_spec({**CONFIG, "hidden_size": 48})
        with pytest.raises(BuildError, match="48 columns, not whole groups of 32"):
            with_group(spec, Quantize(weights="int8_smoothquant"))
        with pytest.raises(BuildError, match="48 columns, not whole groups of 32"):
            with_group(spec, Quantize(weights="int4_awq", group_size="auto"))


def test_a_head_that_is_named_quantized_has_fewer_bytes(model: Path, tmp_path: Path) -> None:
    """users-met 27: what the plan stores is low bits; no matrix of the decoder is left in floats."""
    run(model, settings("int4_awq"), tmp_path / "out")
    graph = fused_graph(tmp_path / "out", Precision("keep"), "fp32", 64)
    names = [name for name, value in graph.graph.initializers.items() if value.dtype is not None]
    quantized = [name for name in names if "proj" in name and graph.graph.initializers[name].dtype.bitwidth == 4]
    assert len(quantized) == 2 * 4
    floats = [
        name
        for name in names
        if "proj" in name and "scale" not in name and graph.graph.initializers[name].dtype.bitwidth > 8
    ]
    assert floats == []


class TestRounding:
    """Inputs of a few strong directions and some noise, as a language model's are; errors on fresh ones."""

    @pytest.mark.parametrize("mirrored", [True, False])
    def test_what_a_linear_puts_out_is_nearer_than_rounding_to_nearest_gets(self, mirrored: bool) -> None:
        import torch

        torch.manual_seed(1)
        weight, directions = torch.randn(40, 64), torch.randn(12, 64) * 3
        x, fresh = (torch.randn(4096, 12) @ directions + torch.randn(4096, 64) / 2 for _ in range(2))
        q, scale = round_matrix(weight, x.T @ x, 32, mirrored)
        assert q.min() >= -8
        assert q.max() <= 7
        assert mirrored or (scale > 0).all()
        assert torch.equal(scale.half().float(), scale)
        ours = (q.reshape(40, 2, 32) * scale[..., None]).reshape(40, 64)
        clipped = quantize_clipped(weight.numpy(), BlockFormat(4, 32), None).dequantize()

        def error(made: Any) -> float:
            return float(((fresh @ (torch.as_tensor(made) - weight).T) ** 2).mean())

        assert error(ours) < 0.5 * error(clipped)

    def test_columns_that_are_never_read_and_weights_of_zero(self) -> None:
        import torch

        weight = torch.randn(4, 64)
        weight[1] = 0
        hessian = torch.zeros(64, 64)
        hessian[:32, :32] = torch.eye(32)
        q, scale = round_matrix(weight, hessian, 32, True)
        assert torch.isfinite(scale).all()
        assert (q[1] * scale[1].repeat_interleave(32) == 0).all()
        assert (best_factors([weight], hessian, 32, True) > 0).all()

    def test_columns_that_matter_are_scaled_up(self) -> None:
        import torch

        torch.manual_seed(0)
        weight = torch.randn(32, 64)
        x = torch.randn(4096, 64)
        x[:, 5] *= 30
        factors = best_factors([weight], x.T @ x / 4096, 32, True)
        assert factors[5] == factors.max()
        assert factors[5] > 1.5 * factors.median()
