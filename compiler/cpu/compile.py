"""The CPU backend in one call: lower → plan memory → emit → compile, and pack the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from plankiln.compiler.cpu.emit import emit
from plankiln.compiler.cpu.lower import lower
from plankiln.compiler.cpu.memory import plan_memory
from plankiln.compiler.cpu.pack import weight_offsets, write_weights
from plankiln.compiler.cpu.program import Program
from plankiln.compiler.cpu.toolchain import compile_plan, find_compiler, needed_glibc
from plankiln.target import Target

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CpuPlan:
    """What a finished CPU compile left in its directory, and what the manifest says of it."""

    files: tuple[str, ...]
    kv_bytes_per_token: int
    bytes_per_format: dict[str, int]
    weights: str
    activations: str
    kv_cache: str
    compiler: str
    glibc: str
    flags: tuple[str, ...]


def compile_cpu(
    model: ir.Model,
    target: Target,
    out_dir: Path,
    name: str,
    progress: Progress | None = None,
    compiler_flags: tuple[str, ...] = (),
) -> CpuPlan:
    """Compile a fused graph for one CPU target into out_dir: plan.so, plan.cc, weights.bin.

    progress(what, done, total) is called as the work goes on; compiler_flags are added to the compiler's. Of the
    run-time limits only max_context is compiled in, as the length of the RoPE tables. Raises ExportError (no kernel for
    a node), ToolchainError (no compiler, or it failed), CheckpointError (unreadable or non-finite weights).
    """
    program = lower(model, name)
    compiler = find_compiler()
    offsets, weight_bytes = weight_offsets(program)
    source, plan = out_dir / "plan.cc", out_dir / "plan.so"
    source.write_text(emit(program, plan_memory(program), offsets, weight_bytes, target.name))
    if progress:
        progress("compiling the plan", 0, 1)
    compile_plan(compiler, source, plan, target, compiler_flags)
    write_weights(program, out_dir / "weights.bin", progress and (lambda done, total: progress("weights", done, total)))
    weights, activations = _formats(program)
    return CpuPlan(
        files=("plan.so", "plan.cc", "weights.bin"),
        kv_bytes_per_token=program.kv_bytes_per_token,
        bytes_per_format=_bytes_per_format(program),
        weights=weights,
        activations=activations,
        kv_cache=_SHORT[program.kv_element],
        compiler=compiler.version,
        glibc=needed_glibc(plan),
        flags=target.flags,
    )


_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def _formats(program: Program) -> tuple[str, str]:
    """Weight format and activation arithmetic of the linear layers."""
    elements = {weight.element for call in program.calls if call.kernel == "linear" for weight in call.weights}
    names = sorted(_SHORT[element] for element in elements)
    return "+".join(names), "+".join(names)


def _bytes_per_format(program: Program) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for weight in program.weights:
        name = _SHORT[weight.element]
        sizes[name] = sizes.get(name, 0) + weight.nbytes
    return sizes
