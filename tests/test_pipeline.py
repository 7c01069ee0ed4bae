"""The order of the stages, what is refused before any work, and what a failing stage leaves behind."""

from __future__ import annotations

import errno
import json
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import killed_at
from pipelines import RECIPE, STAGES, FakeCheckpoint, Recorder, fake_stages

from plankiln.bundle import open_bundle
from plankiln.compiler import pipeline
from plankiln.compiler.store import Store
from plankiln.errors import BuildError, CheckpointError, ExportError, RecipeError, ToolchainError

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 targets")


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCheckpoint:
    """Every stage but the recipe and packaging is a fake, and the store is empty."""
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))
    return fake_stages(monkeypatch)


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


def test_where_the_source_lies_is_no_part_of_the_digest(checkpoint: FakeCheckpoint, recipe: Path) -> None:
    (first,) = build(recipe, only_targets=["cpu-generic"])
    (moved,) = build(recipe, only_targets=["cpu-generic"], overrides=["model.source=/elsewhere/copy.gguf"])
    assert (moved.digest, moved.existed) == (first.digest, True)
    checkpoint.digest = "ef" * 32
    (other,) = build(recipe, only_targets=["cpu-generic"])
    assert other.digest != first.digest
    assert open_bundle(first.path).manifest.source.uri == "model.gguf"


@pytest.mark.parametrize(("stage", "where"), [("pack_weights", "stage store"), ("link_or_copy", "bundle")])
def test_a_disk_that_fills_up_is_one_clear_error(
    checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch, stage: str, where: str
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pipeline, stage, fill)
    with pytest.raises(BuildError) as caught:
        build(recipe, only_targets=["cpu-generic"])
    (problem,) = caught.value.problems
    assert problem.what == f"cannot write the {where} (No space left on device)"
    assert problem.hint.startswith("free some space")
    assert list((recipe.parent / "out").glob("tiny/cpu-generic/*")) == []


def test_a_limit_on_the_size_of_files(
    checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_or_copy(source: Path, place: Path) -> None:
        place.write_bytes(b"w" * 100_000)

    monkeypatch.setattr(pipeline, "link_or_copy", link_or_copy)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(BuildError, match=r"cannot write the bundle \(File too large\).*\nhint: .*`ulimit -f`"):
            build(recipe, only_targets=["cpu-generic"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((recipe.parent / "out" / "tiny" / "cpu-generic").iterdir()) == []


def test_values_that_no_manifest_holds(checkpoint: FakeCheckpoint, recipe: Path) -> None:
    checkpoint.digest = "none"
    with pytest.raises(BuildError, match="a bundle cannot state what was built: digest"):
        build(recipe, only_targets=["cpu-generic"])


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
        assert "--set 'targets=[cpu-native]'" in text

    @pytest.mark.parametrize(
        "override",
        [
            "quantize.kv_cache=fp16",
            "engine.tensor_parallel=2",
        ],
    )
    def test_what_is_not_built_yet(self, recipe: Path, override: str) -> None:
        text = self.refused(recipe, "targets=[cpu-generic]", override)
        assert override.partition("=")[0] in text
        assert "not built yet" in text

    def test_nvfp4_has_no_cpu_kernel(self, recipe: Path) -> None:
        text = self.refused(recipe, "targets=[cpu-generic]", "quantize.weights=nvfp4")
        assert "no CPU kernel multiplies `nvfp4`" in text

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
        ("find_compiler", ToolchainError),
        ("lower_cpu", ExportError),
        ("compile_code", ToolchainError),
        ("pack_weights", CheckpointError),
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


def test_killed_at_any_change(checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed build leaves nothing or a whole bundle and a consistent store, and the next one finishes."""
    for change in range(0, 1000, 3):
        out = recipe.parent / f"{change}"
        monkeypatch.setenv("PLANKILN_STORE", str(out / "store"))

        def build_here(out: Path = out) -> pipeline.BuildResult:
            (result,) = pipeline.build(recipe, out=out, progress=Recorder(), only_targets=["cpu-generic"])
            return result

        killed = killed_at(build_here, change)
        store = Store(out / "store")
        for path in out.glob("tiny/cpu-generic/[!.]*"):
            open_bundle(path, verify="full")
        assert [store.fault(entry) for entry in store.entries.glob("[!.]*") if entry.is_dir()] == [None] * len(
            store.all()
        )
        digest = build_here().digest
        assert {path.name for path in (out / "tiny" / "cpu-generic").iterdir()} == {digest, "latest"}
        assert len(list(store.entries.iterdir())) == 3
        if not killed:
            break
    assert change > 40
