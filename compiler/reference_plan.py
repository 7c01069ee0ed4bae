"""The unquantized model as a plan for this machine, which the gate compares with: fp32 weights, activations and cache.

An already quantized source is dequantized exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from plankiln.checkpoint import BLOCK_DTYPES, Checkpoint
from plankiln.compiler.atomic import link_or_copy
from plankiln.compiler.cpu.compile import CpuSource, compile_code, lower_cpu, pack_weights
from plankiln.compiler.cpu.toolchain import find_compiler
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.matrix_errors import matrix_errors
from plankiln.compiler.measure import Progress
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.precision import Precision
from plankiln.compiler.stages import code_stage, weights_stage
from plankiln.compiler.store import Entry, Stage, Store
from plankiln.recipe import Engine
from plankiln.target import get_target


@dataclass(frozen=True)
class ReferencePlan:
    """A compiled plan: plan.so and weights.bin lie where it was asked for. kind: what it is of the source."""

    source: CpuSource
    kind: Literal["fp32", "dequantized source"]


def reference_plan(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    engine: Engine,
    store: Store,
    out: Path,
    progress: Progress,
    held: Sequence[Entry] = (),
) -> ReferencePlan:
    """Make the plan, or take it from the store, and link its files into the directory `out`.

    The checkpoint's tensors have been validated. held: entries whose locks the caller holds; one of them may be the
    plan's own (a candidate with fp32 weights). Raises what the stages of a build raise.
    """
    graph = export_decoder(
        spec,
        checkpoint,
        weights=Precision("fp32"),
        kv_cache="fp32",
        max_context=engine.max_context,
        block_size=engine.block_size,
    )
    source = lower_cpu(apply_passes(graph), get_target("cpu-native"), "reference")
    compiler = find_compiler()

    def compile_it(made: Path) -> dict[str, JsonValue]:
        return {"glibc": compile_code(source, compiler, made)}

    def pack_it(made: Path) -> dict[str, JsonValue]:
        pack_weights(source, made, progress)
        return {"matrices": matrix_errors(source.program, checkpoint, checkpoint)}

    code = code_stage(source, compiler)
    weights = weights_stage(source, checkpoint.digest, spec, engine.max_context)
    out.mkdir(exist_ok=True)
    for stage, work in ((code, compile_it), (weights, pack_it)):
        _link(store, stage, work, out, held)
    quantized = checkpoint.quantization is not None or any(
        info.dtype in BLOCK_DTYPES for info in checkpoint.tensors.values()
    )
    return ReferencePlan(source, "dequantized source" if quantized else "fp32")


def _link(
    store: Store, stage: Stage, work: Callable[[Path], dict[str, JsonValue]], out: Path, held: Sequence[Entry]
) -> None:
    with ExitStack() as stack:
        entry = next((entry for entry in held if entry.record.key == stage.key), None)
        if entry is None:
            stack.enter_context(store.lock(stage))
            entry = store.find(stage) or store.add(stage, work)
        for name in entry.record.files:
            link_or_copy(entry.path / name, out / name)
