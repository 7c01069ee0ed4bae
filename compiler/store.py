"""The stage store: what a stage made, under the digest of all that it was made from.

    STORE/stages/entries/KEY/   entry.json and the stage's files
    STORE/stages/locks/KEY      held while an entry is made or used: a second build waits, then finds it
    STORE/stages/pins/…         which entries a published bundle was made of

An entry appears in one rename, so a kill at any moment leaves none or a whole one. An entry that is not what its
entry.json says is removed and made again, with a note.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from plankiln.checkpoint.files import file_sha256
from plankiln.compiler.atomic import describe_file, make_directory, sync, sync_tree, workspace
from plankiln.errors import BuildError, CheckpointError
from plankiln.manifest import FileEntry, Sha256

SCHEMA = 1
ENTRY = "entry.json"
_FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"
Parts = Mapping[str, str | int]


def digest_of(value: JsonValue) -> str:
    """SHA-256 (hex) of a JSON value in its one canonical spelling."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Stage:
    """A piece of work whose result depends on `parts` only. `files`: the names that the work leaves behind; None for
    work that names its files itself."""

    name: str
    parts: Parts
    files: tuple[str, ...] | None = ()

    @cached_property
    def key(self) -> str:
        """SHA-256 (hex) over the stage's name and parts."""
        return digest_of({"stage": self.name, "parts": dict(self.parts)})


class Record(BaseModel):
    """entry.json. `result`: what the work returned; `created`: seconds since 1970; `digest`: of all other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    stage: str
    key: Sha256
    parts: dict[str, str | int]
    files: dict[Annotated[str, Field(pattern=_FILE_NAME)], FileEntry]
    result: dict[str, JsonValue]
    created: Annotated[int, Field(ge=0)]
    digest: Sha256

    @property
    def nbytes(self) -> int:
        """Bytes of the stage's files."""
        return sum(entry.bytes for entry in self.files.values())

    def is_sound(self) -> bool:
        """Whether key and digest are those of the rest."""
        own = self.model_dump(mode="json", exclude={"digest"})
        return self.key == Stage(self.stage, self.parts).key and self.digest == digest_of(own)


@dataclass(frozen=True)
class Entry:
    """A stage's result in the store: its directory and what its entry.json says.

    `nbytes`: of its files and entry.json; `last_used`: seconds since 1970.
    """

    path: Path
    record: Record
    nbytes: int
    last_used: float


class Store:
    """The stage store below `root`. `note` is told, in one line each, what a user should know."""

    def __init__(self, root: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.root = root / "stages"
        self.entries = self.root / "entries"
        self.pins = self.root / "pins"
        self._locks = self.root / "locks"
        self._digests = self.root
        self.note = note

    @contextmanager
    def lock(self, stage: Stage) -> Iterator[None]:
        """Hold the stage's lock between threads and processes, waiting for whoever has it. Raises BuildError."""
        with self.writing():
            self._refuse_foreign()
            fd = self._acquire(
                stage.key, lambda: self.note(f"another build is at stage `{stage.name}`: waiting for it")
            )
        assert fd is not None
        try:
            yield
        finally:
            os.close(fd)

    @contextmanager
    def try_lock(self, key: str) -> Iterator[bool]:
        """Hold an entry's lock if nobody does, and say whether it is held."""
        make_directory(self._locks)
        fd = self._acquire(key, None)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                (self._locks / key).unlink(missing_ok=True)
                os.close(fd)

    def has(self, stage: Stage) -> bool:
        """Whether there is an entry for the stage, sound or not."""
        return (self.entries / stage.key / ENTRY).exists()

    def find(self, stage: Stage) -> Entry | None:
        """The stage's entry with every digest checked, or None. The caller holds the stage's lock.

        A damaged or outdated entry is removed, and noted. Raises BuildError when it cannot be.
        """
        path = self.entries / stage.key
        if not os.path.lexists(path):
            return None
        fault = self.fault(path)
        if fault is None:
            with suppress(OSError):
                os.utime(path / ENTRY)
            return self.read(path)
        self.note(f"stage `{stage.name}` is done again: its entry in the store {fault} (`{path}`)")
        with self.writing():
            self.remove(path)
        return None

    def add(self, stage: Stage, work: Callable[[Path], dict[str, JsonValue]]) -> Entry:
        """Let `work` fill a directory with the stage's files, and keep them in place of what the stage has now.

        The caller holds the stage's lock.
        Raises BuildError when the store cannot be written or a file is missing, and whatever `work` raises.
        """
        with self.writing(), workspace(self.entries) as temporary:
            made = temporary / "entry"
            made.mkdir()
            result = work(made)
            names = {path.name for path in made.iterdir()}
            expected = names if stage.files is None else set(stage.files)
            if names != expected or not isinstance(result, dict):
                left = ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"
                raise BuildError(f"stage `{stage.name}` did not finish: it left {left}", f"`{made}`")
            files = {name: describe_file(made / name) for name in sorted(names)}
            self.write_entry(made, stage, files, result)
            sync_tree(made)
            path = self.entries / stage.key
            if path.exists():
                path.rename(temporary / "replaced")
            made.rename(path)
            sync(self.entries)
        entry = self.read(path)
        assert entry is not None
        return entry

    def write_entry(self, path: Path, stage: Stage, files: dict[str, FileEntry], result: dict[str, JsonValue]) -> None:
        """Write entry.json into an entry that is being made. Raises ValidationError when it could not be read again."""
        fields: dict[str, JsonValue] = {
            "schema_version": SCHEMA,
            "stage": stage.name,
            "key": stage.key,
            "parts": dict(stage.parts),
            "files": {name: entry.model_dump(mode="json") for name, entry in files.items()},
            "result": result,
            "created": int(time.time()),
        }
        text = json.dumps({**fields, "digest": digest_of(fields)}, indent=1, sort_keys=True)
        Record.model_validate_json(text)
        (path / ENTRY).write_text(text + "\n")

    def fault(self, path: Path) -> str | None:
        """What is wrong with the entry at `path`, as the end of a sentence, or None when every byte is right."""
        try:
            data = (path / ENTRY).read_bytes()
            record = Record.model_validate_json(data)
            present = {file.name: file.lstat() for file in path.iterdir()}
            folder = path.lstat()
        except FileNotFoundError:
            return "has no entry.json"
        except ValidationError:
            return "was written by another version" if _other_schema(data) else "has a damaged entry.json"
        except OSError as e:
            return f"cannot be read ({e.strerror})"
        if record.key != path.name or not record.is_sound():
            return "has a damaged entry.json"
        if not stat.S_ISDIR(folder.st_mode) or _is_open_to_others(folder):
            return "is a directory that others can change"
        for name in (ENTRY, *record.files):
            if name not in present:
                return f"lacks `{name}`"
            if not stat.S_ISREG(present[name].st_mode) or _is_open_to_others(present[name]):
                return f"has a `{name}` that others can change"
        if extra := present.keys() - {ENTRY, *record.files}:
            return f"has an extra file `{min(extra)}`"
        for name, expected in record.files.items():
            if present[name].st_size != expected.bytes:
                return f"has {present[name].st_size} bytes of `{name}` instead of {expected.bytes}"
            try:
                if file_sha256(path / name, cache=self._digests) != expected.sha256:
                    return f"has another `{name}` than was stored"
            except CheckpointError as e:
                return f"cannot be read ({e.problems[0].what})"
        return None

    def read(self, path: Path) -> Entry | None:
        """The entry at `path` as its entry.json states it, no digest checked; None when there is none to read."""
        try:
            data = (path / ENTRY).read_bytes()
            record = Record.model_validate_json(data)
            return Entry(path, record, record.nbytes + len(data), (path / ENTRY).stat().st_mtime)
        except (OSError, ValidationError):
            return None

    def all(self) -> list[Entry]:
        """Every readable entry, the one used last first."""
        paths = self.entries.glob("[!.]*") if self.entries.is_dir() else ()
        found = [entry for path in paths if (entry := self.read(path))]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def remove(self, path: Path) -> None:
        """Take an entry out of the store in one step. Raises OSError."""
        with workspace(self.entries) as temporary:
            path.rename(temporary / "removed")

    def pin(self, bundle: Path, keys: list[str]) -> None:
        """Remember that the published bundle is made of these entries: they stay for as long as it lies there."""
        with self.writing():
            make_directory(self.pins)
            with workspace(self.pins) as temporary:
                made = temporary / "pin"
                made.write_text(json.dumps({"bundle": str(bundle.absolute()), "entries": keys}))
                sync(made)
                made.rename(self.pins / (digest_of(str(bundle.absolute())) + ".json"))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns what the file system refuses into a BuildError that says what to do."""
        try:
            yield
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                hint = "free some space (`plankiln store gc --limit SIZE`), or set PLANKILN_STORE to a larger disk"
            else:
                hint = "set PLANKILN_STORE to a directory that you can write"
            raise BuildError(f"cannot write the stage store ({e.strerror})", f"`{self.root}`", hint) from e

    def _refuse_foreign(self) -> None:
        """Entries become code that runs: nobody else may be able to change them, or the digests they are known by."""
        for folder in (self.root, self.entries, self._locks, self.root / "digests"):
            make_directory(folder)
            if _is_open_to_others(folder.stat()):
                hint = f"set PLANKILN_STORE to a directory of your own, or: chmod go-w `{folder}`"
                raise BuildError("others can write the stage store", f"`{folder}`", hint)

    def _acquire(self, key: str, waiting: Callable[[], None] | None) -> int | None:
        """A descriptor that holds the key's lock; None when another has it and `waiting` is None."""
        path = self._locks / key
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    os.close(fd)
                    return None
                waiting()
                fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
            os.close(fd)  # it was removed meanwhile: whoever comes next locks another file


def _is_open_to_others(status: os.stat_result) -> bool:
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _other_schema(data: bytes) -> bool:
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(version, int) and version != SCHEMA
