"""Fetch a model from the Hugging Face hub into its shared cache, resumably."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plankiln.errors import CheckpointError

_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_IGNORE = ["*/*", "consolidated*.safetensors"]
_SOURCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)")


def fetch_snapshot(source: str) -> Path:
    """The local directory of `hf:org/name@revision`; files already there are not fetched again.

    Raises CheckpointError for a malformed source and for every way the hub can refuse.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        what = "hub source names no revision" if "@" not in source else "malformed hub source"
        raise CheckpointError(what, source, "write `hf:org/name@revision`; a commit hash pins the files")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            "huggingface_hub is not installed", source, "install `plankiln[build]` to fetch from the hub"
        ) from None
    repo, revision = match["repo"], match["revision"]
    try:
        with _quiet():
            return Path(snapshot_download(repo, revision=revision, allow_patterns=_ALLOW, ignore_patterns=_IGNORE))
    except Exception as error:  # the hub's client, its HTTP layer and the disk each have their own
        raise CheckpointError(*_explain(error, repo, revision)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's two lines for each of its retries: how it ends is told once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _explain(error: Exception, repo: str, revision: str) -> tuple[str, str, str]:
    from huggingface_hub import errors

    where = f"hf:{repo}@{revision}"
    if isinstance(error, errors.GatedRepoError):
        return "access to the model is gated", where, f"accept its terms at https://huggingface.co/{repo}, set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision `{revision}`", where, f"https://huggingface.co/{repo}/commits/main lists them"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no model `{repo}` on the hub", where, "check the name; a private model needs HF_TOKEN"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        hint = "the hub's cache lacks it and the hub cannot be reached; check the network, HF_HUB_OFFLINE and HF_HOME"
        return "model not available offline", where, hint
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot store the model ({error.strerror})", where, "check free disk space and HF_HOME"
    reason = str(error).strip().splitlines()
    return f"download failed ({reason[0] if reason else type(error).__name__})", where, "run again: it resumes"
