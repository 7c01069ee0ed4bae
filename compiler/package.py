"""Assemble a bundle beside where it will lie, and publish it in one rename.

While a build runs, all that it writes lies in OUT/.tmp-PID-xxxxxx, locked by the process that made it: a lock dies
with its process, so a later build knows what it may sweep away. A kill at any moment leaves no bundle or a whole one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plankiln import __version__
from plankiln.bundle import open_bundle
from plankiln.errors import BuildError, BundleError
from plankiln.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    REPORT,
    TOKENIZER,
    FileEntry,
    Formats,
    Manifest,
    ModelShape,
    PlanLimits,
    Source,
    TargetNeeds,
)

CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Contents:
    """All that a bundle says and holds besides the files of its plan; for the meaning of each see Manifest."""

    name: str
    recipe: dict[str, Any]
    source: Source
    target: TargetNeeds
    model: ModelShape
    formats: Formats
    bytes_per_format: dict[str, int]
    kv_bytes_per_token: int
    limits: PlanLimits
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, Any]
    add_bos: bool
    tokenizer_json: bytes
    chat_template: str | None
    tools: dict[str, str]
    report: dict[str, Any]


@dataclass(frozen=True)
class Published:
    """Where the bundle lies; `existed` when an earlier build had already published the same content."""

    path: Path
    digest: str
    existed: bool


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty directory below `out` (artifacts/RECIPE/TARGET) to build a bundle in, gone afterwards.

    What killed builds have left below `out` is removed first. Raises BuildError when `out` cannot be written.
    """
    with _writing(out):
        _make_directory(out)
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _sweep(out)
            temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{os.getpid()}-", dir=out))
            alive = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(alive, fcntl.LOCK_EX)
        finally:
            os.close(lock)
    try:
        staged = temporary / "bundle"
        staged.mkdir()
        yield staged
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(alive)


def publish(staged: Path, contents: Contents) -> Published:
    """Add to the plan's files in `staged` all that makes a bundle of them, and make it appear whole.

    It appears as OUT/DIGEST, and OUT/latest points to it. When that bundle exists and is sound it is kept.
    """
    out = staged.parent.parent
    with _writing(out):
        try:
            manifest = _assemble(staged, contents)
        except ValidationError as e:
            problems = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors()]
            raise BuildError("a bundle cannot state what was built", "; ".join(problems)) from None
        _sync_tree(staged)
        path = out / manifest.digest
        existed = not _move_into_place(staged, path)
        link = staged.parent / "latest"
        link.symlink_to(manifest.digest)
        link.replace(out / "latest")
        _sync(out)
    return Published(path, manifest.digest, existed)


def _assemble(staged: Path, contents: Contents) -> Manifest:
    (staged / TOKENIZER).write_bytes(contents.tokenizer_json)
    if contents.chat_template is not None:
        (staged / CHAT_TEMPLATE).write_bytes(contents.chat_template.encode())
    (staged / REPORT).write_bytes((json.dumps(contents.report, indent=1) + "\n").encode())
    files = {str(path.relative_to(staged)): _describe(path) for path in sorted(staged.rglob("*")) if path.is_file()}
    manifest = Manifest(
        schema_version=1,
        name=contents.name,
        digest="0" * 64,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        plankiln=__version__,
        recipe=contents.recipe,
        source=contents.source,
        target=contents.target,
        model=contents.model,
        formats=contents.formats,
        bytes_per_format=contents.bytes_per_format,
        kv_bytes_per_token=contents.kv_bytes_per_token,
        limits=contents.limits,
        eos_token_ids=contents.eos_token_ids,
        special_tokens=contents.special_tokens,
        add_bos=contents.add_bos,
        chat_template=None if contents.chat_template is None else CHAT_TEMPLATE,
        tools={"python": platform.python_version(), **contents.tools},
        world_size=1,
        files=files,
    )
    manifest = manifest.model_copy(update={"digest": manifest.content_digest()})
    (staged / MANIFEST).write_bytes(manifest.to_json())
    return manifest


def _describe(path: Path) -> FileEntry:
    whole = hashlib.sha256()
    chunks = []
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).hexdigest())
    return FileEntry(
        sha256=whole.hexdigest(),
        bytes=path.stat().st_size,
        chunks=tuple(chunks) if path.name == "weights.bin" else None,
    )


def _move_into_place(staged: Path, path: Path) -> bool:
    """Whether the staged bundle was put at `path`: false when a sound one lies there already."""
    try:
        staged.rename(path)
        return True
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        open_bundle(path, verify="full", any_machine=True)
        return False
    except BundleError:
        path.rename(staged.parent / "damaged")
        staged.rename(path)
        return True


def _sync_tree(root: Path) -> None:
    """Set every mode and force all of it to the disk, children before their directory."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(folder, name)
            path.chmod(0o644)
            _sync(path)
        Path(folder).chmod(0o755)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        _make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
            path.chmod(0o755)
            _sync(path.parent)


def _sweep(out: Path) -> None:
    """Remove the temporary directories whose builder is gone."""
    for left in out.glob(".tmp-*"):
        with suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(fd)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        hint = "choose another place with `--out DIR`" if e.errno != errno.ENOSPC else "free some space"
        raise BuildError(f"cannot write the bundle ({e.strerror})", f"`{out}`", hint) from e
