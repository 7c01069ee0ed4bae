"""The processors a recipe can name: CPU levels with their instruction sets, and GPU SKUs."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plankiln.errors import RecipeError

Isa = Literal["generic", "avx2", "avx512", "avx512_bf16"]

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Target:
    """One processor to build for.

    isa: which kernel variants a CPU plan holds. flags: the /proc/cpuinfo names a CPU needs to run the plan.
    march: compiler options that allow exactly these instructions. sm, memory (bytes, nominal): GPUs only, else 0.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    isa: Isa = "generic"
    flags: tuple[str, ...] = ()
    march: tuple[str, ...] = ()
    sm: int = 0
    memory: int = 0

    @property
    def has_fp8(self) -> bool:
        """Whether FP8 tensors can be used: in software on any CPU, in hardware from SM89 on."""
        return self.kind == "cpu" or self.sm >= 89

    @property
    def has_rtx(self) -> bool:
        """Whether TensorRT for RTX builds for this processor."""
        return self.sm in (75, 80, 86, 89, 120, 121)


_V3_FLAGS = (
    *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
    *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
)
_V4_FLAGS = (*_V3_FLAGS, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI_FLAGS = (*_V4_FLAGS, "avx512_vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "avx512_bf16")
_V4_MARCH = ("-march=x86-64-v4",)
_VNNI_MARCH = (*_V4_MARCH, "-mavx512vnni")

# From the best down: cpu-native takes the first that the machine can run.
_CPU_LEVELS: tuple[tuple[str, Isa, tuple[str, ...], tuple[str, ...]], ...] = (
    ("", "avx512_bf16", _BF16_FLAGS, (*_VNNI_MARCH, "-mavx512bf16")),
    ("cpu-x86-64-v4-vnni", "avx512", _VNNI_FLAGS, _VNNI_MARCH),
    ("cpu-x86-64-v4", "avx512", _V4_FLAGS, _V4_MARCH),
    ("cpu-x86-64-v3", "avx2", _V3_FLAGS, ("-march=x86-64-v3",)),
    ("cpu-generic", "generic", (), ()),
)
_CPU = {name: Target(name, "cpu", isa, flags, march) for name, isa, flags, march in _CPU_LEVELS if name}

# SKU: SM version, device memory in GiB.
_GPU_TABLE = {
    "t4": (75, 16),
    "a100": (80, 80),
    "a10": (86, 24),
    "rtx3090": (86, 24),
    "l4": (89, 24),
    "l40s": (89, 48),
    "rtx4090": (89, 24),
    "h100": (90, 80),
    "h200": (90, 141),
    "b200": (100, 180),
    "b300": (103, 288),
    "rtx5090": (120, 32),
    "rtxpro6000": (120, 96),
}
_GPU = {name: Target(name, "gpu", sm=sm, memory=gib << 30) for name, (sm, gib) in _GPU_TABLE.items()}

TARGET_NAMES: tuple[str, ...] = ("cpu-native", *_CPU, *_GPU)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest of `known`, and all of them when they are few."""
    names = list(known)
    close = difflib.get_close_matches(word[:100].lower(), [name.lower() for name in names], n=1)
    guess = next((name for name in names if close and name.lower() == close[0]), None)
    listed = f"known: {', '.join(names)}"
    return f"did you mean `{guess}`? {listed}" if guess else listed


def cpuinfo(*keys: str) -> str:
    """The first value that /proc/cpuinfo has under one of `keys`; empty where the kernel does not list any."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")


def host_cpu_flags() -> frozenset[str]:
    """The CPU flags of this machine under their /proc/cpuinfo names; empty where the kernel does not list them."""
    return frozenset(cpuinfo("flags", "Features").split())


def resolve_native() -> Target:
    """`cpu-native` as the best level this machine can run. Anything but x86-64 is `generic`."""
    host = host_cpu_flags() if platform.machine().lower() in ("x86_64", "amd64") else frozenset()
    _, isa, flags, march = next(level for level in _CPU_LEVELS if host.issuperset(level[2]))
    return Target("cpu-native", "cpu", isa, flags, march)


def get_target(name: str) -> Target:
    """The target called `name`; `cpu-native` is resolved on this machine. Raises RecipeError for an unknown name."""
    if name == "cpu-native":
        return resolve_native()
    if found := _CPU.get(name) or _GPU.get(name):
        return found
    raise RecipeError(f"unknown target `{name}`", hint=did_you_mean(name, TARGET_NAMES))


def missing_flags(target: Target) -> list[str]:
    """The CPU flags that `target` needs and this machine lacks, in the target's order."""
    host = host_cpu_flags()
    return [flag for flag in target.flags if flag not in host]
