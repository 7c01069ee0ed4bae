"""What this machine is, as far as a compiled plan cares, and where on it our files go."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plankiln.errors import PlankilnError
from plankiln.target import cpuinfo, host_cpu_flags

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """`machine` as in `uname -m`, `flags` as in /proc/cpuinfo, `glibc` like "2.36" or None where there is none."""

    machine: str
    cpu: str
    flags: frozenset[str]
    glibc: str | None


def this_host() -> Host:
    """The machine this process runs on; what cannot be found out is empty."""
    try:
        libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        libc, version = "", ""
    return Host(
        machine=platform.machine(),
        cpu=cpuinfo("model name") or platform.processor() or platform.machine(),
        flags=host_cpu_flags(),
        glibc=version if libc == "glibc" else None,
    )


def cache_directory() -> Path:
    """`plankiln` in the user's cache directory. Raises PlankilnError where the user has no home to look in."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        hint = "set `HOME`, or `XDG_CACHE_HOME` to a directory you can write"
        raise PlankilnError("no cache directory: this user has no home", hint=hint)
    return Path(base) / "plankiln"


def store_directory() -> Path:
    """Where stages of builds are kept: $PLANKILN_STORE, or `cache_directory()`, whose error it raises."""
    chosen = os.environ.get("PLANKILN_STORE")
    return Path(chosen) if chosen else cache_directory()


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity, within its control groups' CPU quotas (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, version in _control_groups("cpu"):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        else:
            quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


@dataclass(frozen=True)
class Memory:
    """Bytes; None where this system does not tell. `limit` is the tightest of the control groups that hold this
    process; `available` is what may still be used, within every such limit."""

    total: int | None
    available: int | None
    limit: int | None


def memory() -> Memory:
    """What this machine and the process's control groups have. File cache counts as free: the kernel gives it back."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read(_PROC / "meminfo"), re.M)}
    limits, left = [], [sizes[name] for name in ("MemAvailable",) if name in sizes]
    for group, version in _control_groups("memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_read(group / name).strip() for name in names)
        if limit.isdecimal() and int(limit) < 1 << 60:
            limits.append(int(limit))
            prefix = "" if version == 2 else "total_"
            cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", _read(group / "memory.stat"), re.M)
            taken = max(0, int(used) - sum(map(int, cache))) if used.isdecimal() else 0
            left.append(max(0, int(limit) - taken))
    return Memory(sizes.get("MemTotal"), min(left, default=None), min(limits, default=None))


def readable_size(count: int) -> str:
    """Bytes in the largest unit that leaves a number above 1: `1.5 GiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} B"


def _control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Directories of the groups that hold this process, inner to outer, and the version of their interface."""
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            root, version = _CGROUP, 2
        elif controller in controllers.split(","):
            root, version = _CGROUP / controller, 1
        else:
            continue
        inner = Path(group.lstrip("/"))
        yield from ((root / folder, version) for folder in (inner, *inner.parents))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
