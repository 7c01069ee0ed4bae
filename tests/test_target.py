"""Targets: what this machine resolves to, and what a plan asks of a CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from plankiln import target as targets
from plankiln.errors import RecipeError
from plankiln.target import TARGET_NAMES, get_target, host_cpu_flags, missing_flags, resolve_native

V3 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, machine: str = "x86_64") -> None:
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(text)
    monkeypatch.setattr(targets, "_CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("flags", "isa", "last_option"),
    [
        ("fpu sse2", "generic", None),
        (f"{V3}", "avx2", "-march=x86-64-v3"),
        (V3.replace("fma", ""), "generic", None),
        (f"{V3} avx512f", "avx2", "-march=x86-64-v3"),
        (V4, "avx512", "-march=x86-64-v4"),
        (f"{V4} avx512_bf16", "avx512", "-march=x86-64-v4"),
        (f"{V4} avx512_vnni", "avx512", "-mavx512vnni"),
        (f"{V4} avx512_vnni avx512_bf16 amx_bf16", "avx512_bf16", "-mavx512bf16"),
    ],
)
def test_native_is_the_best_level_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, isa: str, last_option: str | None
) -> None:
    pretend(monkeypatch, tmp_path, f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: none\n")
    native = resolve_native()
    assert (native.name, native.kind, native.isa) == ("cpu-native", "cpu", isa)
    assert (native.march or (None,))[-1] == last_option
    assert missing_flags(native) == []
    assert set(native.flags) <= host_cpu_flags() == set(flags.split())


def test_native_is_generic_on_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, f"Features\t: fp asimd bf16 {V3}\n", "aarch64")
    assert resolve_native().isa == "generic"
    assert "asimd" in host_cpu_flags()
    pretend(monkeypatch, tmp_path, "nothing here")
    assert resolve_native().isa == "generic"
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "missing")
    assert host_cpu_flags() == frozenset()
    assert missing_flags(get_target("cpu-generic")) == []


def test_missing_flags_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, f"flags : {V3} avx512f avx512cd\n")
    assert missing_flags(get_target("cpu-x86-64-v4-vnni")) == ["avx512bw", "avx512dq", "avx512vl", "avx512_vnni"]
    assert missing_flags(get_target("cpu-x86-64-v3")) == []


def test_levels_nest() -> None:
    v3, v4, vnni = (get_target(f"cpu-x86-64-{level}") for level in ("v3", "v4", "v4-vnni"))
    assert set(v3.flags) < set(v4.flags) < set(vnni.flags)
    assert (v3.isa, v4.isa, vnni.isa) == ("avx2", "avx512", "avx512")
    assert "avx512_bf16" not in vnni.flags


def test_every_name_resolves() -> None:
    for name in TARGET_NAMES:
        found = get_target(name)
        assert found.name == name
        assert found.kind == ("cpu" if name.startswith("cpu-") else "gpu")
        assert (found.sm > 0) == (found.memory > 0) == (found.kind == "gpu")


def test_gpu_abilities() -> None:
    assert [get_target(name).has_fp8 for name in ("t4", "a100", "l40s", "h100", "cpu-generic")] == [
        *(False, False, True, True, True),
    ]
    assert [get_target(name).has_rtx for name in ("t4", "a100", "rtx4090", "h100", "b200", "rtx5090")] == [
        *(True, True, True, False, False, True),
    ]


def test_unknown_target_is_guessed() -> None:
    with pytest.raises(RecipeError) as caught:
        get_target("cpu-x86_64-v3")
    (problem,) = caught.value.problems
    assert "did you mean `cpu-x86-64-v3`?" in problem.hint


@pytest.mark.parametrize("name", [name for name in TARGET_NAMES if name.startswith("cpu-x86")])
def test_compiler_options_allow_what_the_flags_promise(name: str) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or targets.platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler on x86-64")
    target = get_target(name)
    done = subprocess.run(
        [compiler, *target.march, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
    )
    macros = {line.split()[1] for line in done.stdout.splitlines()}
    names = {"avx512_vnni": "__AVX512VNNI__", "avx512_bf16": "__AVX512BF16__"}
    for flag in ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"):
        assert (names.get(flag, f"__{flag.upper()}__") in macros) == (flag in target.flags), flag
