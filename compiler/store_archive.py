"""Carrying entries of the stage store to another machine: a tar of KEY/entry.json and KEY/FILE, verified on both ends.

An entry holds code that will run: import only archives you trust. The digests show damage, not who made it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from plankiln.compiler.atomic import make_directory, sync, sync_tree, workspace
from plankiln.compiler.store import ENTRY, Record, Stage, Store
from plankiln.errors import BuildError

_MAX_ENTRY_BYTES = 64 << 20


def export_entries(store: Store, keys: Sequence[str], file: IO[bytes]) -> None:
    """Write these entries as a tar. Raises BuildError when one is not there or not sound, OSError of the file."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
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
    """Add the entries of an archive; returns the keys of those that the store did not have.

    Raises BuildError when the file cannot be read, or an entry is not what its entry.json says; those before stay.
    """
    added = []
    try:
        with tarfile.open(path, mode="r|") as archive:
            member = archive.next()
            while member is not None:
                record = _read_record(archive, member, path)
                with store.lock(Stage(record.stage, record.parts)), store.writing():
                    if _add(store, archive, record, path):
                        added.append(record.key)
                member = archive.next()
    except (tarfile.TarError, EOFError) as e:
        raise _damaged(path, str(e)) from None
    except OSError as e:
        raise BuildError(f"cannot read the archive ({e.strerror})", f"`{path}`") from None
    return added


def _read_record(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Record:
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
