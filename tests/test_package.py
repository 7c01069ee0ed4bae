"""Publishing: atomic whatever happens, named by content, never twice."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

import pytest
from bundles import DESCRIPTION, TEXTS, WEIGHTS, make_bundle, write_plan
from faults import killed_after, killed_at

from plankiln.bundle import open_bundle
from plankiln.compiler import package
from plankiln.compiler.package import publish, staging
from plankiln.errors import BuildError


def entries(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()} if out.exists() else set()


def assert_none_or_whole(out: Path) -> None:
    """Whatever a reader can find below `out` opens with every byte verified."""
    for path in out.glob("[!.]*"):
        assert open_bundle(path, verify="full").manifest.name == "tiny"


def test_layout_and_modes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        made = make_bundle(tmp_path / "a" / "tiny" / "cpu-generic")
    finally:
        os.umask(before)
    assert entries(made.path.parent) == {made.digest, "latest"}
    assert os.readlink(made.path.parent / "latest") == made.digest
    files = {str(p.relative_to(made.path)): stat.S_IMODE(p.stat().st_mode) for p in made.path.rglob("*")}
    assert files.pop("rank0") == 0o755
    plan = ["rank0/plan.so", "rank0/plan.cc", "rank0/weights.bin"]
    rest = ["manifest.json", "tokenizer.json", "chat_template.jinja", "report.json"]
    assert files == dict.fromkeys(plan + rest, 0o644)
    for folder in (made.path, made.path.parent, tmp_path / "a"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_same_content_is_published_once(tmp_path: Path) -> None:
    first = make_bundle(tmp_path)
    inode = (first.path / "rank0" / "weights.bin").stat().st_ino
    second = make_bundle(tmp_path, report=b'{"compile": 3.5}')
    assert (second.path, second.digest, second.existed) == (first.path, first.digest, True)
    assert (first.path / "rank0" / "weights.bin").stat().st_ino == inode
    assert (first.path / "report.json").read_bytes() == b"{}"
    assert entries(tmp_path) == {first.digest, "latest"}


def test_latest_follows_the_newest_build(tmp_path: Path) -> None:
    first = make_bundle(tmp_path)
    other = make_bundle(tmp_path, eos_token_ids=(5,))
    assert not other.existed
    assert (tmp_path / "latest").resolve() == other.path
    make_bundle(tmp_path)
    assert (tmp_path / "latest").resolve() == first.path


def test_damaged_bundle_is_replaced_by_the_next_build(tmp_path: Path) -> None:
    first = make_bundle(tmp_path)
    (first.path / "rank0" / "weights.bin").write_bytes(WEIGHTS[:-1] + b"?")
    again = make_bundle(tmp_path)
    assert not again.existed
    open_bundle(again.path, verify="full")
    assert entries(tmp_path) == {first.digest, "latest"}


def test_latest_leads_to_a_bundle_while_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    for change in range(1000):
        out = tmp_path / f"{change}"
        first = make_bundle(out, weights=b"w")
        (first.path / "rank0" / "weights.bin").write_bytes(b"?")
        killed = killed_at(lambda out=out: make_bundle(out, weights=b"w"), change)  # type: ignore[misc]
        assert (out / "latest" / "manifest.json").exists()
        make_bundle(out, weights=b"w")
        open_bundle(out, verify="full")
        assert entries(out) == {first.digest, "latest"}
        if not killed:
            break
    assert change > 15


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_RENAME_EXCHANGE", 1 << 30)
    first = make_bundle(tmp_path)
    (first.path / "rank0" / "plan.so").write_bytes(b"?")
    assert not make_bundle(tmp_path).existed
    open_bundle(tmp_path, verify="full")
    assert entries(tmp_path) == {first.digest, "latest"}


def test_builders_take_turns_with_a_damaged_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several builds that find it damaged, one replaces it and the others find that one's."""
    first = make_bundle(tmp_path)
    (first.path / "rank0" / "weights.bin").write_bytes(b"?")
    read, write = os.pipe()
    children = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            os.write(write, b"1" if make_bundle(tmp_path).existed else b"0")
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    assert sorted(os.read(read, 100)) == sorted(b"011111")
    open_bundle(tmp_path, verify="full")
    assert entries(tmp_path) == {first.digest, "latest"}


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> None:
        with staging(tmp_path) as staged:
            write_plan(staged)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert entries(tmp_path) == set()


def test_no_space_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(package, "sync_tree", full)
    with pytest.raises(BuildError, match=r"cannot write the bundle \(No space left on device\)"):
        make_bundle(tmp_path)
    assert entries(tmp_path) == set()


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(BuildError, match="cannot write the bundle"):
        make_bundle(tmp_path / "out")


def test_values_that_no_manifest_holds_are_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="eos_token_ids"):
        make_bundle(tmp_path, eos_token_ids=(1000,))
    assert entries(tmp_path) == set()


def test_kill_before_every_change(tmp_path: Path) -> None:
    for change in range(1000):
        out = tmp_path / f"{change}" / "cpu-generic"
        killed = killed_at(lambda out=out: make_bundle(out, weights=b"w"), change)  # type: ignore[misc]
        assert_none_or_whole(out)
        made = make_bundle(out, weights=b"w")
        assert entries(out) == {made.digest, "latest"}, "the next build sweeps up"
        open_bundle(out, verify="full")
        if not killed:
            break
    assert change > 15


def test_kill_while_replacing(tmp_path: Path) -> None:
    """`latest` always leads to a whole bundle, before and after."""
    for change in range(1000):
        out = tmp_path / f"{change}"
        old = make_bundle(out, weights=b"w")
        killed = killed_at(lambda out=out: make_bundle(out, weights=b"w", eos_token_ids=(7,)), change)  # type: ignore[misc]
        opened = open_bundle(out, verify="full")
        assert opened.manifest.digest == old.digest or opened.eos_token_ids == {7}
        assert_none_or_whole(out)
        if not killed:
            break
    assert change > 10


def test_kill_at_any_instant(tmp_path: Path) -> None:
    start = time.monotonic()
    make_bundle(tmp_path / "timed")
    took = time.monotonic() - start
    for step in range(20):
        out = tmp_path / f"{step}"
        killed_after(lambda out=out: make_bundle(out), took * step / 16)  # type: ignore[misc]
        assert_none_or_whole(out)
        make_bundle(out)
        assert len(entries(out)) == 2


def test_sweep_spares_a_running_build(tmp_path: Path) -> None:
    with staging(tmp_path) as staged:
        write_plan(staged)
        made = make_bundle(tmp_path)
        assert (staged / "rank0" / "plan.so").exists()
        assert publish(staged, DESCRIPTION, TEXTS).existed
    assert entries(tmp_path) == {made.digest, "latest"}


def test_two_builds_at_once(tmp_path: Path) -> None:
    """Many processes publish the same and different content; all of it is whole and nothing is left over."""
    children = []
    for index in range(6):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                make_bundle(tmp_path, eos_token_ids=(index % 2,))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    assert len(entries(tmp_path)) == 3
    assert_none_or_whole(tmp_path)
