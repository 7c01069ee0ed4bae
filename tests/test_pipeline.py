"""The order of the stages, what is refused before any work, and what a failing stage leaves behind."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import killed_at

from plankiln.bundle import open_bundle
from plankiln.compiler import pipeline
from plankiln.compiler.cpu.compile import CpuPlan
from plankiln.errors import BuildError, CheckpointError, ExportError, RecipeError, ToolchainError

RECIPE = """
name: tiny
model: {source: model.gguf}
quantize: {weights: fp32, kv_cache: fp32}
targets: [cpu-generic, {sku: cpu-x86-64-v3, quantize: {weights: bf16}}]
engine: {max_sequences: 2, max_tokens_per_step: 16, max_context: 64, block_size: 16, max_logit_rows: 2}
"""
STAGES = ["recipe", "checkpoint", "spec", "tensors", "export", "passes", "compile", "package"]
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 targets")


class FakeCheckpoint:
    """What the pipeline asks of a checkpoint."""

    config = {"model_type": "fake"}  # noqa: RUF012
    digest = "cd" * 32
    eos_token_ids = (2,)
    special_tokens = {"bos_token": "<s>", "bos_token_id": 1, "add_bos_token": True}  # noqa: RUF012
    tokenizer_json = b"{}"
    chat_template = None

    def __init__(self) -> None:
        self.closed = 0

    def __enter__(self) -> FakeCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def validate(self, expected: dict[str, tuple[int, ...]]) -> None:
        assert expected == {"w": (1,)}


class Recorder:
    """A Progress that remembers the stages."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []

    def stage(self, name: str, target: str) -> None:
        self.stages.append((name, target))

    def __call__(self, what: str, done: int, total: int) -> None: ...


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> FakeCheckpoint:
    """Every stage but the recipe and packaging replaced by a fake."""
    fake = FakeCheckpoint()
    shape = {"vocab_size": 33, "layers": 1, "hidden_size": 8, "kv_heads": 1, "head_dim": 8, "max_position": 64}
    spec = SimpleNamespace(architecture="llama", expected_tensors=lambda: {"w": (1,)}, **shape)

    def compile_cpu(graph: dict[str, Any], target: Any, out: Path, name: str, progress: Any) -> CpuPlan:
        assert graph["passed"]
        (out / "plan.so").write_bytes(f"code for {target.name}".encode())
        (out / "plan.cc").write_text("// " + name)
        (out / "weights.bin").write_bytes(b"w")
        files = ("plan.so", "plan.cc", "weights.bin")
        formats = (graph["weights"], graph["weights"], graph["kv_cache"])
        return CpuPlan(files, 64, {"fp32": 1}, *formats, compiler="fake 1", glibc="2.17", flags=target.flags)

    monkeypatch.setattr(pipeline, "open_checkpoint", lambda source, **_: fake)
    monkeypatch.setattr(pipeline, "decoder_spec", lambda config: spec)
    monkeypatch.setattr(pipeline, "export_decoder", lambda spec, checkpoint, **formats: formats)
    monkeypatch.setattr(pipeline, "apply_passes", lambda graph: {**graph, "passed": True})
    monkeypatch.setattr(pipeline, "compile_cpu", compile_cpu)
    return fake


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def build(recipe: Path, progress: Any = None, **options: Any) -> list[pipeline.BuildResult]:
    return pipeline.build(recipe, out=recipe.parent / "out", progress=progress or Recorder(), **options)


@needs_x86
def test_stages_in_order_and_shared_once(checkpoint: FakeCheckpoint, recipe: Path) -> None:
    recorder = Recorder()
    results = build(recipe, recorder)
    own = [(name, target) for target in ("cpu-generic", "cpu-x86-64-v3") for name in STAGES[4:]]
    assert recorder.stages == [(name, "") for name in STAGES[:4]] + own
    assert [list(result.seconds) for result in results] == [STAGES, STAGES]
    assert checkpoint.closed == 1
    for result, weights in zip(results, ("fp32", "bf16"), strict=True):
        assert result.path == recipe.parent / "out" / "tiny" / result.target / result.digest
        manifest = open_bundle(result.path, verify="full", any_machine=True).manifest
        assert manifest.formats.weights == manifest.recipe["quantize"]["weights"] == weights  # type: ignore[index, call-overload]
        assert (manifest.add_bos, manifest.special_tokens) == (True, {"bos_token": "<s>", "bos_token_id": 1})
        assert manifest.source.digest == checkpoint.digest
        assert {"python", "compiler", "onnx", "onnx-ir", "numpy"} <= manifest.tools.keys()
        report = json.loads((result.path / "report.json").read_text())
        assert list(report["seconds"]) == STAGES[:-1]


def test_second_build_finds_the_first(checkpoint: FakeCheckpoint, recipe: Path) -> None:
    (first,) = build(recipe, only_targets=["cpu-generic"])
    (second,) = build(recipe, only_targets=["cpu-generic"])
    assert (first.existed, second.existed) == (False, True)
    assert first.digest == second.digest


class TestRefusedBeforeWork:
    @pytest.fixture(autouse=True)
    def _no_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise AssertionError("work was begun")

        monkeypatch.setattr(pipeline, "open_checkpoint", fail)

    def refused(self, recipe: Path, *overrides: str, targets: tuple[str, ...] = ()) -> str:
        with pytest.raises(BuildError) as caught:
            build(recipe, overrides=overrides, only_targets=targets)
        assert not (recipe.parent / "out").exists()
        return str(caught.value)

    def test_gpu_beside_cpu(self, recipe: Path) -> None:
        text = self.refused(recipe, "targets=[h100, cpu-generic]", "quantize.weights=bf16")
        assert "cannot build target `h100`: GPU targets are not built yet" in text
        assert "hint: of this recipe's targets, `--target cpu-generic` can be built here" in text

    def test_only_gpu(self, recipe: Path) -> None:
        text = self.refused(recipe, "targets=[h100]")
        assert "--set targets=[cpu-native]" in text

    @pytest.mark.parametrize(
        "override",
        ["quantize.weights=keep", "quantize.kv_cache=int8", "engine.tensor_parallel=2", "quantize.weights=fp8"],
    )
    def test_what_is_not_built_yet(self, recipe: Path, override: str) -> None:
        text = self.refused(recipe, "targets=[cpu-generic]", override)
        assert override.partition("=")[0] in text
        assert "not built yet" in text

    def test_unknown_target(self, recipe: Path) -> None:
        text = self.refused(recipe, targets=("cpu-generik",))
        assert "no target `cpu-generik`" in text
        assert "`cpu-generic`" in text

    def test_other_architecture(self, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        text = self.refused(recipe)
        assert "`cpu-x86-64-v3`: it is for x86-64, and this machine is `aarch64`" in text
        assert "`--target cpu-generic`" in text

    def test_block_size_that_no_cpu_plan_has(self, recipe: Path) -> None:
        with pytest.raises(BuildError, match="needs a multiple of 16 tokens"):
            build(recipe, overrides=["engine.block_size=8"])

    def test_bad_recipe(self, recipe: Path) -> None:
        with pytest.raises(RecipeError):
            build(recipe, overrides=["engine.max_context=much"])


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("open_checkpoint", CheckpointError),
        ("decoder_spec", ExportError),
        ("export_decoder", ExportError),
        ("apply_passes", ExportError),
        ("compile_cpu", ToolchainError),
        ("publish", BuildError),
    ],
)
def test_failing_stage_publishes_nothing(
    checkpoint: FakeCheckpoint,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: Callable[[str], Exception],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("stage failed")

    monkeypatch.setattr(pipeline, stage, fail)
    with pytest.raises(type(error("")), match="stage failed"):
        build(recipe, only_targets=["cpu-generic"])
    assert list((recipe.parent / "out").glob("*/*/*")) == []
    assert checkpoint.closed == (stage != "open_checkpoint")


def test_killed_at_any_change(checkpoint: FakeCheckpoint, recipe: Path) -> None:
    """A killed build leaves nothing or a whole bundle, and the next one finishes."""
    for change in range(1000):
        out = recipe.parent / f"{change}"

        def build_here(out: Path = out) -> None:
            pipeline.build(recipe, out=out, progress=Recorder(), only_targets=["cpu-generic"])

        killed = killed_at(build_here, change)
        for path in out.glob("tiny/cpu-generic/[!.]*"):
            open_bundle(path, verify="full")
        build_here()
        assert len(list((out / "tiny" / "cpu-generic").iterdir())) == 2
        if not killed:
            break
    assert change > 15
