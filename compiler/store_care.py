"""Keeping the stage store within its size: what was used least recently goes, what live bundles use stays."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass

from plankiln.compiler.atomic import sweep
from plankiln.compiler.store import Store
from plankiln.errors import PlankilnError, Problem, UsageError
from plankiln.manifest import MANIFEST

DEFAULT_LIMIT = 20 << 30
LIMIT = "PLANKILN_STORE_LIMIT"


@dataclass(frozen=True)
class Collected:
    """What a collection left. `removed`: the keys that went; `pinned_bytes`: what live bundles keep."""

    removed: tuple[str, ...]
    freed_bytes: int
    kept_bytes: int
    pinned_bytes: int


def size_limit(text: str | None = None) -> int:
    """Bytes the store may hold: `text` ("4GiB"), else $PLANKILN_STORE_LIMIT, else 20 GiB. Raises UsageError."""
    chosen = text if text is not None else os.environ.get(LIMIT) or None
    if chosen is None:
        return DEFAULT_LIMIT
    found = re.fullmatch(r"([0-9]{1,18}) ?(?:([KMGT])iB)?", chosen)
    if not found:
        where = "`--limit`" if text is not None else LIMIT
        raise UsageError(f"`{chosen}` is no size", where, "write bytes, or a size such as `4GiB`")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def pinned(store: Store) -> set[str]:
    """Keys of the entries that bundles use which still lie where they were published. Raises OSError."""
    keys: set[str] = set()
    for path in store.pins.glob("[!.]*") if store.pins.is_dir() else ():
        try:
            pin = json.loads(path.read_bytes())
            alive = os.path.exists(os.path.join(pin["bundle"], MANIFEST))
            keys.update(map(str, pin["entries"] if alive else ()))
        except (OSError, ValueError, TypeError, KeyError):
            alive = False
        if not alive:
            path.unlink(missing_ok=True)
    return keys


def collect(store: Store, limit: int) -> Collected:
    """Remove entries, the one unused for longest first, until all together take at most `limit` bytes.

    Entries that live bundles use and those in use at this moment stay; unreadable ones and what killed builds left go
    in any case. Raises BuildError when the store cannot be written.
    """
    with store.writing():
        if not store.entries.is_dir():
            return Collected((), 0, 0, 0)
        sweep(store.entries)
        keep = pinned(store)
        readable = store.all()
        known = {entry.path for entry in readable}
        for path in [path for path in store.entries.glob("[!.]*") if path not in known]:
            with store.try_lock(path.name) as held:
                if held and store.read(path) is None:
                    with suppress(FileNotFoundError):
                        store.remove(path)
        sizes = {entry.path: entry.nbytes for entry in readable}
        total = before = sum(sizes.values())
        removed = []
        for entry in reversed(readable):
            key = entry.record.key
            if total <= limit:
                break
            if key in keep:
                continue
            with store.try_lock(key) as held:
                if held:
                    with suppress(FileNotFoundError):
                        store.remove(entry.path)
                    removed.append(key)
                    total -= sizes[entry.path]
        stays = sum(size for path, size in sizes.items() if path.name in keep)
    return Collected(tuple(removed), before - total, total, stays)


def matching(store: Store, prefix: str) -> list[str]:
    """Keys of the entries that `prefix` names: one entry, or all that a bundle of that digest is made of.

    Raises PlankilnError when it names none, or several.
    """
    entries = store.all()
    bundles = {str(e.record.result.get("digest")): e for e in entries if e.record.stage == "bundle"}
    named = [[e.record.key] for e in entries if e.record.key.startswith(prefix) and e.record.stage != "bundle"]
    for digest, entry in bundles.items():
        if digest.startswith(prefix) or entry.record.key.startswith(prefix):
            used = entry.record.result.get("entries")
            named.append([str(key) for key in used] if isinstance(used, list) else [])
    if len(named) == 1 and prefix:
        return named[0]
    what = "more than one entry of the stage store" if named else "nothing in the stage store"
    hint = "`plankiln store ls` lists the entries; a digest of a bundle names all that it is made of"
    raise PlankilnError([Problem(f"{what} starts with `{prefix}`", f"`{store.root}`", hint)])
