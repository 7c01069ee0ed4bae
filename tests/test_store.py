"""The stage store: nothing done twice, whole or absent whatever kills it, and plain words when it cannot be used."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import killed_after, killed_at
from pydantic import ValidationError

from plankiln.compiler import atomic, store
from plankiln.compiler.store import Entry, Stage, Store
from plankiln.compiler.store_care import collect, matching, pinned, size_limit
from plankiln.errors import BuildError, PlankilnError, UsageError

CODE = Stage("code", {"text": "ab", "compiler": "g++ 12"}, ("plan.so", "plan.cc"))


def write(text: str = "code", result: dict[str, Any] | None = None) -> Callable[[Path], dict[str, Any]]:
    def work(made: Path) -> dict[str, Any]:
        (made / "plan.so").write_text(text)
        (made / "plan.cc").write_text("// source")
        return {"glibc": "2.17"} if result is None else result

    return work


def numbered(number: int, nbytes: int = 1000) -> tuple[Stage, Callable[[Path], dict[str, Any]]]:
    def work(made: Path) -> dict[str, Any]:
        (made / "weights.bin").write_bytes(bytes([number]) * nbytes)
        return {}

    return Stage("weights", {"number": number}, ("weights.bin",)), work


def put(kept: Store, stage: Stage = CODE, work: Callable[[Path], dict[str, Any]] | None = None) -> tuple[Entry, bool]:
    """The stage's entry, and whether it was there already."""
    with kept.lock(stage):
        found = kept.find(stage)
        return found or kept.add(stage, work or write()), found is not None


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def kept(tmp_path: Path, notes: list[str]) -> Store:
    return Store(tmp_path / "store", notes.append)


def foreign(path: Path) -> None:
    """Let another user own the file."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def assert_consistent(kept: Store) -> None:
    """Whatever a reader can find is sound to the last byte."""
    for path in kept.entries.glob("[!.]*") if kept.entries.is_dir() else ():
        assert kept.fault(path) is None


class TestEntries:
    def test_made_once_and_found_again(self, kept: Store, notes: list[str]) -> None:
        first, hit = put(kept)
        assert not hit
        again, hit = put(kept, work=lambda made: pytest.fail("done twice"))
        assert hit
        assert again.record == first.record
        assert (again.path / "plan.so").read_text() == "code"
        assert again.record.result == {"glibc": "2.17"}
        assert notes == []

    def test_any_part_changes_the_key(self) -> None:
        stages = [CODE, Stage("weights", CODE.parts)]
        stages += [Stage("code", {**CODE.parts, name: "other"}) for name in CODE.parts]
        stages += [Stage("code", {**CODE.parts, "more": ""}), Stage("code", {"text": "ab"})]
        assert len({stage.key for stage in stages}) == len(stages)
        assert Stage("code", dict(reversed(CODE.parts.items()))).key == CODE.key

    def test_modes_do_not_depend_on_the_umask(self, kept: Store) -> None:
        before = os.umask(0)
        try:
            entry, _ = put(kept)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in entry.path.iterdir()} == {0o644}
        assert kept.root.stat().st_mode & 0o777 == entry.path.stat().st_mode & 0o777 == 0o755

    def test_weights_are_described_in_chunks(self, kept: Store) -> None:
        entry, _ = put(kept, *numbered(1))
        assert len(entry.record.files["weights.bin"].chunks or ()) == 1

    @pytest.mark.parametrize("left", [None, {}])
    def test_work_that_did_not_finish(self, kept: Store, left: Any) -> None:
        """A stage whose work returns nothing, or leaves a file out, is an error here and now; nothing is kept."""

        def work(made: Path) -> dict[str, Any]:
            (made / "plan.so").write_text("code")
            if left is None:
                (made / "plan.cc").write_text("// source")
            return left

        with pytest.raises(BuildError, match=r"stage `code` did not finish: it left .*`plan.so`"):
            put(kept, work=work)
        assert list(kept.entries.iterdir()) == []

    def test_a_record_that_could_not_be_read_again(self, kept: Store) -> None:
        """Our own mistake, found before there is an entry."""
        stage = Stage("code", {**CODE.parts, "minimum": True}, CODE.files)
        with pytest.raises(ValidationError):
            put(kept, stage)
        assert list(kept.entries.iterdir()) == []

    def test_failed_work_leaves_nothing(self, kept: Store) -> None:
        def work(made: Path) -> dict[str, Any]:
            (made / "plan.so").write_text("half")
            raise BuildError("stage failed")

        with pytest.raises(BuildError, match="stage failed"):
            put(kept, work=work)
        assert list(kept.entries.iterdir()) == []
        assert not put(kept)[1]


class TestAbsentStaleCorrupt:
    """Three different things: nothing is said of a missing entry, and of the others what is wrong with them."""

    def test_absent(self, kept: Store, notes: list[str]) -> None:
        assert not put(kept)[1]
        assert notes == []

    def test_stale(self, kept: Store, notes: list[str]) -> None:
        entry, _ = put(kept)
        text = (entry.path / "entry.json").read_text()
        (entry.path / "entry.json").write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
        assert not put(kept)[1]
        assert len(notes) == 1
        assert "written by another version" in notes[0]

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda path: (path / "plan.so").write_text("cod3"), "has another `plan.so` than was stored"),
            (lambda path: (path / "plan.so").write_text("c"), "has 1 bytes of `plan.so` instead of 4"),
            (lambda path: (path / "plan.so").unlink(), "lacks `plan.so`"),
            (lambda path: (path / "entry.json").unlink(), "has no entry.json"),
            (lambda path: (path / "entry.json").write_text("{}"), "has a damaged entry.json"),
            (lambda path: (path / "plan.so").chmod(0o666), "has a `plan.so` that others can change"),
            (lambda path: foreign(path / "plan.so"), "has a `plan.so` that others can change"),
            (lambda path: (path / "entry.json").chmod(0o664), "has a `entry.json` that others can change"),
            (lambda path: path.chmod(0o775), "is a directory that others can change"),
            (lambda path: (path / "more").write_text(""), "has an extra file `more`"),
        ],
    )
    def test_corrupt(self, kept: Store, notes: list[str], damage: Callable[[Path], object], words: str) -> None:
        entry, _ = put(kept)
        damage(entry.path)
        again, hit = put(kept)
        assert not hit
        assert kept.fault(again.path) is None
        assert notes == [f"stage `code` is done again: its entry in the store {words} (`{entry.path}`)"]

    def test_every_byte_of_the_record_counts(self, kept: Store) -> None:
        entry, _ = put(kept)
        data = (entry.path / "entry.json").read_bytes()
        for index, byte in enumerate(data):
            changed = data[:index] + bytes([byte ^ 1]) + data[index + 1 :]
            (entry.path / "entry.json").write_bytes(changed)
            if kept.fault(entry.path) is None:
                assert json.loads(changed) == json.loads(data)


class TestTwoAtOnce:
    def test_the_work_is_done_once(self, kept: Store, tmp_path: Path) -> None:
        """Processes that want the same entry at one time: one works, the others wait and find it."""

        def work(made: Path) -> dict[str, Any]:
            (tmp_path / f"worked-{os.getpid()}").touch()
            return write()(made)

        children = []
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    put(kept, work=work)
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 5
        assert len(list(tmp_path.glob("worked-*"))) == 1
        assert_consistent(kept)

    def test_collecting_spares_a_workspace_that_is_being_made(self, kept: Store) -> None:
        """It lies there for a moment before its own lock is held; the lock of what it lies in is, all the time."""
        put(kept)
        made = kept.entries / ".tmp-1-abc"
        other = threading.Thread(target=lambda: collect(kept, 1 << 30))
        with atomic.locked(kept.entries):
            made.mkdir()
            other.start()
            other.join(0.3)
            assert made.is_dir()
        other.join()
        assert not made.exists(), "this one was never locked"

    def test_the_one_that_waits_says_so(self, kept: Store) -> None:
        said = threading.Event()
        order: list[str] = []

        def note(text: str) -> None:
            assert text == "another build is at stage `code`: waiting for it"
            said.set()

        def wait() -> None:
            with Store(kept.root.parent, note).lock(CODE):
                order.append("second")

        with kept.lock(CODE):
            other = threading.Thread(target=wait)
            other.start()
            assert said.wait(10)
            order.append("first")
        other.join()
        assert order == ["first", "second"]

    def test_collecting_spares_what_is_in_use(self, kept: Store) -> None:
        put(kept)
        with kept.lock(CODE):
            assert collect(kept, 0).removed == ()
        assert collect(kept, 0).removed == (CODE.key,)


class TestKilled:
    def test_before_every_change(self, tmp_path: Path) -> None:
        for change in range(1000):
            kept = Store(tmp_path / f"{change}")
            killed = killed_at(lambda kept=kept: put(kept), change)  # type: ignore[misc]
            assert_consistent(kept)
            put(kept)
            collect(kept, 1 << 30)
            assert [path.name for path in kept.entries.iterdir()] == [CODE.key]
            if not killed:
                break
        assert change > 10

    def test_while_a_damaged_entry_is_replaced(self, tmp_path: Path) -> None:
        for change in range(1000):
            kept = Store(tmp_path / f"{change}")
            (put(kept)[0].path / "plan.so").write_text("cod3")
            killed = killed_at(lambda kept=kept: put(kept), change)  # type: ignore[misc]
            put(kept)
            assert_consistent(kept)
            if not killed:
                break
        assert change > 10

    def test_while_collecting(self, tmp_path: Path) -> None:
        for change in range(1000):
            kept = Store(tmp_path / f"{change}")
            put(kept)
            put(kept, *numbered(1))
            kept.pin(tmp_path / "gone", [CODE.key])
            killed = killed_at(lambda kept=kept: collect(kept, 0), change)  # type: ignore[misc]
            assert_consistent(kept)
            collect(kept, 0)
            assert list(kept.entries.iterdir()) == []
            if not killed:
                break
        assert change > 5

    def test_at_any_instant(self, tmp_path: Path) -> None:
        stage, work = numbered(1, 8 << 20)
        start = time.monotonic()
        put(Store(tmp_path / "timed"), stage, work)
        took = time.monotonic() - start
        for step in range(12):
            kept = Store(tmp_path / f"{step}")
            killed_after(lambda kept=kept: put(kept, stage, work), took * step / 10)  # type: ignore[misc]
            assert_consistent(kept)
            put(kept, stage, work)
            collect(kept, 1 << 30)
            assert [path.name for path in kept.entries.iterdir()] == [stage.key]


class TestSize:
    def test_the_least_recently_used_goes_first(self, kept: Store) -> None:
        for number in range(4):
            entry, _ = put(kept, *numbered(number))
            os.utime(entry.path / "entry.json", (number, number))
        put(kept, *numbered(0))
        each = collect(kept, 1 << 30).kept_bytes // 4
        done = collect(kept, 2 * each + each // 2)
        assert done.removed == (numbered(1)[0].key, numbered(2)[0].key)
        assert [entry.record.parts["number"] for entry in kept.all()] == [0, 3]
        assert done.freed_bytes + done.kept_bytes == collect(kept, 1 << 30).kept_bytes + done.freed_bytes

    def test_live_bundles_keep_their_entries(self, kept: Store, tmp_path: Path) -> None:
        bundle = tmp_path / "bundle"
        bundle.mkdir()
        (bundle / "manifest.json").touch()
        put(kept)
        put(kept, *numbered(1))
        kept.pin(bundle, [CODE.key])
        assert pinned(kept) == {CODE.key}
        done = collect(kept, 0)
        assert done.removed == (numbered(1)[0].key,)
        assert done.pinned_bytes == done.kept_bytes > 0
        (bundle / "manifest.json").unlink()
        assert collect(kept, 0).removed == (CODE.key,)
        assert list(kept.pins.iterdir()) == []

    def test_damaged_pins_and_entries_go(self, kept: Store) -> None:
        put(kept)
        kept.pins.mkdir()
        (kept.pins / "x.json").write_text("[")
        (kept.entries / ("0" * 64)).mkdir()
        assert collect(kept, 1 << 30).removed == ()
        assert [path.name for path in kept.entries.iterdir()] == [CODE.key]
        assert list(kept.pins.iterdir()) == []

    def test_empty_store(self, kept: Store) -> None:
        assert collect(kept, 0).kept_bytes == 0
        assert kept.all() == []

    def test_an_entry_that_goes_while_collecting(self, kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        put(kept)
        readable = kept.all()
        kept.remove(readable[0].path)
        monkeypatch.setattr(kept, "all", lambda: readable)
        assert collect(kept, 1 << 30).kept_bytes == readable[0].nbytes > readable[0].record.nbytes

    def test_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PLANKILN_STORE_LIMIT", raising=False)
        assert size_limit() == 20 << 30
        monkeypatch.setenv("PLANKILN_STORE_LIMIT", "3MiB")
        assert (size_limit(), size_limit("4GiB"), size_limit("17")) == (3 << 20, 4 << 30, 17)
        for wrong in ("", "-1", "4GB", "much"):
            with pytest.raises(UsageError, match="is no size"):
                size_limit(wrong)

    def test_names_of_entries(self, kept: Store) -> None:
        put(kept)
        put(kept, *numbered(1))
        bundle = Stage("bundle", {"recipe": "tiny"})
        result = {"digest": "ab" * 32, "entries": [CODE.key, numbered(1)[0].key]}
        put(kept, bundle, lambda made: result)
        assert matching(kept, CODE.key[:12]) == [CODE.key]
        assert matching(kept, "abab") == matching(kept, bundle.key) == [CODE.key, numbered(1)[0].key]
        for wrong, words in (("zz", "nothing in"), ("", "more than one")):
            with pytest.raises(PlankilnError, match=words):
                matching(kept, wrong)


class TestRefusals:
    @pytest.mark.parametrize(
        ("number", "words"), [(errno.ENOSPC, "plankiln store gc"), (errno.EROFS, "set PLANKILN_STORE")]
    )
    def test_what_the_file_system_refuses(
        self, kept: Store, monkeypatch: pytest.MonkeyPatch, number: int, words: str
    ) -> None:
        def refuse(path: Path) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(store, "sync_tree", refuse)
        with pytest.raises(BuildError, match=words) as caught:
            put(kept)
        assert f"cannot write the stage store ({os.strerror(number)}): `{kept.root}`" in str(caught.value)
        assert list(kept.entries.iterdir()) == []

    def test_disk_really_full(self, kept: Store) -> None:
        """A file may not grow beyond 64 KiB: the work's own write fails."""
        _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
        try:
            with pytest.raises(BuildError, match=r"cannot write the stage store \(File too large\)"):
                put(kept, *numbered(1, 1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(kept.entries.iterdir()) == []

    def test_a_file_where_the_store_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "store").write_text("")
        with pytest.raises(BuildError, match="set PLANKILN_STORE to a directory that you can write"):
            put(Store(tmp_path / "store"))

    def test_read_only_while_locking(self, kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(store, "make_directory", refuse)
        with pytest.raises(BuildError, match="Read-only file system"):
            put(kept)

    @pytest.mark.parametrize("name", [".", "entries", "locks", "digests"])
    def test_a_store_that_others_can_write(self, kept: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        put(kept)
        folder = kept.root / name
        folder.chmod(0o775)
        with pytest.raises(BuildError, match=rf"others can write the stage store: `{folder}`\nhint: .* chmod go-w"):
            put(kept)
        folder.chmod(0o755)
        put(kept)
        foreign(folder)
        with pytest.raises(BuildError, match="others can write the stage store"):
            put(kept)


def test_a_mode_that_is_right_is_left_alone(tmp_path: Path) -> None:
    """Setting it again would move the time stamp under which a digest is remembered."""
    (tmp_path / "a").write_text("x")
    atomic.sync_tree(tmp_path)
    before = (tmp_path / "a").stat().st_ctime_ns
    time.sleep(0.01)
    atomic.sync_tree(tmp_path)
    assert (tmp_path / "a").stat().st_ctime_ns == before


def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("x")
    atomic.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def other_disk(self: Path, source: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", other_disk)
    atomic.link_or_copy(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "x"
    assert not (tmp_path / "a").samefile(tmp_path / "c")
