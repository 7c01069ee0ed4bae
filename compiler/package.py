"""Assemble a bundle beside where it will lie, and publish it in one rename.

While a build runs, all that it writes lies in a workspace below OUT (`compiler/atomic.py`). A kill at any moment leaves
no bundle or a whole one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from plankiln import __version__
from plankiln.bundle import open_bundle
from plankiln.checkpoint.files import file_sha256
from plankiln.compiler.atomic import describe_file, locked, sweep, sync, sync_tree, workspace
from plankiln.errors import BuildError, BundleError, CheckpointError
from plankiln.manifest import MANIFEST, Description, FileEntry, Manifest

_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD; the numbers of Linux
_HINTS = {
    errno.ENOSPC: "free some space, or choose another place with `--out DIR`",
    errno.EDQUOT: "your disk quota is used up: free some space, or choose another place with `--out DIR`",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`)",
}


@dataclass(frozen=True)
class Published:
    """Where the bundle lies; `existed` when an earlier build had already published the same content."""

    path: Path
    digest: str
    existed: bool


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty directory below `out` (artifacts/RECIPE/TARGET) to build a bundle in, gone afterwards.

    What killed builds have left below `out` is removed first. Raises BuildError when it cannot be written, at any time
    until the directory is gone, and for values that no manifest holds.
    """
    with _explained(out), workspace(out) as temporary:
        staged = temporary / "bundle"
        staged.mkdir()
        yield staged


def publish(
    staged: Path, description: Description, texts: Mapping[str, bytes], known: Mapping[str, FileEntry] | None = None
) -> Published:
    """Add `texts` (path → content) and the manifest to the plan's files in `staged`, and make it appear whole.

    It appears as OUT/DIGEST, and OUT/latest points to it. When that bundle exists and is sound it is kept. `known`:
    files whose digests are known already. To be called inside `staging`, whose errors it raises.
    """
    for name, text in texts.items():
        (staged / name).write_bytes(text)
    manifest = _finished(description, staged, known or {})
    (staged / MANIFEST).write_bytes(manifest.to_json())
    sync_tree(staged)
    out = staged.parent.parent
    path = out / manifest.digest
    with locked(out):
        existed = not _move_into_place(staged, path, manifest)
        _point_to(path, staged.parent)
    return Published(path, manifest.digest, existed)


def find_published(out: Path, digest: str, cache: Path) -> Published | None:
    """The bundle OUT/DIGEST when it is there and sound, with OUT/latest pointing to it; else None.

    The weights are hashed only when they may have changed since `cache` remembers them. Raises BuildError when `latest`
    cannot be written.
    """
    path = out / digest
    if not path.is_dir():
        return None
    try:
        manifest = open_bundle(path, any_machine=True).manifest
        names = [name for name, entry in manifest.files.items() if entry.chunks is not None]
        sound = all(file_sha256(path / name, cache=cache) == manifest.files[name].sha256 for name in names)
    except (BundleError, CheckpointError):
        return None
    if not sound or manifest.digest != digest:
        return None
    link = out / "latest"
    with _explained(out):
        if not (link.is_symlink() and os.readlink(link) == digest):
            with workspace(out) as temporary, locked(out):
                _point_to(path, temporary)
        else:
            sweep(out)
    return Published(path, digest, True)


def _point_to(path: Path, temporary: Path) -> None:
    """Let `latest` beside `path` lead to it."""
    link = temporary / "latest"
    link.symlink_to(path.name)
    link.replace(path.parent / "latest")
    sync(path.parent)


def _finished(description: Description, staged: Path, known: Mapping[str, FileEntry]) -> Manifest:
    names = [str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file()]
    manifest = Manifest(
        **dict(description),
        schema_version=1,
        digest="0" * 64,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        plankiln=__version__,
        world_size=1,
        files={name: known.get(name) or describe_file(staged / name) for name in names},
    )
    return manifest.model_copy(update={"digest": manifest.content_digest()})


def _move_into_place(staged: Path, path: Path, manifest: Manifest) -> bool:
    """Whether the staged bundle was put at `path`: false when a sound one, measured on the same text, lies there."""
    try:
        staged.rename(path)
        return True
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        old = open_bundle(path, verify="full", any_machine=True).manifest.gate
        if (old and old.text) == (manifest.gate and manifest.gate.text):
            return False
    except BundleError:
        pass
    _exchange(staged, path)
    return True


def _exchange(one: Path, other: Path) -> None:
    """Let two directories change names, in one step where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = [argument for path in (one, other) for argument in (_HERE, os.fsencode(path.absolute()))]
        if libc.renameat2(*names, _RENAME_EXCHANGE) == 0:
            return
    aside = one.with_name("damaged")
    other.rename(aside)
    one.rename(other)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        hint = _HINTS.get(e.errno or 0, "choose another place with `--out DIR`")
        raise BuildError(f"cannot write the bundle ({e.strerror or e})", f"`{out}`", hint) from e
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors()]
        raise BuildError("a bundle cannot state what was built", "; ".join(problems)) from None
