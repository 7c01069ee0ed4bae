"""KV caches of one byte a number: the compiled plan against its numpy twin, and e4m3 against ml_dtypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_tiny_hf
from plans import VARIANTS, packed_step, plan, strict_flags
from program_reference import ReferencePlan
from quantized_checkpoints import write_quantized_hf
from test_cpu_plan import again, poison

from plankiln.compiler.cpu.toolchain import FLAGS, find_compiler
from plankiln.compiler.formats import KvFormat, kv_row_bytes
from plankiln.compiler.precision import Precision
from plankiln.errors import ExportError
from plankiln.quantize.formats import round_e4m3
from plankiln.target import get_target

BLOCKS = 24
SEED = int(os.environ["PLANKILN_SEED"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": 21, "head_dim": 20, "hidden_size": 70}),
    "mqa": ("qwen3", {"num_key_value_heads": 1, "num_attention_heads": 11, "head_dim": 8}),
    "wide": ("llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}),
}
KINDS: tuple[KvFormat, ...] = ("int8", "fp8_cast", "fp8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: write_tiny_hf(root / name, family, **keys) for name, (family, keys) in MODELS.items()}
    return made | {"scales": write_quantized_hf(root / "scales", "fp8", kv_fp8=True)}


CASES = [
    (name, kv, target)
    for name in MODELS
    for kv in KINDS
    for target in VARIANTS
    if kv != "fp8" and (target == VARIANTS[0] or name == "window")
] + [("scales", "fp8", target) for target in VARIANTS]


def open_plan(sources: dict[str, Path], out: Path, name: str, kv: KvFormat, **more: Any) -> tuple[Any, Any]:
    weights = Precision("keep", activations="declared") if name == "scales" else "fp32"
    return plan(sources[name], out, weights=weights, kv=kv, **more)


@pytest.mark.parametrize(("name", "kv", "target"), CASES)
def test_a_ragged_batch_equals_the_numpy_twin(
    sources: dict[str, Path], tmp_path: Path, name: str, kv: KvFormat, target: str
) -> None:
    """Most steps agree to float32's rounding; a number near the edge of a step of the cache may fall on either side,
    which moves one of some hundred terms by a step: 1/254 of the largest (int8), 1/16 of itself (e4m3)."""
    program, engine = open_plan(sources, tmp_path, name, kv, target=target)
    engine.allocate_kv(BLOCKS)
    poison(engine)
    twin = ReferencePlan(program, BLOCKS, 16)
    rng = np.random.default_rng(SEED)
    free = [int(block) for block in rng.permutation(BLOCKS)]
    tables = [[free.pop() for _ in range(5)] for _ in range(4)]
    contexts = [0, 0, 0, 0]
    errors = []
    for lengths in ([17, 1, 0, 30], [1, 15, 3, 1], [13, 16, 1, 33], [1, 1, 1, 1]):
        tokens = [[int(t) for t in rng.integers(0, program.vocab, n)] for n in lengths]
        step = packed_step(tokens, contexts, tables)
        got, want = engine.execute(step), twin.execute(step)
        errors += list(np.abs(got - want).max(1) / np.abs(want).max())
        contexts = [context + n for context, n in zip(contexts, lengths, strict=True)]
    engine.close()
    assert np.median(errors) <= 1e-4
    assert max(errors) <= (0.02 if kv == "int8" else 0.1)


@pytest.mark.parametrize(("name", "kv"), [("window", "int8"), ("mqa", "fp8_cast"), ("scales", "fp8")])
def test_bits_depend_on_neither_chunks_nor_threads(
    sources: dict[str, Path], tmp_path: Path, name: str, kv: KvFormat
) -> None:
    program, engine = open_plan(sources, tmp_path, name, kv, max_tokens=128, threads=1)
    rng = np.random.default_rng(SEED)
    sequences = [[int(t) for t in rng.integers(0, program.vocab, n)] for n in (70, 5, 33)]
    alone = []
    for sequence in sequences:
        engine.allocate_kv(15)
        poison(engine)
        parts = [sequence[i : i + 64] for i in range(0, len(sequence), 64)]
        rows = [engine.execute(packed_step([p], [64 * i], [list(range(5))])).copy() for i, p in enumerate(parts)]
        alone.append(np.concatenate(rows))
    for threads, chunk in ((1, 1), (2, 7), (3, 32)):
        engine.close()
        engine = again(engine, tmp_path, threads)
        engine.allocate_kv(15)
        poison(engine)
        tables = [[int(b) for b in part] for part in np.split(rng.permutation(15), 3)]
        done, rows = [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
        while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
            chunks = [s[d : d + chunk] for d, s in zip(done, sequences, strict=True)]
            logits = engine.execute(packed_step(chunks, done, tables))
            ends = np.cumsum([0, *map(len, chunks)])
            for i, part in enumerate(chunks):
                rows[i].append(logits[ends[i] : ends[i + 1]].copy())
                done[i] += len(part)
        for i, single in enumerate(alone):
            assert np.array_equal(np.concatenate(rows[i]), single), (threads, chunk, i)
    engine.close()


@pytest.mark.parametrize("kv", get_args(KvFormat))
def test_the_cache_takes_what_the_capabilities_say(sources: dict[str, Path], tmp_path: Path, kv: KvFormat) -> None:
    name = "scales" if kv == "fp8" else "wide"
    program, engine = open_plan(sources, tmp_path, name, kv)
    engine.allocate_kv(3)
    taken = sum(array.nbytes for array in engine._cache)
    row = {"fp32": 4 * program.head_dim, "bf16": 2 * program.head_dim, "int8": program.head_dim + 4}
    assert kv_row_bytes(kv, program.head_dim) == row.get(kv, program.head_dim)
    assert taken == 3 * 16 * engine.capabilities.kv_bytes_per_token
    assert engine.capabilities.kv_bytes_per_token == (
        2 * program.layers * program.kv_heads * kv_row_bytes(kv, program.head_dim)
    )
    engine.close()


def test_fp8_without_scales_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no KV cache scales"):
        open_plan(sources, tmp_path, "wide", "fp8")


E4M3 = """
#include "e4m3.h"
extern "C" __attribute__((visibility("default"))) void rounded(const float* x, uint8_t* q, float* back, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    store_e4m3(reinterpret_cast<e4m3*>(q + i), load(x + i));
    store(back + i, load(reinterpret_cast<const e4m3*>(q + i)));
  }
}
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_e4m3_rounds_as_ml_dtypes_does(tmp_path: Path, variant: str) -> None:
    """Every code, both neighbours of every tie between two codes and the tie itself, subnormals, saturation and NaN."""
    source = tmp_path / "e4m3.cc"
    source.write_text(E4M3)
    headers = Path(__file__).parents[1] / "plugins" / "cpu"
    flags = [*FLAGS, *get_target(variant).march, *strict_flags(), f"-I{headers}"]
    command = [*find_compiler().command, "-O2", *flags]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "e4m3.so")], check=True)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    ties = (finite[1:] + finite[:-1]) / 2
    random = np.random.default_rng(SEED).standard_normal(10_000).astype(np.float32) * 10 ** np.random.default_rng(
        SEED + 1
    ).uniform(-5, 4, 10_000).astype(np.float32)
    edge = np.array([0.0, -0.0, 448, 464, 465, -1e30, np.inf, -np.inf, 1e-40], np.float32)
    x = np.concatenate([finite, ties, np.nextafter(ties, 1e9), np.nextafter(ties, -1e9), random, edge])
    x = np.concatenate([x, np.zeros(-x.size % 16, np.float32)]).astype(np.float32)
    q, back = np.full(x.size, 0xAA, np.uint8), np.full(x.size, np.nan, np.float32)
    library = ctypes.CDLL(str(tmp_path / "e4m3.so"))
    library.rounded(*(ctypes.c_void_p(a.ctypes.data) for a in (x, q, back)), ctypes.c_int64(x.size))
    want = round_e4m3(x)
    np.testing.assert_array_equal(q, want.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    np.testing.assert_array_equal(back, want)
    nan = np.full(16, np.nan, np.float32)
    library.rounded(*(ctypes.c_void_p(a.ctypes.data) for a in (nan, q, back)), ctypes.c_int64(16))
    assert np.isnan(back[:16]).all()
