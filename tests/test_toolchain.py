"""Compiling a plan: the clear errors when there is no compiler, an old one, or code it refuses."""

from __future__ import annotations

import os
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


def test_kernels_lie_where_the_installed_package_is() -> None:
    assert {"abi.h", "plan.h"} <= set(os.listdir(toolchain.KERNELS))
