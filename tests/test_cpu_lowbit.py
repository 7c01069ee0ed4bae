"""Low-bit plans: every format and instruction set against the numpy twin, bits whatever the batch, GGUF blocks kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny_gguf, write_tiny_hf
from plans import VARIANTS, packed_step, plan
from program_reference import ReferencePlan

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.cpu.pack import packed, weight_offsets
from plankiln.compiler.precision import Precision
from plankiln.errors import CheckpointError, ExportError
from plankiln.quantize.formats import quantize_activations
from plankiln.runtime.cpu import CpuEngine

SEED = int(os.environ["PLANKILN_SEED"])
BLOCKS = 24
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 8, "tie_word_embeddings": True, **HEADS}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, **HEADS}
PRECISIONS = {
    "int4 g32": Precision("int4_rtn"),
    "int4+min g32": Precision("int4_rtn", minimum=True),
    "int4 g64": Precision("int4_rtn", group=64),
    "int4+min g128": Precision("int4_rtn", group=128, minimum=True),
    "int8 g32": Precision("int8_rtn"),
    "int8 g128": Precision("int8_rtn", group=128),
    "int4+min g32 reference": Precision("int4_rtn", minimum=True, activations="declared"),
    "int8 g64 reference": Precision("int8_rtn", group=64, activations="declared"),
}
CASES = [
    (name, target)
    for name in PRECISIONS
    for target in VARIANTS
    if target == VARIANTS[0] or name in ("int4+min g32", "int8 g128", "int4+min g32 reference")
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A tiny model whose widths are multiples of 32, and one of 128."""
    root = tmp_path_factory.mktemp("models")
    return {32: write_tiny_hf(root / "small", "llama", **SMALL), 128: write_tiny_hf(root / "wide", "qwen2", **WIDE)}


def ragged_steps(vocab: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    free = [int(block) for block in rng.permutation(BLOCKS)]
    tables = [[free.pop() for _ in range(5)] for _ in range(4)]
    contexts, steps = [0, 0, 0, 0], []
    for lengths in ([17, 1, 0, 30], [1, 15, 3, 1], [13, 16, 1, 33], [1, 1, 1, 1]):
        tokens = [[int(t) for t in rng.integers(0, vocab, n)] for n in lengths]
        steps.append(packed_step(tokens, contexts, tables))
        contexts = [context + n for context, n in zip(contexts, lengths, strict=True)]
    return steps


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_ragged_batch_equals_the_numpy_twin(sources: dict[int, Path], tmp_path: Path, name: str, target: str) -> None:
    precision = PRECISIONS[name]
    source = sources[32 if precision.group == 32 else 128]
    program, engine = plan(source, tmp_path, target=target, weights=precision, kv="fp32")
    engine.allocate_kv(BLOCKS)
    twin, unrounded = ReferencePlan(program, BLOCKS, 16), ReferencePlan(program, BLOCKS, 16, int8=False)
    for step in ragged_steps(program.vocab, SEED):
        got, want, exact = engine.execute(step), twin.execute(step), unrounded.execute(step)
        if precision.activations == "declared":
            assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
        else:
            # A value near a rounding edge may round the other way, and then others after it: what two roundings of one
            # model differ by is at most what each differs from the unrounded one, independently.
            assert rms(got - want) <= np.sqrt(2) * rms(want - exact)
    engine.close()


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", ["int4+min g32", "int8 g128", "int4 g64"])
def test_bits_depend_on_neither_batch_nor_chunks_nor_threads(
    sources: dict[int, Path], tmp_path: Path, name: str
) -> None:
    precision = PRECISIONS[name]
    rng = np.random.default_rng(SEED)
    sequences = [[int(t) for t in rng.integers(0, 33, n)] for n in (70, 5, 33, *rng.integers(1, 40, 29))]
    blocks, source = 5 * len(sequences), sources[32 if precision.group == 32 else 128]
    limits = {"max_tokens": 1024, "max_sequences": len(sequences)}
    _, engine = plan(source, tmp_path, weights=precision, kv="bf16", threads=1, **limits)
    alone = []
    for sequence in sequences:
        engine.allocate_kv(blocks)
        alone.append(engine.execute(packed_step([sequence], [0], [list(range(5))])).copy())
    for threads, chunk in ((1, 1), (2, 7), (2, 32)):
        engine.close()
        weights = np.memmap(tmp_path / "weights.bin", np.uint8, "r")
        engine = CpuEngine(tmp_path / "plan.so", weights, engine.capabilities, threads)
        engine.allocate_kv(blocks)
        tables = [[int(b) for b in part] for part in np.split(rng.permutation(blocks), len(sequences))]
        done = [0] * len(sequences)
        while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
            chunks = [s[d : d + chunk] for d, s in zip(done, sequences, strict=True)]
            logits, start = engine.execute(packed_step(chunks, done, tables)), 0
            for i, part in enumerate(chunks):
                same = np.array_equal(logits[start : start + len(part)], alone[i][done[i] : done[i] + len(part)])
                assert same, (threads, chunk, i)
                start += len(part)
                done[i] += len(part)
    engine.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_files_blocks_are_kept_bit_for_bit(sources: dict[int, Path], tmp_path: Path, kind: str) -> None:
    source = write_tiny_gguf(tmp_path / "model.gguf", sources[32], kind=kind)
    program, engine = plan(source, tmp_path / "keep", weights=Precision("keep", activations="declared"), kv="fp32")
    floats, exact = plan(source, tmp_path / "exact", weights="fp32", kv="fp32")
    steps = ragged_steps(program.vocab, SEED)
    engine.allocate_kv(BLOCKS)
    exact.allocate_kv(BLOCKS)
    for step in steps:
        got, want = engine.execute(step).copy(), exact.execute(step)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
    kept = [w for w in program.weights if w.layout == "tiles"]
    assert all(not isinstance(w.format, str) for w in kept)
    for weight in kept:
        twin = next(w for w in floats.weights if w.parts == weight.parts)
        assert np.array_equal(weight.read().dequantize(), twin.read())  # type: ignore[union-attr]
        assert packed(weight).nbytes == weight.nbytes


@pytest.mark.parametrize(
    "kinds",
    [
        {"attn_v": "Q8_0"},
        {"attn_v": "Q8_0", "attn_q": "Q5_0", "attn_k": "Q5_0"},
        {"ffn_up": "Q8_0", "ffn_down": "Q4_1", "token_embd": "F16"},
    ],
    ids=str,
)
def test_keep_takes_files_that_mix_formats(sources: dict[int, Path], tmp_path: Path, kinds: dict[str, str]) -> None:
    """Matrices that are joined but differ in format stay as they are, side by side."""
    source = write_tiny_gguf(tmp_path / "model.gguf", sources[32], kind="Q4_0", kinds=kinds)
    program, engine = plan(source, tmp_path / "keep", weights=Precision("keep", activations="declared"), kv="fp32")
    formats = {str(w.format) for w in program.weights if w.layout == "tiles"}
    assert len(formats) >= 2
    engine.allocate_kv(BLOCKS)
    twin = ReferencePlan(program, BLOCKS, 16)
    for step in ragged_steps(program.vocab, SEED):
        got, want = engine.execute(step), twin.execute(step)
        assert np.abs(got - want).max() <= 3e-2 * np.abs(want).max()


def test_a_damaged_scale_of_a_kept_block_is_refused(sources: dict[int, Path], tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "model.gguf", sources[32], kind="Q8_0")
    reader = open_checkpoint(str(source), base=tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    block = bytes(reader.read_blocks(name)[3, :34])
    data = source.read_bytes()
    assert data.count(block) == 1
    source.write_bytes(data.replace(block, b"\x00\x7e" + block[2:]))  # a NaN scale
    with pytest.raises(CheckpointError, match=f"non-finite values in tensor `{name}`"):
        plan(source, tmp_path / "keep", weights=Precision("keep"))


def test_activations_of_almost_nothing_stay_finite(sources: dict[int, Path], tmp_path: Path) -> None:
    q, scale = quantize_activations(np.full((1, 32), 1e-38, np.float32), 32)
    assert not q.any()
    assert np.isfinite(scale).all()
    program, engine = plan(sources[32], tmp_path, weights=Precision("int8_rtn"), kv="fp32")
    norm = next(w for w in program.weights if w.name == "model.norm.weight")
    offset = weight_offsets(program)[0][norm]
    weights = np.array(engine._weights)
    weights[offset : offset + norm.nbytes] = np.full(norm.n, 1e-38, np.float32).view(np.uint8)
    aligned = np.empty(weights.nbytes + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    aligned[start : start + weights.nbytes] = weights
    tiny = CpuEngine(tmp_path / "plan.so", aligned[start : start + weights.nbytes], engine.capabilities, 2)
    tiny.allocate_kv(1)
    assert np.isfinite(tiny.execute(packed_step([[1, 2, 3]], [0], [[0]]))).all()


def test_a_width_that_is_not_whole_groups_is_refused_with_those_that_fit(
    sources: dict[int, Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as caught:
        plan(sources[32], tmp_path, weights=Precision("int4_rtn", group=64))
    where = "`model.layers.0.mlp.down_proj.weight` and 1 other matrices have 160 columns, not whole groups of 64"
    assert where in str(caught.value)
    assert len(caught.value.problems) == 1
    assert "`quantize.group_size` may be 32" in str(caught.value)
