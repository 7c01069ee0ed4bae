"""Reading a directory that nobody vouches for, and code that stays what was verified."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from plankiln.errors import BundleError

WeightBytes = np.memmap[tuple[int], np.dtype[np.uint8]]
REBUILD = "build it again, or copy it again from where it was built"
_OWNER_ONLY = stat.S_IWGRP | stat.S_IWOTH


class Tree:
    """The regular files below one directory, looked at once; opened files must still be the ones looked at."""

    def __init__(self, root: Path, fd: int) -> None:
        self._root = root
        self._fd = fd
        self._files: dict[str, os.stat_result] = {}
        self._check_mode(".", os.fstat(fd))
        for folder, folders, names, folder_fd in os.fwalk(".", dir_fd=fd, onerror=_raise):
            for name in sorted(folders + names):
                path = os.path.normpath(os.path.join(folder, name))
                status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                self._check_mode(path, status)
                if not stat.S_ISDIR(status.st_mode):
                    self._files[path] = status

    def where(self, path: str) -> str:
        """How messages name a file of this tree."""
        return f"`{self._root / path}`"

    def expect(self, sizes: dict[str, int]) -> None:
        """Raises BundleError unless the tree holds exactly these files with these sizes in bytes."""
        if missing := sorted(sizes.keys() - self._files.keys()):
            raise BundleError("a file is missing", self.where(missing[0]), REBUILD)
        if extra := sorted(self._files.keys() - sizes.keys()):
            raise BundleError(
                "a file that the manifest does not list", self.where(extra[0]), "remove it, or " + REBUILD
            )
        for path, size in sizes.items():
            if self._files[path].st_size != size:
                what = f"{self._files[path].st_size} bytes instead of {size}"
                raise BundleError(what, self.where(path), REBUILD)

    def size(self, path: str) -> int:
        """Bytes of a file of this tree."""
        return self._files[path].st_size

    def read(self, path: str, limit: int) -> bytes:
        """The content of a file, at most `limit` bytes of it."""
        if path not in self._files:
            raise BundleError("a file is missing", self.where(path), REBUILD)
        fd = self._open(path)
        try:
            parts = []
            while limit > 0 and (part := os.read(fd, min(limit, 1 << 24))):
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def read_verified(self, path: str, size: int, sha256: str) -> bytes:
        """The content of a file, which must have this size and digest."""
        data = self.read(path, size)
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise BundleError("its SHA-256 is not the manifest's", self.where(path), REBUILD)
        return data

    def map(self, path: str) -> WeightBytes:
        """The file as read-only uint8 [bytes], mapped."""
        with os.fdopen(self._open(path), "rb") as file:
            return np.memmap(file, dtype=np.uint8, mode="r")

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        if not os.path.samestat(os.fstat(fd), self._files[path]):
            os.close(fd)
            raise BundleError("the file was replaced while the bundle was opened", self.where(path), REBUILD)
        return fd

    def _check_mode(self, path: str, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            raise BundleError("a symbolic link inside a bundle", self.where(path), "copy the bundle with `cp -rL`")
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise BundleError("neither a file nor a directory", self.where(path), REBUILD)
        if status.st_uid not in (0, os.geteuid()):
            hint = f"that user could change it; if you trust it: chown -R $(id -u) `{self._root}`, or copy it"
            raise BundleError(f"owned by another user, number {status.st_uid}", self.where(path), hint)
        if status.st_mode & _OWNER_ONLY:
            who = "everyone" if status.st_mode & stat.S_IWOTH else "its group"
            hint = f"anyone could have changed it; if you trust it: chmod -R go-w `{self._root}`"
            raise BundleError(f"writable by {who}", self.where(path), hint)


@contextmanager
def open_tree(root: Path) -> Iterator[Tree]:
    """The tree below `root`; whatever the file system refuses while it is open becomes a BundleError."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield Tree(root, fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise BundleError(f"cannot read the bundle ({e.strerror})", f"`{root / str(e.filename or '')}`") from None


def verify_chunks(data: WeightBytes, digests: Iterable[str], chunk_bytes: int, where: str) -> None:
    """Raises BundleError, with the byte range, unless every chunk of `data` has its SHA-256."""
    for index, digest in enumerate(digests):
        start = index * chunk_bytes
        chunk = data[start : start + chunk_bytes]
        if hashlib.sha256(chunk.data).hexdigest() != digest:
            what = f"bytes {start} to {start + len(chunk)} are not what was built"
            raise BundleError(what, where, REBUILD)


def seal(data: bytes) -> int:
    """A file descriptor of an anonymous file with this content that can never change. Raises OSError."""
    fd = os.memfd_create("plankiln-plan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _raise(error: OSError) -> None:
    raise error
