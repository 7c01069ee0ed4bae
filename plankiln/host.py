"""What this machine is, as far as a compiled plan cares, and where on it our files go."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from plankiln.errors import PlankilnError
from plankiln.target import cpuinfo, host_cpu_flags


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
    """Cores this process may keep busy: its affinity, within the control group's CPU quota (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores
