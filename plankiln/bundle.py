"""Opening a bundle.

A plan is executable code, so opening one is a question of trust. The manifest is read once; everything it
does not list, and everything that is not what it lists, is refused; the code that is executed is the very
copy that was hashed, because it lies in sealed memory.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pydantic_core
from pydantic import ValidationError

from plankiln.errors import BundleError, Problem
from plankiln.host import Host, this_host
from plankiln.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Manifest,
    TargetNeeds,
    plan_file,
    weights_file,
)
from plankiln.trust import REBUILD, Tree, WeightBytes, open_tree, seal, verify_chunks

__all__ = ["Bundle", "Manifest", "Verify", "find_bundle", "obstacle", "open_bundle", "read_manifest"]

Verify = Literal["code", "full"]
_MAX_MANIFEST_BYTES = 64 << 20
_log = logging.getLogger("plankiln.bundle")


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: everything in it was verified as `verified` says.

    weights: per rank, the whole of weights.bin as read-only uint8 [bytes], mapped, not read.
    """

    path: Path
    manifest: Manifest
    manifest_sha256: str
    verified: Verify
    tokenizer_json: bytes
    chat_template: str | None
    weights: tuple[WeightBytes, ...]
    code: tuple[bytes, ...]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset(self.manifest.eos_token_ids)

    def sealed_code(self, rank: int = 0) -> Path:
        """A path to dlopen: the verified bytes of the rank's plan.so in memory that nobody can change any more.

        The copy lives as long as the process, and equal code shares one. It cannot be closed earlier: the dynamic
        linker knows a library by its path, and a second plan at a reused /proc/self/fd/N would silently be the first.
        Raises BundleError when the kernel refuses the copy.
        """
        data = self.code[rank]
        digest = hashlib.sha256(data).hexdigest()
        if digest not in _sealed:
            try:
                _sealed[digest] = seal(data)
            except OSError as e:
                raise BundleError(
                    f"cannot make a sealed copy of the plan ({e.strerror})",
                    str(self.path / plan_file(rank)),
                    "the kernel must allow memfd_create with sealing (Linux 3.17, vm.memfd_noexec below 2)",
                ) from None
        return Path(f"/proc/self/fd/{_sealed[digest]}")


_sealed: dict[str, int] = {}


def find_bundle(path: Path | str) -> Path:
    """The bundle that `path` means: a bundle, its `latest` link, or artifacts/RECIPE[/TARGET]. Raises BundleError."""
    path = Path(path)
    try:
        if not path.is_dir():
            what = "not a bundle but a file" if path.exists() else "no such bundle"
            raise BundleError(what, f"`{path}`", "name a directory that `build RECIPE` printed")
        for candidate in (path, path / "latest"):
            if (candidate / MANIFEST).exists():
                return candidate.resolve(strict=True)
        found = sorted(p for p in path.glob("*/latest") if (p / MANIFEST).exists())
    except (OSError, ValueError, RuntimeError) as e:
        raise BundleError("cannot open the bundle", f"`{path}`", str(e)) from None
    if len(found) == 1:
        return found[0].resolve(strict=True)
    if not found:
        raise BundleError("no manifest.json in this directory", f"`{path}`", "name a directory that `build` printed")
    names = ", ".join(f"`{p.parent}`" for p in found)
    raise BundleError("more than one target was built here", f"`{path}`", f"name one of {names}")


def read_manifest(path: Path | str) -> tuple[Manifest, str]:
    """The manifest of a bundle and the SHA-256 of its bytes; no other file is read. Raises BundleError."""
    with open_tree(find_bundle(path)) as tree:
        return _read_manifest(tree, None)


def open_bundle(
    path: Path | str,
    *,
    manifest_sha256: str | None = None,
    verify: Verify = "code",
    any_machine: bool = False,
) -> Bundle:
    """Open a bundle under the trust rules, or raise BundleError.

    manifest_sha256: refuse any manifest.json but the one with these bytes.
    verify: "code" hashes all but the weights, whose size alone is checked; "full" hashes the weights too.
    any_machine: do not ask whether this machine can run the plan (for looking at a bundle made for another).
    """
    if verify not in get_args(Verify):
        raise BundleError(f"`verify` must be {' or '.join(f'`{depth}`' for depth in get_args(Verify))}, not `{verify}`")
    if manifest_sha256 is not None and not re.fullmatch(r"[0-9A-Fa-f]{64}", str(manifest_sha256)):
        hint = "take the SHA-256 of manifest.json, which `plankiln inspect BUNDLE` prints"
        raise BundleError(f"`manifest_sha256` must be 64 hex digits, not `{manifest_sha256}`", hint=hint)
    root = find_bundle(path)
    with open_tree(root) as tree:
        manifest, digest = _read_manifest(tree, manifest_sha256)
        if not any_machine:
            _check_host(manifest.target, this_host(), root)
        tree.expect({MANIFEST: tree.size(MANIFEST)} | {name: entry.bytes for name, entry in manifest.files.items()})
        content = {
            name: tree.read_verified(name, entry.bytes, entry.sha256)
            for name, entry in manifest.files.items()
            if entry.chunks is None
        }
        ranks = range(manifest.world_size)
        weights = tuple(tree.map(weights_file(rank)) for rank in ranks)
        for rank in ranks if verify == "full" else ():
            name = weights_file(rank)
            verify_chunks(weights[rank], manifest.files[name].chunks or (), CHUNK_BYTES, tree.where(name))
    template = manifest.chat_template
    try:
        chat_template = content[template].decode() if template else None
    except UnicodeDecodeError:
        raise BundleError("not UTF-8 text", f"`{root / str(template)}`", REBUILD) from None
    depth = "" if verify == "full" else ", weights by size only (verify=full hashes them)"
    _log.info("opened %s (manifest %s): manifest, code and tokenizer verified%s", root, digest[:12], depth)
    return Bundle(
        path=root,
        manifest=manifest,
        manifest_sha256=digest,
        verified=verify,
        tokenizer_json=content[TOKENIZER],
        chat_template=chat_template,
        weights=weights,
        code=tuple(content[plan_file(rank)] for rank in ranks),
    )


def _read_manifest(tree: Tree, pinned: str | None) -> tuple[Manifest, str]:
    where = tree.where(MANIFEST)
    data = tree.read(MANIFEST, _MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise BundleError(f"larger than {_MAX_MANIFEST_BYTES} bytes", where, REBUILD)
    digest = hashlib.sha256(data).hexdigest()
    if pinned is not None and digest != pinned.lower():
        hint = "this is another bundle"
        if f"/{pinned.lower()}/" in where:
            hint = "the pinned one is the bundle's digest, which names its directory; pin the SHA-256 of manifest.json"
        raise BundleError(f"its SHA-256 is `{digest}`, not the pinned `{pinned}`", where, hint)
    try:
        version = pydantic_core.from_json(data).get("schema_version")
        if isinstance(version, int) and version != SCHEMA_VERSION:
            hint = "use the plankiln that built it" if version < SCHEMA_VERSION else "update plankiln, or " + REBUILD
            raise BundleError(f"schema version {version}, but this plankiln reads {SCHEMA_VERSION}", where, hint)
        manifest = Manifest.model_validate_json(data)
        content = manifest.content_digest()
    except ValidationError as e:
        places = [(".".join(map(str, error["loc"])), error["msg"]) for error in e.errors(include_url=False)[:5]]
        hint = "another version of plankiln built it, or it was edited: " + REBUILD
        raise BundleError(
            [Problem(f"`{place}`: {text}" if place else text, where, hint) for place, text in places]
        ) from None
    except (ValueError, AttributeError):
        raise BundleError("not a manifest", where, REBUILD) from None
    if content != manifest.digest:
        raise BundleError("its content does not have the digest that it states", where, REBUILD)
    return manifest, digest


def obstacle(needs: TargetNeeds) -> str | None:
    """Why this machine cannot run a plan with these needs, or None when it can."""
    return _unfit(needs, this_host())


def _check_host(needs: TargetNeeds, host: Host, root: Path) -> None:
    problem = _unfit(needs, host)
    if problem is None:
        return
    fitting = [
        manifest.parents[1]
        for manifest in sorted(root.parent.parent.glob("*/latest/" + MANIFEST))
        if _fits(manifest.parent, host)
    ]
    hint = (
        f"`{fitting[0]}` fits this machine" if fitting else "build the recipe on this machine, or for a lesser target"
    )
    raise BundleError(problem, f"`{root}`", hint)


def _unfit(needs: TargetNeeds, host: Host) -> str | None:
    if needs.machine != host.machine:
        return f"built for `{needs.machine}`, but this machine is `{host.machine}`"
    if missing := [flag for flag in needs.flags if flag not in host.flags]:
        return f"built for `{needs.name}` with CPU flags {_quoted(missing)}, which this CPU ({host.cpu}) lacks"
    if host.glibc is None:
        return f"needs glibc {needs.glibc} or newer, but this machine's C library is another"
    if _version(host.glibc) < _version(needs.glibc):
        return f"needs glibc {needs.glibc} or newer, but this machine has {host.glibc}"
    return None


def _fits(bundle: Path, host: Host) -> bool:
    try:
        return _unfit(read_manifest(bundle)[0].target, host) is None
    except BundleError:
        return False


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
