"""roofline.py: what this machine can do at most, the floor that sets for a bundle, and how far above it its steps are.

A decode step reads every weight once and each sequence's cache; a prefill does two operations a weight and token. The
floor is the longer of reading and computing; activations, norms and sampling are not counted. `--measure` times the
bundle in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plankiln.bundle import open_bundle
from plankiln.compiler.cpu.toolchain import find_compiler
from plankiln.console import say, show_error
from plankiln.errors import PlankilnError
from plankiln.manifest import REPORT
from plankiln.runtime.bench.bundle_worker import measured
from plankiln.runtime.bench.driver import Bench
from plankiln.runtime.bench.machine import hardware
from plankiln.runtime.bench.workload import select

DRAM, L3 = 512 << 20, 8 << 20  # bytes read: well beyond the last cache, and within it
STEPS = {"decode-1": (1, 1, 192), "decode-4": (4, 4, 192), "decode-16": (16, 16, 192), "decode-32": (32, 32, 192)}
PREFILL = {"prefill-512": (512, 1, 0)}


@dataclass(frozen=True)
class Limits:
    """By number of threads: bytes a second from memory and from the last cache, operations a second of each kind."""

    dram: dict[int, float]
    l3: dict[int, float]
    operations: dict[str, dict[int, float]]


@dataclass(frozen=True)
class Matrices:
    """bytes and number of weights that a step reads and multiplies, by the kind of its arithmetic."""

    nbytes: int
    weights: dict[str, int]


def library(folder: Path) -> ctypes.CDLL:
    """roofline.cc, compiled for this machine."""
    source, made = Path(__file__).with_suffix(".cc"), folder / "roofline.so"
    flags = ["-O3", "-std=c++17", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*find_compiler().command, *flags, str(source), "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    for name in ("read_bytes", "fp32_operations", "int8_operations", "bf16_operations"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def limits(threads: tuple[int, ...], repetitions: int) -> Limits:
    """The best of some runs: others on the machine only make it slower."""
    data = np.ones(DRAM, np.uint8)
    with tempfile.TemporaryDirectory(prefix="plankiln-") as folder:
        native = library(Path(folder))

        def rate(size: int, rounds: int, n: int) -> float:
            place = ctypes.c_void_p(data.ctypes.data)
            runs = [native.read_bytes(place, ctypes.c_size_t(size), rounds, n) for _ in range(repetitions)]
            return size * rounds / min(runs)

        def operations(name: str, each: int, n: int) -> float:
            rounds = 20_000_000
            runs = [getattr(native, name)(ctypes.c_int64(rounds), n) for _ in range(repetitions)]
            return 12 * each * rounds * n / min(runs) if min(runs) > 0 else 0.0

        kinds = {"int8": ("int8_operations", 128), "bf16": ("bf16_operations", 64), "fp32": ("fp32_operations", 32)}
        return Limits(
            {n: rate(DRAM, 2, n) for n in threads},
            {n: rate(L3, 200, n) for n in threads},
            {kind: {n: operations(*how, n) for n in threads} for kind, how in kinds.items()},
        )


def matrices(bundle: Path) -> Matrices:
    """From the build's report. An embedding counts where it is the head too."""
    rows = json.loads((bundle / REPORT).read_text())["matrices"]
    untied = any(row["name"] == "lm_head.weight" for row in rows)
    weights: dict[str, int] = {}
    nbytes = 0
    for row in rows:
        if untied and row["name"] == "model.embed_tokens.weight":
            continue
        kind, bits = arithmetic(row["format"])
        weights[kind] = weights.get(kind, 0) + round(row["bytes"] * 8 / bits)
        nbytes += row["bytes"]
    return Matrices(nbytes, weights)


def arithmetic(form: str) -> tuple[str, float]:
    """What a format is multiplied in, and the bits of a weight, scales included."""
    if found := re.fullmatch(r"int(4|8)(\+min)? g(\d+)", form):
        return "int8", int(found[1]) + (32 if found[2] else 16) / int(found[3])
    return {"int8 per channel": ("int8", 8.0), "fp8": ("fp32", 8.0), "bf16": ("bf16", 16.0), "fp32": ("fp32", 32.0)}[
        form
    ]


def floor(found: Matrices, cache: int, limit: Limits, threads: int, step: tuple[int, int, int]) -> float:
    """Seconds of one step of (new tokens, sequences, context). cache: bytes a token."""
    tokens, sequences, context = step
    small = found.nbytes <= 2 * L3
    reading = (found.nbytes + sequences * context * cache) / (limit.l3 if small else limit.dram)[threads]
    computing = sum(
        2 * n * tokens / (limit.operations[kind][threads] or limit.operations["fp32"][threads])
        for kind, n in found.weights.items()
    )
    return max(reading, computing)


def report(bundle: Path, limit: Limits, repetitions: int) -> None:
    """The floors of one bundle and, with repetitions, what it takes."""
    opened = open_bundle(bundle)
    found = matrices(opened.path)
    cache = opened.manifest.kv_bytes_per_token
    times: dict[str, float] = {}
    if repetitions:
        subject = measured(opened.path)
        bench = Bench(vocab=subject.vocab, text=subject.text, repetitions=repetitions, say=say, strict=False)
        for row in bench.run([subject.contender], select([*STEPS, *PREFILL]), [1]):
            key = "prefill_per_cpu_s" if row["bench"] in PREFILL else "decode_per_cpu_s"
            if "median" in row:
                times[row["bench"]] = (STEPS | PREFILL)[row["bench"]][0] / row["median"][key]
    print(f"\n{opened.manifest.name}: {found.nbytes / 1e6:.1f} MB of matrices a step, {cache} bytes of cache a token\n")
    print("| step, one thread | floor, ms | measured, ms | of the floor's speed |\n| --- | ---: | ---: | ---: |")
    for name, step in (STEPS | PREFILL).items():
        least = floor(found, cache, limit, 1, step)
        taken = times.get(name)
        shown = f"{taken * 1e3:.2f} | {least / taken:.0%}" if taken else "– | –"
        print(f"| {name} | {least * 1e3:.2f} | {shown} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--repetitions", type=int, default=3, help="of the machine's limits")
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="time the bundles too, N times each")
    options = parser.parse_args()
    limit = limits((1, 2), options.repetitions)
    print(f"{hardware()['cpu']}\n\n| limit | one thread | two threads |\n| --- | ---: | ---: |")
    print(f"| memory read, GB/s | {limit.dram[1] / 1e9:.1f} | {limit.dram[2] / 1e9:.1f} |")
    print(f"| last cache read, GB/s | {limit.l3[1] / 1e9:.1f} | {limit.l3[2] / 1e9:.1f} |")
    for kind, rates in limit.operations.items():
        print(f"| {kind}, G operations/s | {rates[1] / 1e9:.0f} | {rates[2] / 1e9:.0f} |")
    try:
        for bundle in options.bundles:
            report(bundle, limit, options.measure)
    except PlankilnError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
