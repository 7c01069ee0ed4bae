"""Measure a published bundle again, on the machine that is to run it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from plankiln.bundle import Bundle, open_bundle
from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.atomic import sync
from plankiln.compiler.checks import config_place
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.gate import (
    GateResult,
    Losses,
    ReferenceKind,
    gate_record,
    held_out,
    judge,
    measure,
    open_built,
    open_plan,
    tokenizer_of,
)
from plankiln.compiler.measure import Progress
from plankiln.compiler.reference_plan import reference_plan
from plankiln.compiler.store import Store
from plankiln.errors import BundleError, CheckpointError, Problem
from plankiln.host import store_directory
from plankiln.manifest import MANIFEST, GateRecord, Manifest
from plankiln.recipe import ResolvedTarget


@dataclass(frozen=True)
class Regated:
    """What a bundle was measured to be. record: None when logits were not finite. problems: what its recipe forbids."""

    path: Path
    manifest: Manifest
    record: GateRecord | None
    problems: list[Problem]


def regate(path: Path, source: str | None, progress: Progress) -> Regated:
    """Measure the bundle by its recipe's `gate`. A provisional one that passes is provisional no more.

    source: the model, where it is not where the recipe says. Raises BundleError; CheckpointError when the model cannot
    be had or is another; TextError for the held-out text; and what the stages of a build raise.
    """
    bundle = open_bundle(path)
    resolved = recipe_of(bundle.manifest)
    text, ids = held_out(resolved.gate, tokenizer_of(bundle), bundle.manifest.limits.max_context)
    (losses,), kind = compare(bundle, [ids], source, progress)
    result = GateResult.of(losses)
    problems = judge(result, resolved.gate)
    record = None
    if not result.non_finite:
        record = gate_record(result, text.digest, kind, skipped=False).model_copy(update={"passed": not problems})
        old = bundle.manifest.gate
        if old is not None and old.provisional and record.passed:
            _replace_manifest(bundle.path, bundle.manifest.model_copy(update={"gate": record}))
    return Regated(bundle.path, bundle.manifest, record, problems)


def recipe_of(manifest: Manifest) -> ResolvedTarget:
    """The recipe that a bundle was built from, as its manifest keeps it. Raises BundleError."""
    try:
        return ResolvedTarget.model_validate_json(json.dumps(manifest.recipe))
    except ValidationError:
        hint = "another version of plankiln built it: build it again"
        raise BundleError("its recipe is not one that this plankiln reads", f"`{MANIFEST}`", hint) from None


def compare(
    bundle: Bundle, texts: Sequence[Sequence[Sequence[int]]], source: str | None, progress: Progress
) -> tuple[list[Losses], ReferenceKind | None]:
    """Losses of the bundle on each of `texts` (token ids of its windows), and what they compare with.

    A bundle that is unquantized throughout is compared with nothing. source and errors: as for `regate`.
    """
    resolved = recipe_of(bundle.manifest)
    with ExitStack() as stack:
        reference, kind = None, None
        if (resolved.quantize.weights, resolved.quantize.kv_cache) != ("fp32", "fp32"):
            checkpoint = stack.enter_context(_model_of(bundle, resolved, source, progress))
            spec = decoder_spec(checkpoint.config, config_place(checkpoint))
            checkpoint.validate(spec.expected_tensors())
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plankiln-")))
            progress.stage("reference", "")
            store = Store(store_directory(), progress.note)
            plan = reference_plan(checkpoint, spec, resolved.engine, store, directory, progress)
            reference = stack.enter_context(closing(open_plan(plan.source, directory, resolved.engine, "fp32")))
            kind = plan.kind
        candidate = stack.enter_context(closing(open_built(bundle)))
        progress.stage("gate", "")
        return [measure(candidate, reference, ids, progress) for ids in texts], kind


def _model_of(bundle: Bundle, resolved: ResolvedTarget, source: str | None, progress: Progress) -> Checkpoint:
    """The model that the bundle was built from."""
    try:
        checkpoint = open_checkpoint(source or resolved.model.source, base=Path(), progress=progress)
    except CheckpointError as error:
        hint = "name the model that the bundle was built from: `--source MODEL`"
        raise CheckpointError([Problem(p.what, p.where, p.hint if source else hint) for p in error.problems]) from None
    if checkpoint.digest != bundle.manifest.source.digest:
        checkpoint.close()
        what = f"not the model that the bundle was built from, whose digest is {bundle.manifest.source.digest}"
        raise CheckpointError(what, f"`{source or resolved.model.source}`", "name that model: `--source MODEL`")
    return checkpoint


def _replace_manifest(path: Path, manifest: Manifest) -> None:
    """In one rename. Raises BundleError."""
    try:
        new = path.with_name(f".{path.name}-{MANIFEST}")
        new.write_bytes(manifest.to_json())
        new.chmod(0o644)
        sync(new)
        new.replace(path / MANIFEST)
        sync(path)
    except OSError as error:
        raise BundleError(f"cannot write the manifest ({error.strerror})", f"`{path}`") from None
