"""Big models cost little to export, weights never enter the protobuf (users-met 29), no framework is imported (30)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graphs import MemoryCheckpoint, PagedRunner, tiny_spec

from plankiln.compiler.export import export_decoder, save_onnx
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.weights import Reference, Slice, concatenated, whole
from plankiln.errors import CheckpointError

LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA3_70B = LLAMA3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
# Exports in a process of its own, so that its memory and its imports can be told from the tests'.
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.passes import apply_passes
before = resource.getrusage(resource.RUSAGE_SELF)
with open_checkpoint(sys.argv[1], base=Path(sys.argv[1])) as checkpoint:
    spec = decoder_spec(checkpoint.config)
    checkpoint.validate(spec.expected_tensors())
    model = export_decoder(spec, checkpoint, weights="bf16", max_context=8192, kv_cache="bf16", block_size=16)
    apply_passes(model)
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    "peak_mb": after.ru_maxrss / 1024,
    "nodes": len(model.graph),
    "frameworks": sorted(set(sys.modules) & {"torch", "transformers", "onnxscript", "tensorflow", "jax"}),
}))
"""


def write_sparse_checkpoint(path: Path, config: dict[str, Any]) -> int:
    """An HF directory of bf16 zeros that takes no room on disk; returns its apparent size in bytes."""
    path.mkdir()
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in decoder_spec(config).expected_tensors().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    (path / "config.json").write_text(json.dumps(config))
    return offset


def measure(path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_llama3_8b_shape_at_four_layers(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "model", LLAMA3_8B)
    measured = measure(tmp_path / "model")
    assert measured["cpu_s"] < 60
    assert measured["peak_mb"] < 1024


def test_70b_shape_costs_seconds_and_megabytes_and_no_framework(tmp_path: Path) -> None:
    size = write_sparse_checkpoint(tmp_path / "model", LLAMA3_70B)
    assert size > 140e9
    measured = measure(tmp_path / "model")
    assert measured["nodes"] > 80 * 9
    assert measured["cpu_s"] < 60
    assert measured["peak_mb"] < 1024
    assert measured["frameworks"] == []


def tiny_model() -> tuple[ir.Model, MemoryCheckpoint]:
    spec = tiny_spec("llama", tie_word_embeddings=True)
    checkpoint = MemoryCheckpoint(spec)
    model = export_decoder(spec, checkpoint, weights="fp32", max_context=64, kv_cache="fp32", block_size=4)
    return apply_passes(model), checkpoint


def test_saved_model_keeps_every_weight_beside_it(tmp_path: Path) -> None:
    model, _ = tiny_model()
    path = tmp_path / "model.onnx"
    save_onnx(model, path, inline_bytes=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    proto = onnx.load(path, load_external_data=False)
    assert all(t.data_location == onnx.TensorProto.EXTERNAL and not t.raw_data for t in proto.graph.initializer)
    total = sum(
        int(np.prod(t.dims)) * (8 if t.data_type == onnx.TensorProto.INT64 else 4) for t in proto.graph.initializer
    )
    assert (tmp_path / "model.onnx.data").stat().st_size >= total
    assert len(proto.SerializeToString()) < 64 * 1024


def test_saved_model_runs_and_keeps_its_metadata(tmp_path: Path) -> None:
    model, _ = tiny_model()
    path = tmp_path / "model.onnx"
    save_onnx(model, path)
    save_onnx(model, path)
    onnx.checker.check_model(path)
    run = PagedRunner(model, blocks=8)
    feeds = run.feeds({"a": [1, 2, 3, 4, 5, 6]}) | run.caches
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["logits"], feeds)[0], run.step({"a": [1, 2, 3, 4, 5, 6]}), atol=1e-5)
    loaded = ir.load(path)
    assert [node.metadata_props for node in loaded.graph] == [node.metadata_props for node in model.graph]
    assert [v.metadata_props for v in loaded.graph.outputs] == [v.metadata_props for v in model.graph.outputs]
    for name, value in model.graph.initializers.items():
        np.testing.assert_array_equal(loaded.graph.initializers[name].const_value.numpy(), value.const_value.numpy())  # type: ignore[union-attr]


def test_a_failed_save_leaves_the_old_files(tmp_path: Path) -> None:
    model, checkpoint = tiny_model()
    path = tmp_path / "model.onnx"
    save_onnx(model, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    del checkpoint.arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(KeyError):
        save_onnx(model, path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class CountingCheckpoint(MemoryCheckpoint):
    """Remembers which rows were read."""

    def read_rows(self, name: str, start: int, stop: int) -> Any:
        self.__dict__.setdefault("reads", []).append((name, start, stop))
        return super().read_rows(name, start, stop)


def test_export_and_passes_read_no_weight() -> None:
    spec = tiny_spec("qwen3", tie_word_embeddings=True)
    checkpoint = CountingCheckpoint(spec)
    apply_passes(export_decoder(spec, checkpoint, weights="bf16", max_context=64, kv_cache="bf16", block_size=4))
    assert "reads" not in checkpoint.__dict__


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [True, False])
def test_reference_reads_only_its_rows(dtype: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plankiln.compiler.weights._CHUNK_BYTES", 100)
    checkpoint = CountingCheckpoint(tiny_spec("llama"))
    parts = (Slice("model.layers.0.mlp.up_proj.weight", 3, 9), Slice("model.layers.1.mlp.gate_proj.weight", 0, 5))
    reference = Reference(checkpoint, parts, dtype, transposed)
    rows = reference.rows()
    assert rows.shape == (11, 24)
    assert reference.shape == reference.array().shape == ((24, 11) if transposed else (11, 24))
    expected = np.concatenate([checkpoint.arrays[p.tensor][p.start : p.stop] for p in parts]).astype(rows.dtype)
    np.testing.assert_array_equal(rows, expected)
    assert (
        b"".join(chunk.tobytes() for chunk in reference.chunks()) == np.ascontiguousarray(reference.array()).tobytes()
    )
    assert set(checkpoint.__dict__["reads"]) == {(p.tensor, p.start, p.stop) for p in parts}


def test_references_that_do_not_agree_are_not_joined() -> None:
    checkpoint = MemoryCheckpoint(tiny_spec("llama"))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="dtype or orientation"):
        concatenated([whole(checkpoint, name, "float32"), whole(checkpoint, name, "bfloat16")])


@pytest.mark.parametrize(("value", "said"), [(np.nan, "1 non-finite values"), (1e39, "beyond the range of float32")])
def test_bad_values_name_the_file(value: float, said: str) -> None:
    checkpoint = MemoryCheckpoint(tiny_spec("llama"))
    name = "model.norm.weight"
    checkpoint.arrays[name] = checkpoint.arrays[name].astype(np.float64)
    checkpoint.arrays[name][3] = value
    with pytest.raises(CheckpointError, match=rf"{said}.*: {checkpoint.origin}\nhint: ") as caught:
        whole(checkpoint, name, "float32").rows()
    assert f"tensor `{name}`" in str(caught.value)
