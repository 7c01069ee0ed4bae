"""Compiled CPU plans for the tests: HF directory in, engine and program out."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.cpu.compile import compile_code, lower_cpu, pack_weights
from plankiln.compiler.cpu.program import Program
from plankiln.compiler.cpu.toolchain import find_compiler
from plankiln.compiler.export import export_decoder
from plankiln.compiler.families import decoder_spec
from plankiln.compiler.formats import Format, KvFormat
from plankiln.compiler.passes import apply_passes
from plankiln.compiler.precision import Precision
from plankiln.manifest import PlanLimits
from plankiln.runtime.cpu import CpuEngine
from plankiln.runtime.engine import Capabilities, Step
from plankiln.target import Target, get_target, missing_flags

STRICT = ("-Wall", "-Wextra", "-Werror")
# GCC's own vector headers look uninitialized once the sanitizers have been woven in.
SANITIZERS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)

VARIANTS = [
    name
    for name in ("cpu-native", "cpu-x86-64-v4", "cpu-x86-64-v3", "cpu-generic")
    if not missing_flags(get_target(name))
]


def strict_flags() -> tuple[str, ...]:
    """Compiler options the tests add: warnings are errors; ASan and UBSan with PLANKILN_SANITIZE=1."""
    return STRICT + (SANITIZERS if os.environ.get("PLANKILN_SANITIZE") == "1" else ())


def fused_graph(
    source: Path, weights: Format | Precision, kv: KvFormat, max_context: int, block_size: int = 16
) -> ir.Model:
    """The fused graph of a checkpoint; the checkpoint stays open for as long as the graph's references live."""
    checkpoint = open_checkpoint(str(source), base=source.parent)
    spec = decoder_spec(checkpoint.config)
    graph = export_decoder(
        spec, checkpoint, weights=weights, max_context=max_context, kv_cache=kv, block_size=block_size
    )
    return apply_passes(graph)


def plan(
    source: Path,
    out: Path,
    *,
    target: str | Target = "cpu-native",
    weights: Format | Precision = "fp32",
    kv: KvFormat = "fp32",
    max_context: int = 128,
    max_tokens: int = 64,
    max_sequences: int = 8,
    block_size: int = 16,
    threads: int = 2,
) -> tuple[Program, CpuEngine]:
    """Build a plan of `source` in `out` and load it."""
    out.mkdir(parents=True, exist_ok=True)
    limits = PlanLimits(
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens,
        max_context=max_context,
        block_size=block_size,
        max_logit_rows=max_tokens,
        kv_memory=1 << 30,
    )
    model = fused_graph(source, weights, kv, max_context, block_size)
    resolved = get_target(target) if isinstance(target, str) else target
    lowered = lower_cpu(model, resolved, source.name)
    compile_code(lowered, find_compiler(), out, strict_flags())
    pack_weights(lowered, out, lambda what, done, total: None)
    return lowered.program, load(out, lowered.program, limits, threads)


def load(out: Path, program: Program, limits: PlanLimits, threads: int) -> CpuEngine:
    """The engine over a compiled directory."""
    capabilities = Capabilities(
        kv="paged",
        kv_dtype=program.kv_format,
        kv_bytes_per_token=program.kv_bytes_per_token,
        block_size=limits.block_size,
        max_sequences=limits.max_sequences,
        max_tokens_per_step=limits.max_tokens_per_step,
        max_context=limits.max_context,
        max_logit_rows=limits.max_logit_rows,
        kv_memory=limits.kv_memory,
        vocab_size=program.vocab,
    )
    weights = np.memmap(out / "weights.bin", np.uint8, "r")
    return CpuEngine(out / "plan.so", weights, capabilities, threads)


def packed_step(
    tokens: list[list[int]], contexts: list[int], tables: list[list[int]], wanted: list[int] | None = None
) -> Step:
    """A step over one chunk per sequence; wanted rows default to all."""
    lengths = [len(chunk) for chunk in tokens]
    width = max(map(len, tables))
    positions = [context + i for context, length in zip(contexts, lengths, strict=True) for i in range(length)]
    rows = list(range(sum(lengths))) if wanted is None else wanted
    return Step(
        input_ids=np.array([token for chunk in tokens for token in chunk], np.int32),
        positions=np.array(positions, np.int32),
        seq_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array(contexts, np.int32),
        block_table=np.array([table + [-1] * (width - len(table)) for table in tables], np.int32),
        logit_rows=np.array(rows, np.int32),
    )


def write_recipe(
    path: Path, source: Path, *, target: str = "cpu-native", format: Format = "fp32", max_context: int = 64
) -> Path:
    """Write a recipe for one target, named after its file, whose small steps split prompts into chunks."""
    engine = f"max_sequences: 8, max_tokens_per_step: 48, max_context: {max_context}, max_logit_rows: 32"
    path.write_text(
        f"name: {path.stem}\n"
        f"model: {{source: {source}}}\n"
        f"quantize: {{weights: {format}, kv_cache: {format}}}\n"
        f"targets: [{target}]\n"
        f"engine: {{{engine}}}\n"
    )
    return path


def quick_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have builds use g++ without optimising, for tests in which the plan need not be fast."""
    script = directory / "quick-g++"
    script.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
