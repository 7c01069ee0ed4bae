"""SIGKILL during a real build: nothing or a whole bundle, and the next build finishes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from checkpoints import write_tiny_hf
from faults import killed_after, killed_at
from plans import quick_compiler, write_recipe

from plankiln.bundle import open_bundle
from plankiln.compiler.pipeline import BuildResult, build
from plankiln.compiler.store import Store
from plankiln.console import QuietProgress
from plankiln.host import store_directory

EVERY = 13  # change points between kills


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    source = write_tiny_hf(root / "model", "llama", vocab_size=259, num_hidden_layers=1)
    return write_recipe(root / "tiny.yaml", source)


@pytest.fixture(autouse=True)
def _quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))


def build_in(out: Path, recipe: Path, *overrides: str) -> BuildResult:
    (result,) = build(recipe, overrides=overrides, out=out, progress=QuietProgress(), gate=False)
    return result


def assert_none_or_whole(out: Path) -> set[str]:
    """Whatever a reader can find opens with every byte verified; returns the names of the bundles."""
    found = set()
    for path in out.glob("tiny/*/[!.]*"):
        opened = open_bundle(path, verify="full")
        assert opened.path.name == opened.manifest.digest
        found.add(opened.path.name)
    return found


def assert_next_build_finishes(out: Path, recipe: Path, *overrides: str) -> BuildResult:
    before = assert_none_or_whole(out)
    result = build_in(out, recipe, *overrides)
    store = Store(store_directory())
    assert [store.fault(entry.path) for entry in store.all()] == [None] * len(store.all())
    assert result.existed == (result.digest in before)
    assert assert_none_or_whole(out) == before | {result.digest}
    assert os.readlink(result.path.parent / "latest") == result.digest
    names = {path.name for path in result.path.parent.iterdir()}
    assert names == before | {result.digest, "latest"}, "the next build sweeps up"
    return result


def test_kill_before_changes(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = set()
    for change in range(0, 1000, EVERY):
        out = tmp_path / f"{change}"
        monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "stores" / f"{change}"))
        killed = killed_at(lambda out=out: build_in(out, recipe), change)  # type: ignore[misc]
        results.add(assert_next_build_finishes(out, recipe).digest)
        if not killed:
            break
    assert change > 4 * EVERY
    assert len(results) == 1, "the same recipe gives the same bytes"


def test_kill_while_replacing(recipe: Path, tmp_path: Path) -> None:
    """`latest` leads to a whole bundle all the time, the old one or the new one."""
    out = tmp_path / "out"
    first = build_in(out, recipe).digest
    for change in range(1, 1000, EVERY):
        other = f"engine.max_context={250 - change}"
        killed = killed_at(lambda other=other: build_in(out, recipe, other), change)  # type: ignore[misc]
        (latest,) = out.glob("tiny/*/latest")
        assert open_bundle(latest, verify="full").manifest.digest in assert_none_or_whole(out)
        if not killed:
            break
    assert change > 3 * EVERY
    assert assert_next_build_finishes(out, recipe).digest == first


def test_kill_at_any_instant(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a build is the compiler, which outlives its builder for a moment."""
    started = time.monotonic()
    build_in(tmp_path / "timed", recipe)
    took = time.monotonic() - started
    for step in range(4):
        out = tmp_path / f"{step}"
        monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "stores" / f"{step}"))
        killed_after(lambda out=out: build_in(out, recipe), took * (step + 0.5) / 4)  # type: ignore[misc]
        assert_next_build_finishes(out, recipe)
