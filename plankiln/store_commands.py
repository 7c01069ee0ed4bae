"""`plankiln store …`: looking into the stage store, keeping it small, carrying it to another machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plankiln.console import needs_build_extra, say
from plankiln.errors import PlankilnError
from plankiln.host import readable_size, store_directory

if TYPE_CHECKING:
    from plankiln.compiler.store import Store


@click.group(short_help="Look after the stage store.")
def store() -> None:
    """What builds have made, so that nothing is made twice: $PLANKILN_STORE, or the user's cache directory."""


@store.command("ls", short_help="List the entries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines with the parts of each key.")
def list_entries(as_json: bool) -> None:
    """List the entries, the one used last first: key, stage, size, last use, `pinned` when a live bundle uses it."""
    opened = _open()
    from plankiln.compiler.store_care import pinned

    live = pinned(opened)
    for entry in opened.all():
        record = entry.record
        if as_json:
            row = record.model_dump(mode="json", include={"key", "stage", "parts", "created", "result"})
            click.echo(json.dumps({**row, "bytes": record.nbytes, "pinned": record.key in live}))
        else:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
            mark = "pinned" if record.key in live else ""
            line = f"{record.key[:16]}  {record.stage:<8} {readable_size(record.nbytes):>10}  {used}  {mark}"
            click.echo(line.rstrip())


@store.command(short_help="Remove what was not used for longest.")
@click.option("--limit", metavar="SIZE", help="Keep this much [default: $PLANKILN_STORE_LIMIT or 20GiB].")
def gc(limit: str | None) -> None:
    """Remove entries, the one unused for longest first, down to a size. What live bundles use stays."""
    opened = _open()
    from plankiln.compiler.store_care import collect, size_limit

    done = collect(opened, size_limit(limit))
    for key in done.removed:
        click.echo(key)
    kept, live = readable_size(done.kept_bytes), readable_size(done.pinned_bytes)
    say(f"{readable_size(done.freed_bytes)} freed, {kept} kept, {live} of it in use by bundles")


@store.command("export", short_help="Write entries to a tar file.")
@click.argument("digest")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def export_command(digest: str, file: Path) -> None:
    """Write the entry whose key starts with DIGEST, or all that the bundle DIGEST is made of, to FILE (`-`: stdout)."""
    opened = _open()
    from plankiln.compiler.store_archive import export_entries
    from plankiln.compiler.store_care import matching

    keys = matching(opened, digest)
    try:
        if str(file) == "-":
            export_entries(opened, keys, sys.stdout.buffer)
        else:
            with file.open("wb") as out:
                export_entries(opened, keys, out)
    except OSError as e:
        hint = "name a file in a directory that you can write, on a disk with room"
        raise PlankilnError(f"cannot write the archive ({e.strerror})", f"`{file}`", hint) from None


@store.command("import", short_help="Add the entries of a tar file.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def import_command(file: Path) -> None:
    """Add the entries of FILE (`-`: stdin), each verified; print the keys of new ones. They hold code: trust FILE."""
    opened = _open()
    from plankiln.compiler.store_archive import import_entries

    for key in import_entries(opened, file):
        click.echo(key)


def _open() -> Store:
    with needs_build_extra():
        from plankiln.compiler.store import Store
    return Store(store_directory(), say)
