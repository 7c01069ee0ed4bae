"""Predicted limits against what packing really takes, and refusals that come before the work."""

from __future__ import annotations

import os
import resource
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from checkpoints import write_tiny_gguf, write_tiny_hf
from plans import fused_graph, write_recipe

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler import estimate as estimates
from plankiln.compiler import pipeline
from plankiln.compiler.cpu.lower import lower
from plankiln.compiler.cpu.pack import write_weights
from plankiln.compiler.estimate import Estimate, estimate
from plankiln.compiler.measure import process_bytes
from plankiln.compiler.precision import Precision, WeightChoice
from plankiln.console import QuietProgress
from plankiln.errors import BuildError
from plankiln.host import Memory

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MARGIN = 16 << 20


@pytest.fixture(scope="module")
def gguf(model: Path) -> Path:
    return write_tiny_gguf(model.parent / "sized.gguf", model, kind="Q4_1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("sized") / "model", "llama", **SHAPE, **HEADS)


@pytest.mark.parametrize("weights", sorted({*get_args(WeightChoice)} - {"auto"}))
@pytest.mark.parametrize("source", ["model", "gguf"])
def test_packing_takes_what_was_predicted(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, weights: WeightChoice
) -> None:
    """One matrix at a time, never the model: the peak is within the prediction, which is within 4 times the peak."""
    place = request.getfixturevalue(source)
    program = lower(fused_graph(place, Precision(weights), "fp32", 128), "sized")
    with open_checkpoint(str(place), base=place.parent) as checkpoint:
        predicted = estimate(program, checkpoint.tensors, code=False, weights=True, linked=True, reference=False)
    tracemalloc.start()
    try:
        size = write_weights(program, tmp_path / "weights.bin")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= predicted.packing
    assert predicted.packing - MARGIN <= 4 * peak
    assert predicted.store == size == (tmp_path / "weights.bin").stat().st_size
    assert predicted.compiler == 0


def test_every_row_is_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[str, int, int]] = Counter()
    read_rows = Checkpoint.read_rows

    def counted(self: Checkpoint, name: str, start: int, stop: int) -> Any:
        reads[name, start, stop] += 1
        return read_rows(self, name, start, stop)

    program = lower(fused_graph(model, "bf16", "bf16", 128), "sized")
    monkeypatch.setattr(Checkpoint, "read_rows", counted)
    write_weights(program, tmp_path / "weights.bin")
    assert set(reads.values()) == {1}
    with open_checkpoint(str(model), base=model) as checkpoint:
        rows = Counter[str]()
        for name, start, stop in reads:
            rows[name] += stop - start
        assert rows == {name: info.shape[0] for name, info in checkpoint.tensors.items()}


class TestRefusedBeforeWork:
    @pytest.fixture
    def recipe(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        def fail(*_: object) -> None:
            raise AssertionError("work was begun")

        for stage in ("compile_code", "pack_weights"):
            monkeypatch.setattr(pipeline, stage, fail)
        monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))
        return write_recipe(tmp_path / "sized.yaml", model)

    def refused(self, recipe: Path) -> str:
        with pytest.raises(BuildError) as caught:
            pipeline.build(recipe, out=recipe.parent / "out", progress=QuietProgress())
        assert not (recipe.parent / "out").exists()
        return str(caught.value)

    def test_memory(self, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(estimates, "memory", lambda: Memory(1 << 30, 20 << 20, None))
        text = self.refused(recipe)
        assert "packing the weights needs about 40.0 MiB of memory, and 20.0 MiB are available" in text
        assert "compiling the plan needs about 400.0 MiB of memory, and 20.0 MiB are available\nhint: close" in text

    def test_disk(self, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
        text = self.refused(recipe)
        assert f"on the disk of `{recipe.parent / 'store' / 'stages'}`, and 1.0 MiB are available" in text
        assert "plankiln store gc" in text

    def test_address_space(self, recipe: Path) -> None:
        """A real limit (RLIMIT_AS), in a child of its own."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                limit = process_bytes("VmSize") + (32 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                assert "packing the weights needs about 40.0 MiB of memory" in self.refused(recipe)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0


def test_unknown_memory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "memory", lambda: Memory(None, None, None))
    Estimate(1 << 60, 1 << 60, 0, 0).check(tmp_path / "a" / "b", tmp_path)
