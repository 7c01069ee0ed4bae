"""`plankiln store`: what it lists, removes and carries, and archives that are not what they say."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from plankiln import cli
from plankiln.compiler.store import Stage, Store
from plankiln.compiler.store_archive import export_entries, import_entries
from plankiln.errors import BuildError

CODE = Stage("code", {"text": "ab"}, ("plan.cc", "plan.so"))
WEIGHTS = Stage("weights", {"source": "cd"}, ("weights.bin",))
BUNDLE = Stage("bundle", {"recipe": "tiny"})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "store"))
    return fill(Store(tmp_path / "store"))


def fill(store: Store) -> Store:
    def work(stage: Stage, made: Path) -> dict[str, Any]:
        for name in stage.files:
            (made / name).write_bytes(name.encode() * 300)
        return {"digest": "ab" * 32, "entries": [CODE.key, WEIGHTS.key]} if stage is BUNDLE else {}

    for age, stage in enumerate((BUNDLE, WEIGHTS, CODE)):
        with store.lock(stage):
            entry = store.add(stage, lambda made, stage=stage: work(stage, made))  # type: ignore[misc]
        os.utime(entry.path / "entry.json", (1e9 + age, 1e9 + age))
    return store


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["store", *map(str, arguments)])
        return (int(caught.value.code or 0), *capsys.readouterr())

    return run


def test_ls(store: Store, call: Any, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").touch()
    store.pin(bundle, [WEIGHTS.key])
    code, out, err = call("ls")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[1], row[-1] == "pinned") for row in rows] == [
        (stage.key[:16], stage.name, stage is WEIGHTS) for stage in (CODE, WEIGHTS, BUNDLE)
    ]
    _, out, _ = call("ls", "--json")
    first = json.loads(out.splitlines()[0])
    assert (first["key"], first["parts"], first["bytes"], first["pinned"]) == (CODE.key, {"text": "ab"}, 4200, False)


def test_gc(store: Store, call: Any) -> None:
    code, out, err = call("gc", "--limit", "5KiB")
    assert (code, out.split()) == (0, [BUNDLE.key, WEIGHTS.key])
    assert err.endswith("kept, 0 B of it in use by bundles\n")
    code, _, err = call("gc", "--limit", "lots")
    assert (code, err) == (2, "error: `lots` is no size: `--limit`\nhint: write bytes, or a size such as `4GiB`\n")


def test_empty_store(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "none"))
    assert call("ls") == (0, "", "")
    assert call("gc")[0] == 0
    assert not (tmp_path / "none").exists()
    assert call("export", "ab", "-")[0] == 1


def test_a_bundle_travels_with_all_that_it_is_made_of(
    store: Store, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "entries.tar"
    assert call("export", "abab", archive) == (0, "", "")
    monkeypatch.setenv("PLANKILN_STORE", str(tmp_path / "other"))
    code, out, err = call("import", archive)
    assert (code, out.split(), err) == (0, [CODE.key, WEIGHTS.key], "")
    other = Store(tmp_path / "other")
    for stage in (CODE, WEIGHTS):
        assert other.fault(other.entries / stage.key) is None
        for name in stage.files:
            assert (other.entries / stage.key / name).read_bytes() == (store.entries / stage.key / name).read_bytes()
    assert call("import", archive) == (0, "", ""), "nothing is new the second time"


def test_errors_of_files(store: Store, call: Any, tmp_path: Path) -> None:
    code, _, err = call("import", tmp_path / "none.tar")
    assert (code, "error: cannot read the archive (No such file or directory)" in err) == (1, True)
    code, _, err = call("export", CODE.key, tmp_path / "none" / "x.tar")
    assert (code, "error: cannot write the archive" in err) == (1, True)
    code, _, err = call("export", "ffff", "-")
    assert (code, "nothing in the stage store starts with `ffff`" in err) == (1, True)


def test_a_damaged_entry_is_not_exported(store: Store) -> None:
    (store.entries / CODE.key / "plan.so").write_bytes(b"?")
    with pytest.raises(BuildError, match=r"the store's entry has 1 bytes of `plan.so`"):
        export_entries(store, [CODE.key], io.BytesIO())


def exported(store: Store) -> bytes:
    out = io.BytesIO()
    export_entries(store, [CODE.key], out)
    return out.getvalue()


def test_a_changed_archive_gives_the_same_entry_or_none(store: Store, tmp_path: Path) -> None:
    """Change one bit at a time, or cut it short: what gets in is sound."""
    data = exported(store)
    path = tmp_path / "changed.tar"
    refused = 0
    for index in range(0, len(data), 211):
        changed = bytearray(data)
        changed[index] ^= 1 << index % 8
        path.write_bytes(changed if index % 2 else data[:index])
        other = Store(tmp_path / "other" / f"{index}")
        try:
            import_entries(other, path)
        except BuildError:
            refused += 1
        for entry in other.entries.glob("[!.]*") if other.entries.is_dir() else ():
            assert entry.name == CODE.key
            assert other.fault(entry) is None
    assert refused > 10


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", f"{CODE.key}/../evil"])
def test_names_that_lead_elsewhere(store: Store, tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil.tar"
    with tarfile.open(fileobj=io.BytesIO(exported(store))) as source, tarfile.open(path, "w") as target:
        for member in source.getmembers():
            stream = source.extractfile(member)
            if member.name.endswith("plan.so"):
                member.name = name
            target.addfile(member, stream)
    with pytest.raises(BuildError, match="not a sound archive"):
        import_entries(Store(tmp_path / "other"), path)
    assert not list(tmp_path.rglob("evil"))


def test_links_are_no_files(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "link.tar"
    with tarfile.open(path, "w") as target:
        for name in (f"{CODE.key}/entry.json", f"{CODE.key}/plan.cc"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            target.addfile(member)
    with pytest.raises(BuildError, match="not a sound archive"):
        import_entries(Store(tmp_path / "other"), path)


def test_an_archive_cut_between_two_entries_or_empty_is_refused(store: Store, tmp_path: Path) -> None:
    """The index at its head says what must follow."""
    whole = exported(store)
    path = tmp_path / "cut.tar"
    members = []
    with tarfile.open(fileobj=io.BytesIO(whole)) as source:
        members = [(member, source.extractfile(member)) for member in source.getmembers()]
        for keep in range(len(members)):
            with tarfile.open(path, "w") as target:
                for member, content in members[:keep]:
                    target.addfile(member, content)
                    assert content is not None
                    content.seek(0)
            other = Store(tmp_path / f"other{keep}")
            with pytest.raises(BuildError, match="not a sound archive"):
                import_entries(other, path)
    for junk in (b"", bytes(1 << 20)):
        path.write_bytes(junk)
        with pytest.raises(BuildError, match="not a sound archive"):
            import_entries(store, path)
