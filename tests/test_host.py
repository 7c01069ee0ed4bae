"""What the control groups leave of a machine: memory and cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plankiln import host
from plankiln.host import Memory, memory, readable_size, usable_cores

NESTED = "0::/a/b\n"
V1 = "7:cpu,cpuacct:/box\n5:memory:/box\n0::/\n"
K = 1 << 10


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """2 MiB of memory, 1 MiB of it available, eight cores; returns where /proc and /sys/fs/cgroup are."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def put(machine: Path, groups: str, files: dict[str, str]) -> None:
    (machine / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = machine / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine() -> None:
    found = memory()
    assert found.total is None or (found.available is not None and 1 << 20 < found.available <= found.total)
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("groups", "files", "limit", "available"),
    [
        (NESTED, {"a/b/memory.max": "max", "a/memory.max": f"{500 * K}", "memory.max": f"{900 * K}"}, 500, 500),
        (NESTED, {"a/memory.max": f"{500 * K}", "a/memory.current": f"{100 * K}"}, 500, 400),
        (NESTED, {"a/memory.max": f"{500 * K}", "memory.max": f"{900 * K}", "memory.current": f"{880 * K}"}, 500, 20),
        (NESTED, {"memory.max": f"{500 * K}", "memory.current": f"{501 * K}"}, 500, 0),
        (NESTED, {"memory.max": f"{4096 * K}", "memory.current": "4096\n"}, 4096, 1024),
        (V1, {"memory/box/memory.limit_in_bytes": f"{500 * K}\n", "memory/box/memory.usage_in_bytes": "0\n"}, 500, 500),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, 1024),
        ("", {}, None, 1024),
        ("odd\n", {}, None, 1024),
    ],
)
def test_memory(machine: Path, groups: str, files: dict[str, str], limit: int | None, available: int) -> None:
    put(machine, groups, files)
    assert memory() == Memory(2048 * K, available * K, limit and limit * K)


@pytest.mark.parametrize(("folder", "prefix"), [("", ""), ("memory/box/", "total_")])
def test_file_cache_does_not_count_as_used(machine: Path, folder: str, prefix: str) -> None:
    """Weights just written or mapped fill a group's memory with pages that the kernel gives back."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if folder else ("memory.max", "memory.current")
    stat = f"anon 1\n{prefix}inactive_file {300 * K}\n{prefix}active_file {100 * K}\n"
    values = (f"{500 * K}", f"{490 * K}", stat)
    put(
        machine,
        V1 if folder else "0::/\n",
        dict(zip([folder + n for n in (*names, "memory.stat")], values, strict=True)),
    )
    assert memory().available == 410 * K


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (NESTED, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n", "cpu.max": "400000 100000\n"}, 3),
        (NESTED, {"cpu.max": "1000 100000\n"}, 1),
        (NESTED, {"cpu.max": "9900000 100000\n"}, 8),
        (V1, {"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 2),
        (V1, {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 8),
        (NESTED, {"cpu.max": "100000 0\n"}, 8),
        (NESTED, {"cpu.max": ""}, 8),
        ("", {}, 8),
    ],
)
def test_usable_cores(machine: Path, groups: str, files: dict[str, str], cores: int) -> None:
    put(machine, groups, files)
    assert usable_cores() == cores


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")])
def test_readable_size(count: int, text: str) -> None:
    assert readable_size(count) == text
