"""Carrying entries of the stage store to another machine: a tar of an index, then KEY/entry.json and KEY/FILE.

Verified on both ends; the index, which lists the keys, shows an archive that was cut short between two entries.

An entry holds code that will run: import only archives you trust. The digests show damage, not who made it.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from plankiln.compiler.atomic import make_directory, sync, sync_tree, workspace
from plankiln.compiler.store import ENTRY, Record, Stage, Store
from plankiln.errors import BuildError

_MAX_ENTRY_BYTES = 64 << 20
_INDEX = "index.json"


def export_entries(store: Store, keys: Sequence[str], file: IO[bytes]) -> None:
    """Write these entries as a tar. Raises BuildError when one is not there or not sound, OSError of the file."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        index = json.dumps(list(keys)).encode()
        member = tarfile.TarInfo(_INDEX)
        member.size = len(index)
        archive.addfile(member, io.BytesIO(index))
        for key in keys:
            found = store.read(store.entries / key)
            if found is None:
                raise BuildError("an entry is not in the stage store", f"`{store.entries / key}`", "build again")
            with store.lock(Stage(found.record.stage, found.record.parts)):
                if fault := store.fault(found.path):
                    raise BuildError(f"the store's entry {fault}", f"`{found.path}`", "build again")
                for name in (ENTRY, *found.record.files):
                    archive.add(found.path / name, f"{key}/{name}", recursive=False, filter=_anonymous)


def import_entries(store: Store, path: Path) -> list[str]:
    """Add the entries of an archive (`-` is stdin); returns the keys of those that the store did not have.

    Raises BuildError when the file cannot be read, or an entry is not what its entry.json says; those before stay.
    """
    added = []
    try:
        source = nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
        with source as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for key in _read_index(archive, path):
                record = _read_record(archive, archive.next(), path)
                if record.key != key:
                    raise _damaged(path, f"`{record.key}` stands where `{key}` should")
                with store.lock(Stage(record.stage, record.parts)), store.writing():
                    if _add(store, archive, record, path):
                        added.append(record.key)
    except (tarfile.TarError, EOFError) as e:
        raise _damaged(path, str(e)) from None
    except OSError as e:
        hint = "name a file that `plankiln store export` wrote"
        raise BuildError(f"cannot read the archive ({e.strerror})", f"`{path}`", hint) from None
    return added


def _read_index(archive: tarfile.TarFile, path: Path) -> list[str]:
    member = archive.next()
    if member is None or member.name != _INDEX or not member.isreg() or member.size > _MAX_ENTRY_BYTES:
        raise _damaged(path, f"it does not begin with `{_INDEX}`")
    stream = archive.extractfile(member)
    try:
        keys: list[str] = TypeAdapter(list[str]).validate_json(stream.read() if stream else b"")
    except ValidationError:
        raise _damaged(path, f"`{_INDEX}` is not a list of keys") from None
    return keys


def _read_record(archive: tarfile.TarFile, member: tarfile.TarInfo | None, path: Path) -> Record:
    if member is None:
        raise _damaged(path, "it ends before its last entry")
    stream = archive.extractfile(member) if member.isreg() and member.size <= _MAX_ENTRY_BYTES else None
    if stream is None:
        raise _damaged(path, f"`{member.name}` is not an entry.json")
    try:
        record = Record.model_validate_json(stream.read())
    except ValidationError:
        raise _damaged(path, f"`{member.name}` is not an entry.json that this version knows") from None
    if member.name != f"{record.key}/{ENTRY}" or not record.is_sound():
        raise _damaged(path, f"`{member.name}` does not have the digest that it states")
    return record


def _add(store: Store, archive: tarfile.TarFile, record: Record, path: Path) -> bool:
    """Unpack the files that follow, check them and publish the entry; false when a sound one was there already."""
    make_directory(store.entries)
    with workspace(store.entries) as temporary:
        made = temporary / record.key
        made.mkdir()
        (made / ENTRY).write_text(record.model_dump_json(indent=1) + "\n")
        for name, expected in record.files.items():
            member = archive.next()
            stream = archive.extractfile(member) if member is not None and member.isreg() else None
            if member is None or stream is None or member.name != f"{record.key}/{name}":
                raise _damaged(path, f"`{record.key}/{name}` is missing")
            if member.size != expected.bytes:
                raise _damaged(path, f"`{member.name}` has {member.size} bytes instead of {expected.bytes}")
            with (made / name).open("wb") as out:
                while block := stream.read(1 << 20):
                    out.write(block)
        sync_tree(made)
        if fault := store.fault(made):
            raise _damaged(path, f"its entry `{record.key}` {fault}")
        if store.find(Stage(record.stage, record.parts)) is not None:
            return False
        made.rename(store.entries / record.key)
        sync(store.entries)
    return True


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _damaged(path: Path, what: str) -> BuildError:
    return BuildError(f"not a sound archive of the stage store: {what}", f"`{path}`", "export it again")
