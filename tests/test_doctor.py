"""The doctor: it sees what is there, and says what to do about what is not."""

from __future__ import annotations

import io
import json
import pwd
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

from plankiln import doctor
from plankiln.checkpoint import open_checkpoint
from plankiln.doctor import collect, render
from plankiln.errors import PlankilnError
from plankiln.host import cache_directory, store_directory


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def shown(report: doctor.Report) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=200, no_color=True))
    return out.getvalue()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no tools on its path and a store that can be made; returns the directory on the path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "not" / "yet"))
    return tools


def test_this_machine() -> None:
    before = set(sys.modules)
    report = collect()
    assert not {"torch", "tensorrt", "tensorrt_rtx", "onnxruntime"} & (set(sys.modules) - before)
    assert report.cores >= 1
    assert report.memory.total is None or report.memory.total > 0
    assert report.best_target.name == "cpu-native"
    data = json.loads(json.dumps(report.as_dict()))
    assert data["best_target"]["isa"] == report.best_target.isa
    assert {"python", "cpu_flags", "compilers", "gpus", "packages", "problems"} <= set(data)
    assert "cpu-native" in shown(report)


def test_bare_machine_gets_a_hint_and_nothing_is_written(bare: Path, tmp_path: Path) -> None:
    report = collect()
    assert report.compilers == ()
    assert report.gpus == ()
    (problem,) = [problem for problem in report.problems if "compiler" in problem.what]
    assert "apt-get install g++" in problem.hint
    assert "hint: install one" in shown(report)
    assert report.store == str(tmp_path / "not" / "yet")
    assert report.store_free
    assert not (tmp_path / "not").exists()


def test_compilers_are_found_once_with_cxx_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bare, "g++", "echo 'g++ (Distribution) 12.2.0'")
    script(bare, "clang++", "echo 'clang version 16'")
    (bare / "c++").symlink_to(bare / "g++")
    monkeypatch.setenv("CXX", "c++")
    report = collect()
    assert [(item.command, item.version, item.builds_native) for item in report.compilers] == [
        ("c++", "g++ (Distribution) 12.2.0", True),
        ("clang++", "clang version 16", True),
    ]
    assert not [problem for problem in report.problems if "compiler" in problem.what or "CXX" in problem.what]


def test_old_and_broken_compilers(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bare, "g++", 'test "$1" = --version && echo "g++ 7"')
    script(bare, "clang++", "exit 1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = collect()
    assert [(item.version, item.builds_native) for item in report.compilers] == [("g++ 7", False)]
    text = shown(report)
    assert "`$CXX` names `no-such-compiler`, which does not run" in text
    assert "does not know cpu-native's options" in text
    assert "or newer" in text


def test_gpus(bare: Path) -> None:
    script(bare, "nvidia-smi", "echo 'NVIDIA H200, 9.0, 143771, 580.1'; echo 'Odd [GPU], [N/A], [N/A], 1'; echo junk")
    report = collect()
    assert report.gpus == (
        doctor.Gpu("NVIDIA H200", 90, 143771 << 20, "580.1"),
        doctor.Gpu("Odd [GPU]", 0, 0, "1"),
    )
    assert "Odd [GPU]" in shown(report)


def test_broken_driver(bare: Path) -> None:
    script(bare, "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    assert any("`nvidia-smi` is installed but reports no GPU" in problem.what for problem in collect().problems)


def test_hanging_driver(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.2)
    script(bare, "nvidia-smi", "exec /bin/sleep 20")
    assert any("nvidia-smi" in problem.what for problem in collect().problems)


def test_packages_come_from_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("tensorrt_rtx_cu13", "1.7"), ("onnxruntime-gpu", "1.32"), ("Torch", "2.13"), ("other", "1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    report = collect()
    assert report.packages == {"onnxruntime-gpu": "1.32", "tensorrt-rtx-cu13": "1.7", "torch": "2.13"}
    (problem,) = [problem for problem in report.problems if "missing" in problem.what]
    assert "onnx-ir" in problem.what
    assert "plankiln[build]" in problem.hint


def test_store_that_cannot_be_written(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "file" / "store"))
    report = collect()
    assert report.store_free is None
    assert any("cannot be written" in problem.what and "PLANKILN_STORE" in problem.hint for problem in report.problems)


def test_the_store_and_the_cache(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "plankiln"
    assert store_directory() == tmp_path / "not" / "yet"
    monkeypatch.delenv("PLANKILN_STORE")
    assert store_directory() == cache_directory()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "plankiln"


def test_a_user_without_a_home(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "PLANKILN_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(PlankilnError, match=r"this user has no home\nhint: set `HOME`"):
        cache_directory()
    report = collect()
    assert (report.store, report.store_free) == ("nowhere", None)
    assert "this user has no home" in shown(report)
    with pytest.raises(PlankilnError, match="this user has no home"):
        open_checkpoint("m.gguf", base=tmp_path)
