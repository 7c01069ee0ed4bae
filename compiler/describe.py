"""What a bundle says of itself, gathered from the recipe, the checkpoint and the plan."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

from pydantic import JsonValue

from plankiln.checkpoint import Checkpoint
from plankiln.compiler.cpu.compile import CpuPlan
from plankiln.compiler.families import DecoderSpec
from plankiln.manifest import (
    CHAT_TEMPLATE,
    REPORT,
    TOKENIZER,
    Description,
    Formats,
    ModelShape,
    PlanLimits,
    Source,
    TargetNeeds,
)
from plankiln.recipe import ResolvedTarget


def describe(resolved: ResolvedTarget, checkpoint: Checkpoint, spec: DecoderSpec, plan: CpuPlan) -> Description:
    """What the manifest says of the bundle, its files aside."""
    special = dict(checkpoint.special_tokens)
    tools = {name: version(name) for name in ("numpy", "onnx", "onnx-ir")}
    return Description(
        name=resolved.recipe,
        recipe=resolved.model_dump(mode="json"),
        source=Source(uri=resolved.model.source, digest=checkpoint.digest),
        target=TargetNeeds(
            name=resolved.target.name,
            kind="cpu",
            isa=resolved.target.isa,
            machine=platform.machine(),
            flags=plan.flags,
            glibc=plan.glibc,
        ),
        model=ModelShape(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            layers=spec.layers,
            hidden=spec.hidden_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_context=spec.max_position,
        ),
        formats=Formats(weights=plan.weights, activations=plan.activations, kv_cache=plan.kv_cache),
        bytes_per_format=plan.bytes_per_format,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        limits=_limits(resolved),
        eos_token_ids=checkpoint.eos_token_ids,
        add_bos=bool(special.pop("add_bos_token", False)),
        special_tokens=special,
        chat_template=None if checkpoint.chat_template is None else CHAT_TEMPLATE,
        tools={"python": platform.python_version(), "compiler": plan.compiler, **tools},
    )


def texts_of(checkpoint: Checkpoint, report: dict[str, JsonValue]) -> dict[str, bytes]:
    """The bundle's files besides code and weights, by path."""
    texts = {TOKENIZER: checkpoint.tokenizer_json, REPORT: (json.dumps(report, indent=1) + "\n").encode()}
    if checkpoint.chat_template is not None:
        texts[CHAT_TEMPLATE] = checkpoint.chat_template.encode()
    return texts


def _limits(resolved: ResolvedTarget) -> PlanLimits:
    engine = resolved.engine
    return PlanLimits(
        max_sequences=engine.max_sequences,
        max_tokens_per_step=engine.max_tokens_per_step,
        max_context=engine.max_context,
        block_size=engine.block_size,
        max_logit_rows=engine.max_logit_rows,
        kv_memory=engine.kv_memory,
    )
