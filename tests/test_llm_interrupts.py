"""Interrupts and failures inside a step: no request sees a wrong token, loses one or leaks a block."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from engines import capabilities, hash_engine
from test_scheduler import check
from tokenizers_for_tests import byte_level

from plankiln.runtime import sampling
from plankiln.runtime.llm import LLM
from plankiln.runtime.request import Delta
from plankiln.runtime.sampling import SamplingParams, sample

TOKENIZER = byte_level()
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OURS = str(Path(sampling.__file__).parent)


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """KeyboardInterrupt at call number `at` of the runtime's own code, where Python looks for signals: at the entry of
    a Python function and after a C function. Gives the number of those places so far."""
    seen = [0]

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OURS):
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def served(at: int) -> tuple[dict[int, list[Delta]], int]:
    """All deltas of three requests, one of them cancelled on the way; the loop goes on after the interrupt."""
    llm = LLM(hash_engine(capabilities(max_tokens_per_step=4)), TOKENIZER, (), kv_blocks=8)
    params = SamplingParams(max_tokens=3, seed=1)
    ids = [llm.submit(prompt, params) for prompt in ([1, 2, 3, 4, 5], [6, 7], [8] * 9)]
    deltas: dict[int, list[Delta]] = {request: [] for request in ids}
    llm.cancel(ids[2])
    with interrupted(at) as seen:
        while any(not news or not news[-1].output for news in deltas.values()):
            try:
                for delta in llm.step():
                    deltas[delta.request_id].append(delta)
            except KeyboardInterrupt:
                check(llm)
    assert llm.scheduler.idle
    assert llm.pool.used == 0
    return deltas, seen[0]


def test_an_interrupt_at_any_place_changes_nothing() -> None:
    expected, places = served(0)
    assert places > 500
    for at in range(1, places, 1 if places < 1000 else 2):
        assert served(at)[0] == expected, f"interrupted at place {at}"


def test_interrupted_generate_leaves_other_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LLM(hash_engine(), TOKENIZER, ()).generate([[1, 2, 3]], GREEDY)[0]
    llm = LLM(hash_engine(), TOKENIZER, ())
    stream = llm.stream([1, 2, 3], GREEDY)
    tokens = next(stream).token_ids

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7]], GREEDY)
    for delta in stream:
        tokens += delta.token_ids
    assert (tokens, delta.output and delta.output.text) == (expected.token_ids, expected.text)
    check(llm)
    assert llm.scheduler.idle


def test_sampling_that_fails_for_one_row_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that does not fit into memory is sampled row by row."""
    expected = LLM(hash_engine(), TOKENIZER, ()).generate([[1], [2]], GREEDY)

    def short_of_memory(logits: np.ndarray[Any, Any], params: list[SamplingParams], uniforms: list[float]) -> Any:
        if len(logits) > 1 or params[0].top_k == 5:
            raise MemoryError
        return sample(logits, params, uniforms)

    monkeypatch.setattr(sampling, "sample", short_of_memory)
    llm = LLM(hash_engine(), TOKENIZER, ())
    outputs = llm.generate([[1], [9], [2]], [GREEDY, SamplingParams(top_k=5), GREEDY])
    assert [o.token_ids for o in outputs] == [expected[0].token_ids, (), expected[1].token_ids]
    assert outputs[1].error == "sampling failed: MemoryError"
    assert llm.pool.used == 0


def test_logits_after_a_closed_stream_find_its_blocks_free() -> None:
    llm = LLM(hash_engine(), TOKENIZER, (), kv_blocks=4)
    stream = llm.stream([1, 2], SamplingParams(max_tokens=10))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.logits(list(range(10))).shape[0] == 10
    check(llm)
