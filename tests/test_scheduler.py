"""Scheduling through the whole loop with an engine that reads tokens back through the paged cache."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest
from engines import VOCAB, capabilities, hash_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_level

from plankiln.errors import RequestError
from plankiln.runtime.engine import Capabilities
from plankiln.runtime.llm import LLM
from plankiln.runtime.request import RequestOutput
from plankiln.runtime.sampling import SamplingParams

TOKENIZER = byte_level()
EOS = (2,)
Job = tuple[tuple[int, ...], SamplingParams]


def check(llm: LLM) -> None:
    """The invariants that hold after every step."""
    pool, running = llm.pool, llm.scheduler.running
    tables = [block for request in running.values() for block in request.blocks.tolist()]
    assert pool.free + pool.used == pool.total
    assert max(Counter(tables).values(), default=1) == 1
    assert pool.references.tolist() == [tables.count(block) for block in range(pool.total)]
    assert all(not request.blocks.size and not request.computed for request in llm.scheduler.waiting)
    assert len(running) <= llm.scheduler.slots
    for request in running.values():
        assert request.computed < request.length <= request.tokens.size
        assert request.computed <= request.blocks.size * llm.engine.capabilities.block_size


@lru_cache(maxsize=5000)
def alone(job: Job) -> RequestOutput:
    prompt, params = job
    return LLM(hash_engine(), TOKENIZER, EOS).generate([list(prompt)], params)[0]


@st.composite
def limits(draw: st.DrawFn) -> tuple[Capabilities, int]:
    """Limits under which every job fits, and a pool between one full context and plenty."""
    size = draw(st.integers(1, 9))
    made = capabilities(
        block_size=size,
        max_sequences=draw(st.integers(1, 6)),
        max_tokens_per_step=draw(st.integers(1, 20)),
        max_context=draw(st.integers(40, 64)),
        max_logit_rows=draw(st.integers(1, 6)),
    )
    return made, draw(st.integers(-(-40 // size), 200))


jobs = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=25).map(tuple),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 15),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 4]),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    made=limits(),
    todo=st.lists(st.tuples(jobs, st.integers(0, 9), st.none() | st.integers(0, 12)), min_size=1, max_size=10),
)
def test_every_request_gives_what_it_gives_alone(
    made: tuple[Capabilities, int], todo: list[tuple[Job, int, int | None]]
) -> None:
    """Random mixes, arrivals and cancels (users-met 42, 48): same tokens, no leaked block.

    todo: per request the job, the step at which it arrives, and after how many more steps it is cancelled.
    """
    llm = LLM(hash_engine(made[0]), TOKENIZER, EOS, kv_blocks=made[1])
    known: dict[int, tuple[Job, int | None]] = {}
    outputs: dict[int, RequestOutput] = {}
    streamed: dict[int, list[int]] = {}
    order: list[int] = []
    step = 0
    while len(outputs) < len(todo):
        for job, arrival, cancelled in todo:
            if arrival == step:
                known[llm.submit(list(job[0]), job[1])] = job, step + cancelled if cancelled is not None else None
        for request_id, (_, cancelled) in known.items():
            if cancelled == step:
                llm.cancel(request_id)
        for delta in llm.step():
            streamed.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.output:
                outputs[delta.request_id] = delta.output
        check(llm)
        for request_id, (_, cancelled) in known.items():
            assert cancelled != step or request_id in outputs  # its blocks are free, at once
        order += [i for i in llm.scheduler.running if i not in order]
        step += 1
    assert llm.pool.free == llm.pool.total
    assert llm.scheduler.idle
    assert order == sorted(order)  # first come, first admitted
    for request_id, output in outputs.items():
        job, cancelled = known[request_id]
        solo = alone(job)
        assert streamed[request_id] == list(output.token_ids)
        if output.finish_reason == "cancelled":
            assert cancelled is not None
            assert solo.token_ids[: len(output.token_ids)] == output.token_ids
        else:
            assert output.token_ids == solo.token_ids
            assert (output.text, output.finish_reason) == (solo.text, solo.finish_reason)


@settings(max_examples=60, deadline=None)
@given(made=limits(), todo=st.lists(jobs, min_size=1, max_size=8))
def test_nobody_starves(made: tuple[Capabilities, int], todo: list[Job]) -> None:
    """Every running decode advances in every step, the oldest prefill too: the number of steps is bounded."""
    llm = LLM(hash_engine(made[0]), TOKENIZER, EOS, kv_blocks=made[1])
    ids = [llm.submit(list(prompt), params) for prompt, params in todo]
    steps, bound = 0, sum(len(prompt) + (params.max_tokens or 0) for prompt, params in todo)
    done: set[int] = set()
    while len(done) < len(ids):
        running = {i: (r.computed, bool(r.generated)) for i, r in llm.scheduler.running.items()}
        finished = {d.request_id for d in llm.step() if d.output}
        check(llm)
        left = {i: state for i, state in running.items() if i not in finished}
        for i, (computed, decoding) in left.items():
            assert not decoding or llm.scheduler.running[i].computed == computed + 1
        prefilling = [i for i, (_, decoding) in running.items() if not decoding]
        if prefilling and prefilling[0] in left:
            assert llm.scheduler.running[prefilling[0]].computed > left[prefilling[0]][0]
        done |= finished
        steps += 1
        assert steps <= bound


def test_decodes_go_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    engine = hash_engine(capabilities(max_tokens_per_step=8))
    llm = LLM(engine, TOKENIZER, ())
    llm.submit([1, 2], SamplingParams(max_tokens=9))
    llm.step()
    llm.submit([5] * 20, SamplingParams(max_tokens=2))
    llm.submit([6], SamplingParams(max_tokens=2))
    for _ in range(4):
        llm.step()
    assert engine.steps == [2, 8, 8, 8, 3]  # 1 decode + 7; 1 + 7; 1 + 6 + 1; 3 decodes


def test_planning_changes_nothing() -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())
    llm.submit([1] * 9)
    assert llm.scheduler.plan() == llm.scheduler.plan()
    assert llm.pool.used == 0
    assert not llm.scheduler.running


def test_request_waits_until_its_worst_case_fits() -> None:
    llm = LLM(hash_engine(), TOKENIZER, (), kv_blocks=4)  # 16 tokens
    first = llm.submit([1] * 8, SamplingParams(max_tokens=5))  # 3 blocks
    second = llm.submit([2] * 4, SamplingParams(max_tokens=5))  # 2 blocks
    third = llm.submit([3], SamplingParams(max_tokens=1))  # 1 block, but it came last
    llm.step()
    assert list(llm.scheduler.running) == [first]
    while second not in llm.scheduler.running:
        assert [r.id for r in llm.scheduler.waiting] == [second, third]
        deltas = llm.step()
    assert [d.request_id for d in deltas if d.output] == [third]


def test_prompt_beyond_the_pool_is_refused_with_numbers() -> None:
    """users-met 35: it must not block the queue."""
    llm = LLM(hash_engine(), TOKENIZER, (), kv_blocks=8)  # 32 tokens
    with pytest.raises(RequestError, match=r"has 40 tokens and max_tokens is 4.* 11 KV blocks of 4.*has 8"):
        llm.submit([1] * 40, SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match="lower max_tokens to 3 or less"):
        llm.submit([1] * 30, SamplingParams(max_tokens=20))
    assert len(llm.generate([[1] * 30], SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert len(llm.generate([[1] * 30], SamplingParams(max_tokens=None))[0].token_ids) == 3
    assert len(llm.generate([[1] * 32], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_prompt_beyond_the_context_is_refused_with_numbers() -> None:
    llm = LLM(hash_engine(), TOKENIZER, (), kv_blocks=100)  # context 64
    with pytest.raises(RequestError, match="together 65, but the plan's context is 64"):
        llm.submit([1] * 60, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="has 64 tokens, but the plan's context is 64"):
        llm.submit([1] * 64, SamplingParams(max_tokens=None))
    assert len(llm.generate([[1] * 60], SamplingParams(max_tokens=None))[0].token_ids) == 4
    assert llm.scheduler.idle
