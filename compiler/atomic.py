"""Make directories appear whole: build beside the place under a lock, sync, rename.

What a process builds lies in PARENT/.tmp-PID-xxxxxx, locked by it. The lock dies with its process, so a later one knows
what it may sweep away.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plankiln.manifest import CHUNK_BYTES, FileEntry

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A new empty directory below `parent`, gone afterwards. What killed processes left there is removed first.

    `parent` is made where it is missing. Raises OSError.
    """
    make_directory(parent)
    sweep(parent)
    with locked(parent):
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{os.getpid()}-", dir=parent))
        alive = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(alive, fcntl.LOCK_EX)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(alive)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock, which one process has at a time. Raises OSError."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def sweep(parent: Path) -> None:
    """Remove the workspaces below `parent` whose process is gone. The caller does not hold its lock. Raises OSError."""
    with locked(parent):
        for left in parent.glob(".tmp-*"):
            with suppress(OSError):
                fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(fd)


def sync_tree(root: Path) -> None:
    """Set every mode (files 0644, directories 0755) and force all of it to the disk, children before their parent."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            _set_mode(Path(folder, name), 0o644)
            sync(Path(folder, name))
        _set_mode(Path(folder), 0o755)
        sync(Path(folder))


def _set_mode(path: Path, mode: int) -> None:
    """Not when it is right: that alone would change the time stamp by which digests are remembered."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def sync(path: Path) -> None:
    """Force a file or a directory's list of names to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make `path` and the parents it lacks, with mode 0755 whatever the umask."""
    if not path.is_dir():
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(0o755)
            path.chmod(0o755)
            sync(path.parent)


def link_or_copy(source: Path, place: Path) -> None:
    """`place` becomes a hard link to `source`, or a copy of it where the file system allows no link."""
    try:
        place.hardlink_to(source)
    except OSError as e:
        if e.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, place)


def describe_file(path: Path) -> FileEntry:
    """Digest and size of a file, with chunk digests when it holds weights."""
    whole = hashlib.sha256()
    chunks = []
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).hexdigest())
    weights = path.name == "weights.bin"
    return FileEntry(sha256=whole.hexdigest(), bytes=path.stat().st_size, chunks=tuple(chunks) if weights else None)
