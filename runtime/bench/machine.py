"""The machine that is measured on, and how much of it others took meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plankiln.host import memory, this_host, usable_cores

_PROC_STAT = Path("/proc/stat")
_TELLING_FLAG = re.compile(r"avx|fma|f16c|amx|sse4|asimd|sve|i8mm|bf16")


def hardware() -> dict[str, Any]:
    """CPU model, the flags that kernels are chosen by, cores, memory in bytes, kernel."""
    host = this_host()
    return {
        "cpu": host.cpu,
        "flags": sorted(flag for flag in host.flags if _TELLING_FLAG.search(flag)),
        "cores": usable_cores(),
        "memory": memory().total,
        "kernel": os.uname().release,
    }


def commit() -> str | None:
    """The commit of the checkout this code runs from, `-dirty` when files differ; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class Busy:
    """Seconds since some moment: CPU time of everyone, time stolen by the hypervisor, and wall time."""

    everyone: float
    stolen: float
    wall: float

    @classmethod
    def now(cls) -> Busy:
        ticks = [int(field) for field in _PROC_STAT.read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _wait, irq, softirq, stolen = (t / os.sysconf("SC_CLK_TCK") for t in ticks)
        return cls(user + nice + system + irq + softirq, stolen, time.perf_counter())


def others(before: Busy, after: Busy, own: float) -> dict[str, float]:
    """Shares of the whole machine, 0 … 1, taken by other processes and by the hypervisor; own: our CPU seconds."""
    capacity = (after.wall - before.wall) * (os.cpu_count() or 1)
    busy = after.everyone - before.everyone - own
    return {
        "others": round(min(1.0, max(0.0, busy / capacity)), 3),
        "stolen": round((after.stolen - before.stolen) / capacity, 3),
    }
