"""A pipeline of fakes that count how often they work: what is left is the order, the store and publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plankiln.compiler import pipeline
from plankiln.compiler.cpu.compile import CpuPlan, CpuSource
from plankiln.compiler.cpu.program import Program
from plankiln.compiler.cpu.toolchain import Compiler
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.gate import skipped_gate
from plankiln.compiler.rope import Rope

RECIPE = """
name: tiny
model: {source: model.gguf}
quantize: {weights: fp32, kv_cache: fp32}
targets: [cpu-generic, {sku: cpu-x86-64-v3, quantize: {weights: bf16}}]
engine: {max_sequences: 2, max_tokens_per_step: 16, max_context: 64, block_size: 16, max_logit_rows: 2}
"""
STAGES = ["recipe", "checkpoint", "spec", "tensors", "export", "passes", "lower", "code", "weights", "package"]


class FakeCheckpoint:
    """What the pipeline asks of a checkpoint. `worked`: the stages that did their work, in order."""

    config: dict[str, Any] = {"model_type": "fake"}  # noqa: RUF012
    origin = Path("model.gguf")
    digest = "cd" * 32
    tensors: dict[str, Any] = {}  # noqa: RUF012
    eos_token_ids = (2,)
    special_tokens = {"bos_token": "<s>", "bos_token_id": 1, "add_bos_token": True}  # noqa: RUF012
    tokenizer_json = b"{}"
    chat_template = None
    quantization = None

    def __init__(self) -> None:
        self.closed = 0
        self.worked: list[str] = []

    def __enter__(self) -> FakeCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def validate(self, expected: dict[str, tuple[int, ...]]) -> None:
        assert expected == {"w": (1,)}


class FakeSpec(DecoderSpec):
    """A model of one tensor."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"w": (1,)}


class Recorder:
    """A Progress that remembers the stages and the notes."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def stage(self, name: str, target: str) -> None:
        self.stages.append((name, target))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __call__(self, what: str, done: int, total: int) -> None: ...


def fake_stages(monkeypatch: pytest.MonkeyPatch) -> FakeCheckpoint:
    """Replace every stage but the recipe and packaging by a fake."""
    fake = FakeCheckpoint()
    formats: dict[str, tuple[str, str, str]] = {}

    def decoder_spec(config: dict[str, Any], where: str) -> DecoderSpec:
        rope = Rope("default", config.get("rope_theta", 10000.0))
        return FakeSpec("llama", 33, 8, 8, 1, 1, 1, 8, rope, 1e-5, (None,), 64, True)

    def lower_cpu(graph: dict[str, Any], target: Any, name: str) -> CpuSource:
        assert graph["passed"]
        weights = graph["weights"].weights
        text = f"// {name} {target.name} {weights} {graph['kv_cache']} {graph['max_context']}"
        formats[text] = (weights, weights, graph["kv_cache"])
        return CpuSource(Program(name, (), 1, 1, 1, 8, 33, 64, "float32"), target, text)

    def compile_code(source: CpuSource, compiler: Compiler, out: Path) -> str:
        fake.worked.append("code")
        (out / "plan.cc").write_text(source.text)
        (out / "plan.so").write_bytes(f"code for {source.target.name}".encode())
        return "2.17"

    def pack_weights(source: CpuSource, out: Path, progress: Any) -> None:
        fake.worked.append("weights")
        (out / "weights.bin").write_bytes(b"w")

    def describe_plan(source: CpuSource, compiler: Compiler, glibc: str) -> CpuPlan:
        return CpuPlan(64, {"fp32": 1}, *formats[source.text], compiler.version, glibc, source.target.flags)

    monkeypatch.setattr(pipeline, "open_checkpoint", lambda source, **_: fake)
    monkeypatch.setattr(pipeline, "export_decoder", lambda spec, checkpoint, **options: options)
    monkeypatch.setattr(pipeline, "apply_passes", lambda graph: {**graph, "passed": True})
    monkeypatch.setattr(pipeline, "explicit_prescales", lambda graph: [])
    monkeypatch.setattr(pipeline, "matrix_errors", lambda program, source, stored: [])
    monkeypatch.setattr(pipeline._TargetBuild, "_measure", lambda *_: skipped_gate())
    monkeypatch.setattr(pipeline, "find_compiler", lambda: Compiler(("fake-g++",), "fake 1"))
    for stage in (decoder_spec, lower_cpu, compile_code, pack_weights, describe_plan):
        monkeypatch.setattr(pipeline, stage.__name__, stage)
    return fake
