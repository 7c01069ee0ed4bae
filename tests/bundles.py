"""Small bundles without a compiler: whatever bytes the code and the weights are, the rules for them are the same."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plankiln.compiler.package import Published, publish, staging
from plankiln.manifest import (
    CHAT_TEMPLATE,
    CHUNK_BYTES,
    REPORT,
    TOKENIZER,
    Description,
    Formats,
    ModelShape,
    PlanLimits,
    Source,
    TargetNeeds,
)

WEIGHTS = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail of the second chunk"
DESCRIPTION = Description(
    name="tiny",
    recipe={"name": "tiny", "engine": {"max_context": 64}},
    source=Source(uri="tests", digest="ab" * 32),
    target=TargetNeeds(
        name="cpu-generic", kind="cpu", isa="generic", machine=platform.machine(), flags=(), glibc="2.17"
    ),
    model=ModelShape(architecture="llama", vocab_size=33, layers=2, hidden=16, kv_heads=1, head_dim=8, max_context=128),
    formats=Formats(weights="fp32", activations="fp32", kv_cache="fp32"),
    bytes_per_format={"fp32": len(WEIGHTS)},
    kv_bytes_per_token=128,
    limits=PlanLimits(
        max_sequences=4, max_tokens_per_step=16, max_context=64, block_size=4, max_logit_rows=8, kv_memory=1 << 20
    ),
    eos_token_ids=(2, 3),
    special_tokens={"bos_token": "<s>"},
    add_bos=True,
    chat_template=CHAT_TEMPLATE,
    tools={"compiler": "g++ 12"},
)
TEXTS = {TOKENIZER: b'{"version": "1.0"}', CHAT_TEMPLATE: b"{{ messages }}", REPORT: b"{}"}


def write_plan(staged: Path, weights: bytes = WEIGHTS, code: bytes = b"\x7fELF code") -> None:
    """What a compiler leaves in a staged bundle."""
    rank = staged / "rank0"
    rank.mkdir()
    (rank / "plan.so").write_bytes(code)
    (rank / "plan.cc").write_text("// the model\n")
    (rank / "weights.bin").write_bytes(weights)


def make_bundle(
    out: Path, *, code: bytes = b"\x7fELF code", weights: bytes = WEIGHTS, report: bytes = b"{}", **changes: Any
) -> Published:
    """Publish a bundle below `out`; `changes` are fields of its Description."""
    with staging(out) as staged:
        write_plan(staged, weights, code)
        description = DESCRIPTION.model_validate(dict(DESCRIPTION) | changes)
        return publish(staged, description, TEXTS | {REPORT: report})


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], None], *, redo_digest: bool = True) -> None:
    """Change manifest.json as an attacker would, with a digest that fits unless told otherwise."""
    from plankiln.manifest import Manifest

    path = bundle / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    if redo_digest:
        data["digest"] = Manifest.model_validate_json(json.dumps(data)).content_digest()
    path.write_text(json.dumps(data))
