"""The CPU backend: lower → plan memory → emit, then compile the text, and pack the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from plankiln.compiler.cpu.emit import emit
from plankiln.compiler.cpu.lower import lower
from plankiln.compiler.cpu.memory import plan_memory
from plankiln.compiler.cpu.pack import weight_offsets, write_weights
from plankiln.compiler.cpu.program import Int8, Program
from plankiln.compiler.cpu.toolchain import Compiler, compile_plan, needed_glibc
from plankiln.compiler.formats import Element
from plankiln.quantize.formats import BlockFormat, Fp8Format
from plankiln.target import Target

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CpuSource:
    """A lowered program and the C++ text of its plan: all that compiling and packing start from."""

    program: Program
    target: Target
    text: str


@dataclass(frozen=True)
class CpuPlan:
    """What the manifest says of a finished CPU plan."""

    kv_bytes_per_token: int
    bytes_per_format: dict[str, int]
    weights: str
    activations: str
    kv_cache: str
    compiler: str
    glibc: str
    flags: tuple[str, ...]


def lower_cpu(model: ir.Model, target: Target, name: str) -> CpuSource:
    """Lower a fused graph for one CPU target; no weight is read. Raises ExportError (no kernel for a node).

    Of the run-time limits only max_context is compiled in, as the length of the RoPE tables.
    """
    program = lower(model, name)
    text = emit(program, plan_memory(program), *weight_offsets(program), target.name)
    return CpuSource(program, target, text)


def compile_code(source: CpuSource, compiler: Compiler, out_dir: Path, compiler_flags: tuple[str, ...] = ()) -> str:
    """Write plan.cc and plan.so to out_dir; returns the oldest glibc that plan.so runs with.

    compiler_flags are added to the compiler's. Raises ToolchainError when the compiler fails.
    """
    text, plan = out_dir / "plan.cc", out_dir / "plan.so"
    text.write_text(source.text)
    compile_plan(compiler, text, plan, source.target, compiler_flags)
    return needed_glibc(plan)


def pack_weights(source: CpuSource, out_dir: Path, progress: Progress) -> None:
    """Write weights.bin to out_dir, one tensor in memory at a time; progress("weights", bytes done, bytes in all).

    Raises CheckpointError (unreadable or non-finite weights).
    """
    write_weights(source.program, out_dir / "weights.bin", lambda done, total: progress("weights", done, total))


def describe_plan(source: CpuSource, compiler: Compiler, glibc: str) -> CpuPlan:
    """What the manifest says of the plan."""
    weights, activations = _formats(source.program)
    return CpuPlan(
        kv_bytes_per_token=source.program.kv_bytes_per_token,
        bytes_per_format=_bytes_per_format(source.program),
        weights=weights,
        activations=activations,
        kv_cache=source.program.kv_format,
        compiler=compiler.version,
        glibc=glibc,
        flags=source.target.flags,
    )


_SHORT: dict[Element, str] = {"float32": "fp32", "bfloat16": "bf16"}


def _name(form: Element | BlockFormat | Fp8Format | Int8) -> str:
    if isinstance(form, BlockFormat | Fp8Format):
        return form.name
    return f"int8 g{form.group}" if isinstance(form, Int8) else _SHORT[form]


def _formats(program: Program) -> tuple[str, str]:
    """Weight formats of the linear layers, and the arithmetic of their activations."""
    linears = [call for call in program.calls if call.kernel == "linear"]
    weights = {_name(call.weights[0].format) for call in linears}
    rounded = {call.write[0] for call in program.calls if call.kernel == "round_e4m3_rows"}
    inputs = (call.read[0] for call in linears)
    activations = {"fp8" if buffer in rounded else _name(buffer.element) for buffer in inputs}
    return " + ".join(sorted(weights)), " + ".join(sorted(activations))


def _bytes_per_format(program: Program) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for weight in program.weights:
        sizes[_name(weight.format)] = sizes.get(_name(weight.format), 0) + weight.nbytes
    return sizes
