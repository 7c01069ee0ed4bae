"""Opening a bundle: what is verified, what is refused, and that nothing but BundleError comes out."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import DESCRIPTION, TEXTS, WEIGHTS, edit_manifest, make_bundle

from plankiln import bundle as bundle_module
from plankiln.bundle import find_bundle, open_bundle, read_manifest
from plankiln.errors import BundleError
from plankiln.host import Host, this_host
from plankiln.manifest import CHUNK_BYTES

HOST = Host(machine="x86_64", cpu="Some CPU", flags=frozenset({"avx2", "fma"}), glibc="2.31")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "artifacts" / "tiny" / "cpu-generic").path


def refused(path: Path, match: str, **options: Any) -> BundleError:
    with pytest.raises(BundleError, match=match) as caught:
        open_bundle(path, **options)
    return caught.value


def test_what_a_bundle_holds(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="plankiln.bundle"):
        bundle = open_bundle(made)
    assert "weights by size only" in caplog.text
    assert bundle.path == made
    assert bundle.manifest.digest == made.name
    assert bundle.verified == "code"
    assert bundle.eos_token_ids == {2, 3}
    assert bundle.tokenizer_json == TEXTS["tokenizer.json"]
    assert bundle.chat_template == "{{ messages }}"
    (weights,) = bundle.weights
    assert isinstance(weights, np.memmap)
    assert weights.dtype == np.uint8
    assert not weights.flags.writeable
    assert weights.tobytes() == WEIGHTS


def test_without_chat_template(tmp_path: Path) -> None:
    assert open_bundle(make_bundle(tmp_path, chat_template=None).path).chat_template is None


def test_pinned_manifest(made: Path) -> None:
    digest = hashlib.sha256((made / "manifest.json").read_bytes()).hexdigest()
    assert open_bundle(made, manifest_sha256=digest).manifest_sha256 == digest
    assert open_bundle(made, manifest_sha256=digest.upper()).manifest_sha256 == digest
    refused(made, "not the pinned.*\nhint: this is another bundle", manifest_sha256="0" * 64)
    refused(made, "not the pinned.*\nhint: the pinned one is the bundle's digest", manifest_sha256=made.name)
    for bad in ("", "ab", "0x" + digest[2:], digest + "\n", 5):
        refused(made, "`manifest_sha256` must be 64 hex digits, not", manifest_sha256=bad)


@pytest.mark.parametrize("depth", ["ful", "", None, True])
def test_a_depth_of_verification_that_does_not_exist(made: Path, depth: object) -> None:
    refused(made, "`verify` must be `code` or `full`, not", verify=depth)


class TestFind:
    def test_each_way_to_name_it(self, made: Path) -> None:
        for path in (made, made.parent / "latest", made.parent, made.parent.parent):
            assert find_bundle(path) == made

    def test_two_targets_are_named(self, made: Path) -> None:
        make_bundle(made.parent.parent / "cpu-x86-64-v3")
        refused(made.parent.parent, "more than one target")
        with pytest.raises(BundleError, match="cpu-x86-64-v3"):
            find_bundle(made.parent.parent)

    @pytest.mark.parametrize("name", ["", "nothing", "rank0", "manifest.json", "manifest.json/x", "a\0b", "x" * 5000])
    def test_not_a_bundle(self, made: Path, name: str) -> None:
        path = made / name if name else made.parent.parent.parent.parent / "elsewhere"
        with pytest.raises(BundleError, match=r"no such bundle|not a bundle|no manifest|cannot open"):
            find_bundle(path)

    def test_link_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "latest").symlink_to("latest")
        for path in (tmp_path, tmp_path / "latest"):
            with pytest.raises(BundleError):
                find_bundle(path)


class TestRefused:
    @pytest.mark.parametrize("name", ["rank0/plan.so", "rank0/plan.cc", "tokenizer.json", "report.json"])
    def test_changed_file(self, made: Path, name: str) -> None:
        data = bytearray((made / name).read_bytes())
        data[-1] ^= 1
        (made / name).write_bytes(data)
        error = refused(made, "its SHA-256 is not the manifest's")
        assert name in str(error)
        assert "hint: " in str(error)

    def test_changed_weights_are_found_by_full(self, made: Path) -> None:
        data = bytearray(WEIGHTS)
        data[CHUNK_BYTES + 3] ^= 1
        (made / "rank0" / "weights.bin").write_bytes(data)
        assert open_bundle(made).verified == "code"
        refused(made, rf"bytes {CHUNK_BYTES} to {len(WEIGHTS)} are not what was built: .*weights.bin", verify="full")

    def test_wrong_size(self, made: Path) -> None:
        os.truncate(made / "rank0" / "weights.bin", 10)
        refused(made, f"10 bytes instead of {len(WEIGHTS)}")

    def test_missing_and_extra(self, made: Path) -> None:
        (made / "rank0" / "more.so").write_bytes(b"")
        refused(made, "a file that the manifest does not list: .*more.so")
        (made / "rank0" / "more.so").rename(made / "more.so")
        (made / "tokenizer.json").unlink()
        refused(made, "a file is missing: .*tokenizer.json")

    def test_links(self, made: Path, tmp_path: Path) -> None:
        (tmp_path / "other").write_bytes((made / "rank0" / "plan.so").read_bytes())
        (made / "rank0" / "plan.so").unlink()
        (made / "rank0" / "plan.so").symlink_to(tmp_path / "other")
        refused(made, "a symbolic link inside a bundle: .*plan.so")

    def test_linked_directory(self, made: Path, tmp_path: Path) -> None:
        shutil.move(made / "rank0", tmp_path / "rank0")
        (made / "rank0").symlink_to(tmp_path / "rank0")
        refused(made, "a symbolic link inside a bundle: .*rank0")

    def test_linked_manifest(self, made: Path, tmp_path: Path) -> None:
        shutil.move(made / "manifest.json", tmp_path / "m")
        (made / "manifest.json").symlink_to(tmp_path / "m")
        refused(made, "a symbolic link inside a bundle: .*manifest.json")

    def test_fifo(self, made: Path) -> None:
        os.mkfifo(made / "pipe")
        refused(made, "neither a file nor a directory: .*pipe")

    @pytest.mark.parametrize("name", [".", "rank0", "rank0/plan.so", "rank0/weights.bin", "manifest.json"])
    @pytest.mark.parametrize(("bit", "who"), [(0o020, "its group"), (0o002, "everyone")])
    def test_writable_by_others(self, made: Path, name: str, bit: int, who: str) -> None:
        path = made / name
        path.chmod(path.stat().st_mode | bit)
        assert "chmod -R go-w" in str(refused(made, f"writable by {who}"))

    @pytest.mark.parametrize("name", [".", "rank0", "rank0/plan.so", "rank0/weights.bin", "manifest.json"])
    def test_owned_by_another_user(self, made: Path, name: str) -> None:
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(made / name, 4321, -1)
        error = refused(made, "owned by another user, number 4321")
        assert str((made / name).resolve()) in str(error)
        assert "chown -R" in str(error)

    def test_owned_by_root_or_oneself(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = made.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        if owner:
            refused(made, f"owned by another user, number {owner}")
        else:
            open_bundle(made)

    @pytest.mark.parametrize(
        "name", ["../x", "/etc/passwd", "rank0/../../x", "a//b", "./a", "a\\b", "", "a/", "manifest.json"]
    )
    def test_paths_out_of_the_bundle(self, made: Path, name: str) -> None:
        def edit(data: dict[str, Any]) -> None:
            data["files"][name] = data["files"]["tokenizer.json"]

        edit_manifest(made, edit, redo_digest=False)
        refused(made, "not a plain path inside the bundle")

    @pytest.mark.parametrize(("version", "hint"), [(0, "the plankiln that built it"), (2, "update plankiln")])
    def test_unknown_schema(self, made: Path, version: int, hint: str) -> None:
        edit_manifest(made, lambda data: data.update(schema_version=version, new="field"), redo_digest=False)
        assert hint in str(refused(made, f"schema version {version}, but this plankiln reads 1"))

    def test_manifest_that_was_edited(self, made: Path) -> None:
        edit_manifest(made, lambda data: data.update(eos_token_ids=[4]), redo_digest=False)
        refused(made, "does not have the digest that it states")

    def test_unknown_and_missing_keys_at_once(self, made: Path) -> None:
        def edit(data: dict[str, Any]) -> None:
            data["surprise"] = 1
            del data["limits"]["block_size"]

        edit_manifest(made, edit, redo_digest=False)
        error = refused(made, "manifest.json")
        assert {problem.what.split(":")[0] for problem in error.problems} == {"`surprise`", "`limits.block_size`"}

    def test_template_that_is_not_text(self, made: Path) -> None:
        (made / "chat_template.jinja").write_bytes(b"\xff\xfe")

        def edit(data: dict[str, Any]) -> None:
            data["files"]["chat_template.jinja"] = {
                "sha256": hashlib.sha256(b"\xff\xfe").hexdigest(),
                "bytes": 2,
                "chunks": None,
            }

        edit_manifest(made, edit)
        refused(made, "not UTF-8 text: .*chat_template.jinja")

    def test_huge_manifest(self, made: Path) -> None:
        os.truncate(made / "manifest.json", (64 << 20) + 1)
        refused(made, "larger than")

    def test_replaced_while_opening(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file swapped after it was looked at is not read, whatever its content."""
        fwalk = os.fwalk

        def walk_then_swap(*args: Any, **options: Any) -> Any:
            yield from fwalk(*args, **options)
            shutil.copy(made / "tokenizer.json", made / "copy")
            (made / "copy").rename(made / "tokenizer.json")

        monkeypatch.setattr(os, "fwalk", walk_then_swap)
        refused(made, "the file was replaced while the bundle was opened: .*tokenizer.json")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_unreadable(self, made: Path) -> None:
        (made / "tokenizer.json").chmod(0)
        refused(made, r"cannot read the bundle \(Permission denied\): .*tokenizer.json")


class TestMachine:
    """The machine is checked before code is opened, and the message names both sides."""

    @pytest.fixture(autouse=True)
    def _host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle_module, "this_host", lambda: HOST)

    def make(self, tmp_path: Path, name: str = "cpu-other", **needs: Any) -> Path:
        target = DESCRIPTION.target.model_copy(update={"name": name, "machine": "x86_64", **needs})
        path = make_bundle(tmp_path / "tiny" / name, target=target).path
        (path / "rank0" / "plan.so").write_bytes(b"never looked at")
        return path

    def test_flags(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, flags=("avx2", "avx512f", "avx512_vnni"))
        what = r"built for `cpu-other` with CPU flags `avx512f`, `avx512_vnni`, which this CPU \(Some CPU\) lacks"
        assert "build the recipe on this machine" in str(refused(path, what))

    def test_architecture(self, tmp_path: Path) -> None:
        refused(self.make(tmp_path, machine="aarch64"), "built for `aarch64`, but this machine is `x86_64`")

    def test_glibc(self, tmp_path: Path) -> None:
        refused(self.make(tmp_path, glibc="2.36"), r"needs glibc 2.36 or newer, but this machine has 2.31")
        path = self.make(tmp_path, name="ok", glibc="2.4")
        refused(path, "bytes instead of")

    def test_other_c_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle_module, "this_host", lambda: Host("x86_64", "x", frozenset(), None))
        refused(self.make(tmp_path), "C library is another")

    def test_the_fitting_bundle_is_named(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, flags=("avx512f",))
        self.make(tmp_path, name="cpu-worse", flags=("sse9",))
        fitting = self.make(tmp_path, name="cpu-x86-64-v3", flags=("avx2",))
        assert f"hint: `{fitting.parent}` fits this machine" in str(refused(path, "avx512f"))

    def test_any_machine(self, tmp_path: Path) -> None:
        target = DESCRIPTION.target.model_copy(update={"machine": "riscv64"})
        path = make_bundle(tmp_path, target=target).path
        assert open_bundle(path, verify="full", any_machine=True).manifest.target.machine == "riscv64"
        assert read_manifest(path)[0].target.machine == "riscv64"


def test_this_host() -> None:
    host = this_host()
    assert host.machine == platform.machine()
    assert host.glibc
    assert host.flags


class TestSealedCode:
    def test_nothing_can_change_it(self, made: Path) -> None:
        bundle = open_bundle(made)
        (made / "rank0" / "plan.so").write_bytes(b"something else")
        path = bundle.sealed_code(0)
        assert path.read_bytes() == b"\x7fELF code"
        with pytest.raises(OSError, match="not permitted"), path.open("r+b") as file:
            file.write(b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.truncate(path, 1)

    def test_equal_code_shares_one_copy(self, made: Path, tmp_path: Path) -> None:
        other = make_bundle(tmp_path, eos_token_ids=(1,)).path
        assert open_bundle(made).sealed_code() == open_bundle(other).sealed_code()

    def test_plan_of_one_bundle_is_never_that_of_another(self, tmp_path: Path) -> None:
        """The dynamic linker goes by path: a reused descriptor number would give the first library again."""
        results = []
        for value in (1, 2, 3):
            source, library = tmp_path / "a.c", tmp_path / f"{value}.so"
            source.write_text(f"int f(void) {{ return {value}; }}")
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
            bundle = open_bundle(make_bundle(tmp_path / str(value), code=library.read_bytes()).path)
            results.append(ctypes.CDLL(str(bundle.sealed_code())).f())
            del bundle
        assert results == [1, 2, 3]

    def test_kernel_that_refuses(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str, flags: int) -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "memfd_create", refuse)
        bundle = open_bundle(make_bundle(made.parent, code=os.urandom(8)).path)
        with pytest.raises(BundleError, match="cannot make a sealed copy"):
            bundle.sealed_code()


def _mutations(rng: random.Random, text: bytes) -> Callable[[], bytes]:
    """Damage to a manifest: of its bytes, and of one value somewhere in its tree."""
    strange: list[Any] = [None, True, -1, 0, 2**63, 2**70, 1e308, 0.5, "", "x", "../x", "\0", "é" * 5000, [], [[]], {}]
    strange += [{"a": 1}, [1], ["x"], "0" * 64, [None] * 3, {"": {"": 0}}]

    def bytes_mutation() -> bytes:
        data = bytearray(text)
        for _ in range(rng.choice([1, 1, 3, 20])):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.choice([1, 10, 1000])]
            elif kind == 2:
                data[at:at] = rng.choice(
                    [b"[" * 2000, b'{"a":' * 500, b"NaN", b"-1e999", b"\\ud800", b"9" * 5000, b","]
                )
            else:
                start = rng.randrange(len(data))
                data[at:at] = data[start : start + 50]
            if not data:
                break
        return bytes(data)

    def tree_mutation() -> bytes:
        node = root = json.loads(text)
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
            if rng.random() < 0.6 and isinstance(node[key], dict | list) and node[key]:
                node = node[key]
                continue
            break
        action = rng.randrange(4)
        if action == 0:
            del node[key]
        elif action == 1 and isinstance(node, dict):
            node[rng.choice(["extra", "", "a/../b", key + "x"])] = node[key]
        else:
            node[key] = rng.choice(strange)
        return json.dumps(root).encode()

    return lambda: rng.choice([bytes_mutation, tree_mutation])()


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_manifest(made: Path, seed: int) -> None:
    """A damaged manifest is a BundleError, or it says what it said before."""
    text = (made / "manifest.json").read_bytes()
    sound = open_bundle(made).manifest
    mutate = _mutations(random.Random(seed), text)
    refusals = 0
    for _ in range(150):
        data = mutate()
        (made / "manifest.json").write_bytes(data)
        try:
            assert open_bundle(made).manifest.content_digest() == sound.content_digest()
        except BundleError:
            refusals += 1
    assert refusals > 140
