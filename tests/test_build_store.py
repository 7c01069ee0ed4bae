"""Builds over the stage store: nothing done twice, every rebuild explained, two builds at once, one target failing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pipelines import RECIPE, FakeCheckpoint, Recorder, fake_stages

from plankiln.bundle import open_bundle
from plankiln.compiler import pipeline, stages, store_care
from plankiln.compiler.pipeline import BuildResult, IncompleteBuildError
from plankiln.compiler.store import Store
from plankiln.compiler.store_care import collect
from plankiln.errors import BuildError, ToolchainError, UsageError

GENERIC = ("cpu-generic",)
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 targets")


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCheckpoint:
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))
    return fake_stages(monkeypatch)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def build(
    recipe: Path, *overrides: str, out: str = "out", progress: Recorder | None = None, **more: Any
) -> BuildResult:
    options = {"only_targets": GENERIC, "out": recipe.parent / out, "progress": progress or Recorder(), **more}
    (result,) = pipeline.build(recipe, overrides=overrides, **options)
    return result


def explained(recipe: Path, *overrides: str, **options: Any) -> dict[str, str]:
    """What `--explain` says of each stage."""
    recorder = Recorder()
    build(recipe, *overrides, progress=recorder, explain=True, **options)
    said = [note.removeprefix("cpu-generic: ").partition(": ") for note in recorder.notes]
    return {name.split()[0]: answer for name, _, answer in said}


class TestNothingTwice:
    def test_second_build_runs_no_stage(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        first = build(recipe)
        assert checkpoint.worked == ["code", "weights"]
        recorder = Recorder()
        again = build(recipe, progress=recorder)
        assert recorder.stages == [("recipe", ""), ("checkpoint", "")]
        assert checkpoint.worked == ["code", "weights"]
        assert (again.path, again.existed, again.reused) == (first.path, True, {"bundle": True})
        assert recorder.notes == []

    def test_another_place_is_made_of_the_same_files(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        first, second = build(recipe), build(recipe, out="other")
        assert checkpoint.worked == ["code", "weights"]
        assert second.digest == first.digest
        assert second.reused == {"bundle": False, "code": True, "weights": True}
        for name in ("plan.so", "plan.cc", "weights.bin"):
            assert (first.path / "rank0" / name).samefile(second.path / "rank0" / name)
        open_bundle(second.path, verify="full")

    def test_only_what_changed_is_done_again(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        build(recipe)
        build(recipe, "engine.max_sequences=1")
        assert checkpoint.worked == ["code", "weights"]
        build(recipe, "engine.max_context=32")
        assert checkpoint.worked == ["code", "weights"] * 2, "the tables of RoPE are as long as the context"
        checkpoint.digest = "ef" * 32
        build(recipe)
        assert checkpoint.worked == ["code", "weights"] * 2 + ["weights"]

    @pytest.mark.parametrize("minimum", ["true", "false"])
    def test_settings_that_are_true_or_false(self, checkpoint: FakeCheckpoint, recipe: Path, minimum: str) -> None:
        settings = ("quantize.weights=int4_rtn", f"quantize.minimum={minimum}")
        first, again = build(recipe, *settings), build(recipe, *settings)
        assert (again.path, again.existed, again.reused) == (first.path, True, {"bundle": True})
        assert checkpoint.worked == ["code", "weights"]

    def test_latest_follows_a_build_that_did_nothing(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        first, other = build(recipe), build(recipe, "engine.max_sequences=1")
        latest = first.path.parent / "latest"
        assert os.readlink(latest) == other.digest
        build(recipe)
        assert os.readlink(latest) == first.digest
        assert {path.name for path in latest.parent.iterdir()} == {first.digest, other.digest, "latest"}

    def test_report_says_what_it_took(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        report = json.loads((build(recipe).path / "report.json").read_text())
        assert report["seconds"].keys() == report["peak_rss"].keys() > {"code", "weights"}
        assert all(value > 1 << 20 for value in report["peak_rss"].values())
        assert report["predicted"].keys() == {"packing", "compiler", "store", "out"}
        assert report["reused"] == {"bundle": False, "code": False, "weights": False}
        assert "compiler_peak_rss" in report


class TestExplain:
    def test_first_build(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        said = explained(recipe)
        assert said.pop("predicted").startswith("memory 0 B to pack the weights, 400.0 MiB for the compiler; disk ")
        assert said == dict.fromkeys(("bundle", "code", "weights"), "miss: nothing like it in the store yet")

    def test_nothing_changed(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        build(recipe)
        assert explained(recipe) == {"bundle": "hit"}

    def test_recipe_changed(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        build(recipe)
        build(recipe, "engine.max_tokens_per_step=9", "engine.max_logit_rows=9")
        said = explained(recipe, "engine.max_sequences=1")
        assert said["bundle"] == "miss: recipe.engine.max_sequences `2` → `1`"
        assert (said["code"], said["weights"]) == ("hit", "hit")

    def test_model_changed(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        build(recipe)
        checkpoint.digest = "ef" * 32
        said = explained(recipe)
        assert said["bundle"] == said["weights"] == "miss: source cdcdcdcdcd → efefefefef"
        assert said["code"] == "hit"

    def test_config_alone_changed(self, checkpoint: FakeCheckpoint, recipe: Path, store: Store) -> None:
        """What the config says ends up in vectors: the digest of the checkpoint is not trusted to show it."""
        build(recipe)
        (whole,) = (entry for entry in store.all() if entry.record.stage == "bundle")
        store.remove(whole.path)
        checkpoint.config = {"rope_theta": 500000.0}
        said = explained(recipe)
        assert said["weights"] == "miss: model.rope.theta `10000.0` → `500000.0`"
        assert said["code"] == "hit"

    def test_our_code_and_a_tool_changed(
        self, checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build(recipe)
        own, version = stages._own, stages.version
        monkeypatch.setattr(stages, "_own", lambda patterns: {**own(patterns), "our.compiler/cpu/pack.py": "edited"})
        monkeypatch.setattr(stages, "version", lambda name: "0.0" if name == "numpy" else version(name))
        said = explained(recipe)
        assert f"tool.numpy `{version('numpy')}` → `0.0`" in said["weights"]
        assert "our.compiler/cpu/pack.py" in said["weights"]
        assert said["weights"].count("→") == said["bundle"].count("→") == 2

    def test_bundle_removed(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        first = build(recipe)
        shutil.rmtree(first.path)
        said = explained(recipe)
        assert said["bundle"] == f"miss: no sound bundle at `{first.path}`"
        assert (said["code"], said["weights"]) == ("hit", "hit")


def test_the_keys_see_our_own_files() -> None:
    root = Path(__file__).parent.parent
    folders = [root / name for name in ("compiler", "quantize", "plugins")] + [root / "plankiln" / "checkpoint"]
    modules, headers = (
        {f"our.{path.relative_to(folder.parent)}" for folder in folders for path in folder.rglob(pattern)}
        for pattern in ("*.py", "*.h")
    )
    assert stages._own(stages._PACKING).keys() == modules
    shared = {"our.manifest.py", "our.recipe.py", "our.target.py", "our.chat_template.py"}
    assert stages._own(stages._BUILDING).keys() == modules | headers | shared
    assert headers | {"our.compiler/cpu/toolchain.py"} <= stages._own(stages._COMPILING).keys()
    assert {"tokenizers", "jinja2", "gguf", "onnx"} <= set(stages._BUILDING_TOOLS)


def test_headers_edited_during_a_build_poison_no_entry(
    checkpoint: FakeCheckpoint, recipe: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, works = stages._own, pipeline.compile_code

    def edit(*rest: Any) -> str:
        monkeypatch.setattr(stages, "_own", lambda patterns: {**own(patterns), "our.plugins/cpu/plan.h": "edited"})
        return works(*rest)

    monkeypatch.setattr(pipeline, "compile_code", edit)
    with pytest.raises(BuildError, match="headers changed while they were compiled"):
        build(recipe)
    assert store.all() == []


class TestDamage:
    def test_damaged_entry_is_made_again(self, checkpoint: FakeCheckpoint, recipe: Path, store: Store) -> None:
        first = build(recipe)
        shutil.rmtree(recipe.parent / "out")
        (path,) = store.entries.glob("*/weights.bin")
        path.write_bytes(b"?")
        recorder = Recorder()
        assert build(recipe, progress=recorder).digest == first.digest
        assert checkpoint.worked == ["code", "weights", "weights"]
        (note,) = recorder.notes
        assert "stage `weights` is done again: its entry in the store has another `weights.bin` than was stored" in note

    @pytest.mark.parametrize("name", ["rank0/weights.bin", "rank0/plan.so", "manifest.json"])
    def test_damaged_bundle_is_made_again(self, checkpoint: FakeCheckpoint, recipe: Path, name: str) -> None:
        """Its files are those of the store, so both are found damaged."""
        first = build(recipe)
        data = (first.path / name).read_bytes()
        (first.path / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        again = build(recipe)
        assert (again.digest, again.reused["bundle"]) == (first.digest, False)
        open_bundle(again.path, verify="full")

    def test_stage_that_leaves_nothing(
        self, checkpoint: FakeCheckpoint, recipe: Path, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for stage in ("compile_code", "pack_weights"):
            with monkeypatch.context() as patch:
                patch.setattr(pipeline, stage, lambda *_: None)
                with pytest.raises(BuildError, match="did not finish: it left nothing"):
                    build(recipe)
        assert [entry.record.stage for entry in store.all()] == ["code"]
        assert not list((recipe.parent / "out").glob("*/*/*"))


class TestSeveralTargets:
    def test_shared_weights_are_packed_once(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        build_all = pipeline.build(recipe, out=recipe.parent / "out", progress=Recorder())
        assert [result.target for result in build_all] == ["cpu-generic", "cpu-x86-64-v3"]
        assert checkpoint.worked == ["code", "weights", "code"]

    def test_keep_going(self, checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        works = pipeline.compile_code

        def fail(source: Any, *rest: Any) -> str:
            if source.target.name == "cpu-generic":
                raise ToolchainError("no such header")
            return works(source, *rest)

        monkeypatch.setattr(pipeline, "compile_code", fail)
        targets = "targets=[cpu-generic, h100, cpu-x86-64-v3]"
        run = {"out": recipe.parent / "out", "progress": Recorder(), "overrides": [targets]}
        with pytest.raises(IncompleteBuildError) as caught:
            pipeline.build(recipe, keep_going=True, **run)
        whats = [problem.what for problem in caught.value.problems]
        assert whats == ["cannot build target `h100`", "no such header"]
        assert [result.target for result in caught.value.results] == ["cpu-x86-64-v3"]
        with pytest.raises(BuildError, match="cannot build target `h100`"):
            pipeline.build(recipe, **run)
        with pytest.raises(BuildError, match="cannot build target `h100`"):
            pipeline.build(recipe, keep_going=True, only_targets=["h100"], **run)

    def test_a_fault_of_the_model_is_told_once(self, checkpoint: FakeCheckpoint, recipe: Path) -> None:
        checkpoint.eos_token_ids = (99,)
        with pytest.raises(IncompleteBuildError) as caught:
            pipeline.build(recipe, out=recipe.parent / "out", progress=Recorder(), keep_going=True)
        assert len(caught.value.problems) == 1
        assert checkpoint.worked == []


def test_two_builds_at_once_do_the_work_once(
    checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    for stage in ("compile_code", "pack_weights"):
        works = getattr(pipeline, stage)

        def count(*rest: Any, works: Any = works, stage: str = stage) -> Any:
            os.write(write, b"!")
            return works(*rest)

        monkeypatch.setattr(pipeline, stage, count)
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                build(recipe)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert os.read(read, 100) == b"!!"


class TestSize:
    def test_live_bundles_stay_and_removed_ones_go(
        self, checkpoint: FakeCheckpoint, recipe: Path, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PLANKILN_STORE_LIMIT", "0")
        first = build(recipe)
        assert {entry.record.stage for entry in store.all()} == {"bundle", "code", "weights"}
        shutil.rmtree(first.path)
        assert len(collect(store, 0).removed) == 3
        assert build(recipe).digest == first.digest
        assert checkpoint.worked == ["code", "weights"] * 2

    def test_a_store_that_cannot_be_cleaned_up_fails_no_build(
        self, checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(parent: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(store_care, "sweep", refuse)
        recorder = Recorder()
        open_bundle(build(recipe, progress=recorder).path, verify="full")
        (note,) = recorder.notes
        assert note == "the store may be larger than its limit: cannot write the stage store (Permission denied)"

    def test_unusable_limit_before_any_work(
        self, checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PLANKILN_STORE_LIMIT", "much")
        with pytest.raises(UsageError, match="`much` is no size: PLANKILN_STORE_LIMIT"):
            build(recipe)
        assert checkpoint.worked == []


def test_a_store_that_cannot_be_written(
    checkpoint: FakeCheckpoint, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe.parent / "file").write_text("")
    monkeypatch.setenv("PLANKILN_STORE", str(recipe.parent / "file"))
    with pytest.raises(BuildError, match=r"cannot write the stage store .*\nhint: set PLANKILN_STORE"):
        build(recipe)
