"""What all readers share: JSON objects, read-only maps, content digests with a cache, atomic writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from plankiln.checkpoint.base import Progress
from plankiln.errors import CheckpointError

CHUNK = 8 << 20
_LFS = b"version https://git-lfs.github.com/spec/"
REDOWNLOAD = "the file is damaged; download it again"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file when it cannot be read or is none."""
    return parse_json_object(read_file(path), str(path))


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"not valid JSON ({reason})", where, "download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where)
    return value


def read_file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read file ({error.strerror})", str(path)) from None
    _refuse_pointer(data, path)
    return data


def _refuse_pointer(data: bytes, path: Path) -> None:
    if data.startswith(_LFS):
        hint = "fetch it: run `git lfs pull` where the repository was cloned"
        raise CheckpointError("not the file but Git LFS's pointer to it", str(path), hint)


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file mapped read-only; `b""` for an empty one, which cannot be mapped."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read file ({error.strerror})", str(path)) from None
    _refuse_pointer(mapped[: len(_LFS)], path)
    return mapped


def unmap(mapped: mmap.mmap | bytes) -> None:
    """Close a map now, or, when arrays still view it, with the last of them."""
    if isinstance(mapped, mmap.mmap):
        with contextlib.suppress(BufferError):
            mapped.close()


def file_sha256(path: Path, *, cache: Path, progress: Progress | None = None) -> str:
    """sha256 (hex) of a file's content.

    Remembered in `cache`/digests under path, size, inode and time stamps, so that a second build does not hash
    140 GB again. Files changed within the last two seconds are not remembered: a time stamp cannot tell another
    change in the same tick.
    """
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            note = _digest_note(path, before, cache)
            with contextlib.suppress(OSError, ValueError):
                known = note.read_text(encoding="ascii")
                if re.fullmatch(r"[0-9a-f]{64}", known):
                    return known
            digest = hash_stream(file, f"hashing {path.name}", before.st_size, progress)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot read file ({error.strerror})", str(path)) from None
    if _stamp(before) != _stamp(after):
        raise CheckpointError("file changed while it was read", str(path), "run again once nothing writes to it")
    if time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > 2_000_000_000:
        with contextlib.suppress(OSError):
            write_atomic(note, lambda out: out.write(digest.encode("ascii")))
    return digest


def hash_stream(
    file: IO[bytes], label: str, total: int, progress: Progress | None, copy_to: IO[bytes] | None = None
) -> str:
    """sha256 (hex) of what is left in a stream, written to `copy_to` on the way."""
    digest = hashlib.sha256()
    done = 0
    while block := file.read(CHUNK):
        digest.update(block)
        if copy_to is not None:
            copy_to.write(block)
        done += len(block)
        if progress is not None:
            progress(label, done, total)
    return digest.hexdigest()


def write_atomic(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between processes; released when the process dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _digest_note(path: Path, stat: os.stat_result, cache: Path) -> Path:
    identity = "\0".join([str(path.resolve()), *map(str, _stamp(stat))])
    return cache / "digests" / hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
