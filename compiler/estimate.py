"""What a build will take, by arithmetic, and whether this machine has it."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plankiln.compiler.cpu.pack import weight_offsets
from plankiln.compiler.cpu.program import Program, Weight
from plankiln.compiler.measure import process_bytes
from plankiln.compiler.weights import Slice, TensorHeader
from plankiln.errors import BuildError, Problem
from plankiln.host import memory, readable_size
from plankiln.quantize.formats import GGUF_FORMATS, BlockFormat

COMPILER_BYTES = 400 << 20
_CODE_BYTES = 4 << 20
# Bytes per element that packing one matrix holds at its peak: rows as read, in the format, padded, and in tiles.
_FLOATS, _KEPT_BLOCKS, _ROUNDED_BLOCKS = 12, 7, 18
_PACKING_BASE = 16 << 20


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build needs beyond what is in use already: packing in this process, the compiler in another (never
    at the same time), files in the store, and the files of a bundle on another disk than the store's."""

    packing: int
    compiler: int
    store: int
    out: int

    def check(self, store: Path, out: Path) -> None:
        """Raises BuildError unless memory and disks have what is needed; the paths need not exist yet."""
        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        free = memory().available
        problems = []
        for what, need, used in (
            ("packing the weights", self.packing, process_bytes("VmSize")),
            ("compiling the plan", self.compiler, 0),
        ):
            left = [] if free is None else [free]
            if address_space != resource.RLIM_INFINITY:
                left.append(max(0, address_space - used))
            if need > min(left, default=need):
                hint = "close other programs, or raise the limit on this process (`ulimit -v`, control group)"
                problems.append(_problem(what, need, "of memory", min(left), hint))
        for place, need in ((store, self.store), (out, self.out)):
            left_there = shutil.disk_usage(_existing(place)).free
            if need > left_there:
                hint = (
                    "free some space (`plankiln store gc --limit SIZE`), or choose `--out` and PLANKILN_STORE elsewhere"
                )
                problems.append(_problem("the build", need, f"on the disk of `{place}`", left_there, hint))
        if problems:
            raise BuildError(problems)


def estimate(
    program: Program, tensors: Mapping[str, TensorHeader], *, code: bool, weights: bool, linked: bool, reference: bool
) -> Estimate:
    """What building a program takes when its code and weights have to be made (`code`, `weights`).

    linked: the bundle shares the store's files. reference: an fp32 plan is made for the gate (it may be there already).
    """
    total = weight_offsets(program)[1]
    compared = sum(4 * weight.n * weight.k for weight in program.weights) + _CODE_BYTES
    return Estimate(
        packing=max((_packing_bytes(weight, tensors) for weight in program.weights), default=0) if weights else 0,
        compiler=COMPILER_BYTES if code else 0,
        store=sum(((total if weights else 0), (_CODE_BYTES if code else 0), (compared if reference else 0))),
        out=_CODE_BYTES if linked else total + _CODE_BYTES,
    )


def same_disk(one: Path, other: Path) -> bool:
    """Whether two places, which need not exist yet, lie on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _packing_bytes(weight: Weight, tensors: Mapping[str, TensorHeader]) -> int:
    per_element = _FLOATS
    if isinstance(weight.format, BlockFormat):
        stored = {tensors[part.tensor].dtype for part in weight.parts if isinstance(part, Slice)}
        kept = all(GGUF_FORMATS.get(dtype) == weight.format for dtype in stored)
        per_element = _KEPT_BLOCKS if kept else _ROUNDED_BLOCKS
    return weight.n * weight.k * per_element + _PACKING_BASE


def _problem(what: str, need: int, of: str, left: int, hint: str) -> Problem:
    return Problem(f"{what} needs about {readable_size(need)} {of}, and {readable_size(left)} are available", hint=hint)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path
