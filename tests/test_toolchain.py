"""Compiling a plan: the clear errors when there is no compiler, an old one, or code it refuses."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from plankiln.compiler.cpu import toolchain
from plankiln.compiler.cpu.toolchain import Compiler, compile_plan, find_compiler, needed_glibc
from plankiln.errors import ToolchainError
from plankiln.target import Target, get_target

SOURCE = '#include "plan.h"\nPLANKILN_EXPORT int answer() { return 42; }\n'


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_is_found_and_compiles_every_header_without_a_warning(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler.version
    source, output = tmp_path / "plan.cc", tmp_path / "plan.so"
    source.write_text(SOURCE)
    compile_plan(compiler, source, output, get_target("cpu-native"), ("-Wall", "-Wextra", "-Werror"))
    major, minor = map(int, needed_glibc(output).split("."))
    assert (major, minor) >= (2, 2)


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler found") as caught:
        find_compiler()
    assert "hint: install g++" in str(caught.value)


def test_a_cxx_that_does_not_run_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "exit 3")))
    with pytest.raises(ToolchainError, match="does not run: CXX="):
        find_compiler()


def test_cxx_may_hold_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{script(tmp_path / 'cxx', 'echo my compiler 1.0')} --one")
    assert find_compiler().command[1:] == ("--one",)


def test_refused_code_names_the_first_error_and_the_command(tmp_path: Path) -> None:
    source = tmp_path / "plan.cc"
    source.write_text("int answer() { return missing; }\n")
    with pytest.raises(ToolchainError, match=r"compiling the plan failed: .*missing") as caught:
        compile_plan(find_compiler(), source, tmp_path / "plan.so", get_target("cpu-generic"))
    assert str(source) in caught.value.problems[0].hint


def test_a_target_the_compiler_does_not_know(tmp_path: Path) -> None:
    source = tmp_path / "plan.cc"
    source.write_text(SOURCE)
    future = Target("cpu-x86-64-v9", "cpu", "avx512", (), ("-march=x86-64-v9",))
    with pytest.raises(ToolchainError, match="does not know target `cpu-x86-64-v9`"):
        compile_plan(find_compiler(), source, tmp_path / "plan.so", future)


def test_a_compiler_that_vanishes_or_dies_silently(tmp_path: Path) -> None:
    source = tmp_path / "plan.cc"
    source.write_text(SOURCE)
    with pytest.raises(ToolchainError, match="could not be started"):
        compile_plan(Compiler((str(tmp_path / "gone"),), "?"), source, tmp_path / "p.so", get_target("cpu-generic"))
    silent = Compiler((str(script(tmp_path / "silent", "kill -9 $$")),), "?")
    with pytest.raises(ToolchainError, match="exit status -9"):
        compile_plan(silent, source, tmp_path / "p.so", get_target("cpu-generic"))


def test_a_compiler_that_writes_nothing(tmp_path: Path) -> None:
    quiet = Compiler((str(script(tmp_path / "quiet", "exit 0")),), "?")
    with pytest.raises(ToolchainError, match=r"compiling the plan failed: the compiler wrote no plan\.so"):
        compile_plan(quiet, tmp_path / "plan.cc", tmp_path / "plan.so", get_target("cpu-generic"))


def test_a_cxx_that_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(ToolchainError, match=r"not a command \(No closing quotation\): CXX="):
        find_compiler()


def test_complaints_in_no_known_encoding(tmp_path: Path) -> None:
    odd = Compiler((str(script(tmp_path / "odd", r"printf 'error: \377\n' >&2; exit 1")),), "?")
    with pytest.raises(ToolchainError, match="compiling the plan failed: error: \ufffd"):
        compile_plan(odd, tmp_path / "plan.cc", tmp_path / "plan.so", get_target("cpu-generic"))


@pytest.mark.parametrize("interrupt", [True, False])
def test_no_child_of_the_compiler_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: bool) -> None:
    """Neither after an interrupt nor after a timeout."""
    pids = tmp_path / "pids"
    nested = Compiler((str(script(tmp_path / "nested", f"sleep 600 & echo $! $$ > {pids}; wait")),), "?")

    def wait(process: subprocess.Popen[str], timeout: float) -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt if interrupt else subprocess.TimeoutExpired("nested", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait)
    with pytest.raises(KeyboardInterrupt if interrupt else ToolchainError):
        compile_plan(nested, tmp_path / "plan.cc", tmp_path / "plan.so", get_target("cpu-generic"))
    for pid in map(int, pids.read_text().split()):
        for _ in range(500):  # an orphan is buried by init
            try:
                if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                    break
            except OSError:
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"process {pid} is left")


def test_kernels_lie_where_the_installed_package_is() -> None:
    assert {"abi.h", "plan.h"} <= set(os.listdir(toolchain.KERNELS))
