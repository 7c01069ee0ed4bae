"""Compiled plans against the numpy twin of their program: every variant that runs here, odd sizes, poisoned memory."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny_hf
from plans import VARIANTS, Format, packed_step, plan
from program_reference import ReferencePlan

from plankiln.errors import BundleError, EngineError
from plankiln.runtime.cpu import CpuEngine

BLOCKS = 24
SEED = int(os.environ["PLANKILN_SEED"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "intermediate_size": 77, "num_hidden_layers": 3}),
    "window": ("mistral", {"sliding_window": 21, "head_dim": 20, "hidden_size": 70}),
    "bias": ("qwen2", {"vocab_size": 259, "num_key_value_heads": 1}),
    "mqa": ("qwen3", {"num_key_value_heads": 1, "num_attention_heads": 11, "head_dim": 8}),
    "qk-norm": ("qwen3", {"head_dim": 32, "num_attention_heads": 12, "num_key_value_heads": 12}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_hf(root / name, family, **keys) for name, (family, keys) in MODELS.items()}


def poison(engine: CpuEngine) -> None:
    """NaN in the whole cache, arena and logits: whatever is read before it is written shows."""
    for array in engine._cache:
        array[:] = 0xFF
    engine._arena[:] = 0xFF
    engine._logits[:] = np.nan


CASES = [
    (name, weights, target)
    for name in MODELS
    for weights in ("fp32", "bf16")
    for target in VARIANTS
    if target == VARIANTS[0] or name == "window" or (name, weights) == ("llama", "bf16")
]


@pytest.mark.parametrize(("name", "weights", "target"), CASES)
def test_a_ragged_batch_equals_the_numpy_twin(
    sources: dict[str, Path], tmp_path: Path, name: str, weights: Format, target: str
) -> None:
    program, engine = plan(sources[name], tmp_path, target=target, weights=weights, kv=weights)
    engine.allocate_kv(BLOCKS)
    poison(engine)
    twin = ReferencePlan(program, BLOCKS, 16)
    rng = np.random.default_rng(SEED)
    free = [int(block) for block in rng.permutation(BLOCKS)]
    tables = [[free.pop() for _ in range(5)] for _ in range(4)]
    contexts = [0, 0, 0, 0]
    for lengths in ([17, 1, 0, 30], [1, 15, 3, 1], [13, 16, 1, 33], [1, 1, 1, 1]):
        tokens = [[int(t) for t in rng.integers(0, program.vocab, n)] for n in lengths]
        step = packed_step(tokens, contexts, tables)
        got, want = engine.execute(step), twin.execute(step)
        # fp32: rounding over sums of at most a few hundred terms. bf16: a value near a rounding edge may round the
        # other way, one part in 2^9 of a term, in each of the layers' inputs.
        tolerance = 2e-5 if weights == "fp32" else 3e-2
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        contexts = [context + n for context, n in zip(contexts, lengths, strict=True)]
    engine.close()


@pytest.mark.parametrize(
    ("name", "weights"), [("llama", "fp32"), ("llama", "bf16"), ("window", "bf16"), ("mqa", "fp32")]
)
def test_bits_depend_on_neither_batch_nor_chunks_nor_threads(
    sources: dict[str, Path], tmp_path: Path, name: str, weights: Format
) -> None:
    rng = np.random.default_rng(SEED)
    sequences = [[int(t) for t in rng.integers(0, 33, n)] for n in (70, 5, 33, 64, *rng.integers(1, 50, 28))]
    blocks = 5 * len(sequences)
    limits = {"max_tokens": 1024, "max_sequences": len(sequences)}
    _, engine = plan(sources[name], tmp_path, weights=weights, kv=weights, threads=1, **limits)
    alone = []
    for sequence in sequences:
        engine.allocate_kv(blocks)
        poison(engine)
        alone.append(engine.execute(packed_step([sequence], [0], [list(range(5))])).copy())
    for threads, chunk in ((1, 1), (2, 7), (3, 16), (2, 32)):
        engine.close()
        engine = again(engine, tmp_path, threads)
        engine.allocate_kv(blocks)
        poison(engine)
        tables = [[int(b) for b in part] for part in np.split(rng.permutation(blocks), len(sequences))]
        done = [0] * len(sequences)
        rows: list[list[Any]] = [[] for _ in sequences]
        while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
            chunks = [s[d : d + chunk] for d, s in zip(done, sequences, strict=True)]
            logits = engine.execute(packed_step(chunks, done, tables))
            start = 0
            for i, part in enumerate(chunks):
                rows[i].append(logits[start : start + len(part)].copy())
                start += len(part)
                done[i] += len(part)
        for i, single in enumerate(alone):
            assert np.array_equal(np.concatenate(rows[i]), single), (threads, chunk, i)
    engine.close()


def again(engine: CpuEngine, out: Path, threads: int) -> CpuEngine:
    """The same plan in a new engine."""
    return CpuEngine(out / "plan.so", np.memmap(out / "weights.bin", np.uint8, "r"), engine.capabilities, threads)


def test_a_step_may_want_no_logits_and_engines_share_one_pool(sources: dict[str, Path], tmp_path: Path) -> None:
    _, engine = plan(sources["llama"], tmp_path, threads=2)
    other = again(engine, tmp_path, 2)
    with pytest.raises(EngineError, match="`threads` is 3, but the process's pool has 2 and is in use"):
        again(engine, tmp_path, 3)
    for bad in (0, -1, 1000, "a", 1.5, True):
        with pytest.raises(EngineError, match=f"`threads` must be a whole number, 1 … 256, not `{bad!r}`"):
            again(engine, tmp_path, bad)  # type: ignore[arg-type]
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, 33, 20)]
    results: dict[int, Any] = {}

    def generate(which: int, one: CpuEngine) -> None:
        one.allocate_kv(2)
        for _ in range(50):
            assert one.execute(packed_step([prompt], [0], [[0, 1]], [])).shape == (0, 33)
            results[which] = one.execute(packed_step([[7]], [20], [[0, 1]])).copy()

    workers = [Thread(target=generate, args=pair) for pair in enumerate((engine, other))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert np.array_equal(results[0], results[1])


def test_a_forked_child_starts_its_own_threads(sources: dict[str, Path], tmp_path: Path) -> None:
    _, engine = plan(sources["llama"], tmp_path, threads=2)
    engine.allocate_kv(1)
    expected = engine.execute(packed_step([[1, 2, 3]], [0], [[0]])).copy()
    child = os.fork()
    if not child:
        signal.alarm(30)
        same = np.array_equal(engine.execute(packed_step([[1, 2, 3]], [0], [[0]])), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_limits_that_the_plan_was_not_compiled_for_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    _, engine = plan(sources["llama"], tmp_path)
    for change in ({"vocab_size": 20}, {"max_context": 4096}, {"kv_bytes_per_token": 1}, {"block_size": 8}):
        with pytest.raises(BundleError, match="where the compiled plan has"):
            CpuEngine(tmp_path / "plan.so", engine._weights, replace(engine.capabilities, **change), 2)


def test_copied_blocks_serve_like_the_originals(sources: dict[str, Path], tmp_path: Path) -> None:
    _, engine = plan(sources["llama"], tmp_path)
    engine.allocate_kv(6)
    prompt = [int(t) for t in np.random.default_rng(SEED).integers(0, 33, 20)]
    engine.execute(packed_step([prompt], [0], [[0, 1]]))
    first = engine.execute(packed_step([[7]], [20], [[0, 1]])).copy()
    engine.copy_blocks([(0, 4), (1, 2)])
    assert np.array_equal(engine.execute(packed_step([[7]], [20], [[4, 2]])), first)
    with pytest.raises(EngineError, match="block 0 → 6"):
        engine.copy_blocks([(0, 6)])


def test_a_wrong_step_is_an_error_and_never_reaches_the_code(sources: dict[str, Path], tmp_path: Path) -> None:
    _, engine = plan(sources["llama"], tmp_path, max_tokens=32)
    engine.allocate_kv(4)
    good = packed_step([[1, 2, 3]], [0], [[0]])

    def ints(*values: int) -> Any:
        return np.array(values, np.int32)

    wrong = [
        replace(good, input_ids=ints(1, 2, 33)),
        replace(good, input_ids=ints(-1, 2, 3)),
        replace(good, positions=ints(0, 1, 128)),
        replace(good, block_table=ints(4)[:, None]),
        replace(good, block_table=ints(-1)[:, None]),
        replace(good, context_lens=ints(14)),
        replace(good, context_lens=ints(-1)),
        replace(good, context_lens=ints(2**31 - 2)),
        replace(good, context_lens=ints(0, 0)),
        replace(good, seq_starts=ints(0, 4)),
        replace(good, seq_starts=ints(1, 3)),
        replace(good, logit_rows=ints(3)),
        replace(good, logit_rows=ints(0, 1, 2, 2)),
        replace(good, input_ids=np.array([1, 2, 3], np.int64)),  # type: ignore[arg-type]
        packed_step([[1] * 33], [0], [[0, 1, 2]]),
    ]
    for step in wrong:
        with pytest.raises(EngineError):
            engine.execute(step)
    assert np.isfinite(engine.execute(good)).all()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.execute(good)
