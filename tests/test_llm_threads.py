"""One LLM, several threads: the same tokens as alone, steps shared, nobody starved, and a close at any time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import write_tiny_hf
from engines import FunctionEngine, capabilities, hash_engine, hash_logits
from plans import plan
from test_scheduler import check
from tokenizers_for_tests import byte_level

from plankiln.errors import EngineError
from plankiln.runtime.engine import FloatArray, Step
from plankiln.runtime.llm import LLM
from plankiln.runtime.request import RequestOutput
from plankiln.runtime.sampling import SamplingParams
from plankiln.runtime.turns import Turns

TOKENIZER = byte_level()
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
THREADS = 6


class SlowEngine(FunctionEngine):
    """Leaves the processor to other threads in the middle of a step, and notices a second one."""

    def __init__(self, pause: float = 0.0005) -> None:
        super().__init__(hash_logits, capabilities())
        self.pause = pause
        self.inside = threading.Lock()

    def execute(self, step: Step) -> FloatArray:
        assert self.inside.acquire(blocking=False), "two steps at a time"
        try:
            time.sleep(self.pause)
            assert not self.closed
            return super().execute(step)
        finally:
            self.inside.release()


def at_once(*work: Callable[[], object]) -> list[object]:
    """Results of the calls, each made in a thread of its own, all at the same time."""
    barrier = threading.Barrier(len(work))

    def call(one: Callable[[], object]) -> object:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(call, work))


def streamed(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
    deltas = list(llm.stream(prompt, PARAMS))
    return tuple(token for delta in deltas for token in delta.token_ids)


def stepped(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
    """By `submit` and `step`, in the one thread that steps."""
    wanted = llm.submit(prompt, PARAMS)
    while True:
        for delta in llm.step():
            if delta.request_id == wanted and delta.output:
                return delta.output.token_ids


def test_every_thread_gets_what_it_would_alone() -> None:
    prompts = [[i, i + 1, i + 2] for i in range(THREADS)]
    expected = [o.token_ids for o in LLM(hash_engine(), TOKENIZER, ()).generate(prompts, PARAMS)]
    engine = SlowEngine()
    llm = LLM(engine, TOKENIZER, ())
    for _ in range(3):
        got = at_once(
            lambda: streamed(llm, prompts[0]),
            lambda: streamed(llm, prompts[1]),
            lambda: stepped(llm, prompts[2]),
            lambda: llm.generate([prompts[3]], PARAMS)[0].token_ids,
            lambda: llm.generate([prompts[4]], PARAMS)[0].token_ids,
            lambda: (llm.logits(prompts[5]).shape, llm.generate([prompts[5]], PARAMS)[0].token_ids)[1],
        )
        assert got == expected
    check(llm)
    assert llm.scheduler.idle
    assert llm.pool.used == 0
    assert sum(n for n in engine.steps) > len(engine.steps), "no step was shared"


def test_turns_come_in_the_order_of_asking() -> None:
    """Of four threads that always want a turn, none gets two in a row: a plain lock gives some to one many times."""
    turns, order = Turns(), list[int]()

    def take(number: int) -> None:
        for _ in range(50):
            turns.take(lambda: order.append(number) or time.sleep(0.001))  # type: ignore[func-returns-value]

    at_once(*(lambda n=n: take(n) for n in range(4)))  # type: ignore[misc]
    middle = order[20:-60]
    assert sum(one == other for one, other in itertools.pairwise(middle)) < 10


def test_a_turn_inside_a_turn_does_not_wait_for_those_behind() -> None:
    turns, done = Turns(), list[str]()

    def work() -> None:
        last = turns._last
        other.start()
        while turns._last is last:  # until the other thread is in the queue
            time.sleep(0.001)
        turns.take(lambda: done.append("inner"))
        done.append("outer")

    other = threading.Thread(target=turns.take, args=(lambda: done.append("other"),), daemon=True)
    thread = threading.Thread(target=turns.take, args=(work,), daemon=True)
    thread.start()
    thread.join(10)
    assert done[:2] == ["inner", "outer"]
    other.join(10)
    assert done == ["inner", "outer", "other"]


def test_an_interrupted_wait_lets_no_second_thread_in() -> None:
    turns, inside, most = Turns(), list[int](), list[int]()

    def work() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    class Interrupted:
        """In the place of the lock ahead: the wait for it is interrupted."""

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    def interrupted_wait() -> None:
        turns._last = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            turns.take(work)

    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(turns.take, work) for _ in range(2)]
        interrupted_wait()
        rest = [pool.submit(turns.take, work) for _ in range(4)]
        for done in first + rest:
            done.result()
    assert max(most) == 1


class TestClose:
    def test_waits_for_the_step_and_ends_the_rest_with_an_error(self) -> None:
        engine = SlowEngine(pause=0.02)
        llm = LLM(engine, TOKENIZER, ())
        outputs: list[RequestOutput] = []

        def generate() -> None:
            outputs.extend(llm.generate([[1], [2]], PARAMS))

        def stream() -> None:
            outputs.extend(d.output for d in llm.stream([3], PARAMS) if d.output)

        def close() -> None:
            while len(llm.scheduler.running) < 4:
                time.sleep(0.001)
            llm.close()

        at_once(generate, stream, stream, close)
        assert engine.closed
        assert len(outputs) == 4
        assert {(o.finish_reason, o.error) for o in outputs} == {("error", "the engine is closed")}
        assert llm.pool.used == 0

    def test_every_later_call_says_so(self) -> None:
        llm = LLM(hash_engine(), TOKENIZER, ())
        before = llm.stream([1], PARAMS)
        running = llm.stream([2], PARAMS)
        next(running)
        llm.close()
        llm.close()
        calls: list[Callable[[], object]] = [
            lambda: llm.generate([[1]]),
            lambda: llm.generate([]),
            lambda: llm.stream([1]),
            lambda: llm.submit([1]),
            llm.step,
            lambda: llm.logits([1]),
            llm.__enter__,
            lambda: next(before),
        ]
        for call in calls:
            with pytest.raises(EngineError, match=r"^the engine is closed$"):
                call()
        llm.cancel(0)
        last = list(running)[-1].output
        assert last is not None
        assert (last.finish_reason, last.error) == ("error", "the engine is closed")


def test_a_compiled_plan_serves_threads_and_a_close_in_between(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path / "model", "llama", num_hidden_layers=1)
    _, engine = plan(source, tmp_path / "plan", target="cpu-generic")
    prompts = [[i, i + 1, i + 2] for i in range(1, 1 + THREADS)]
    llm = LLM(engine, TOKENIZER, ())
    expected = [o.token_ids for o in llm.generate(prompts, PARAMS)]
    assert at_once(*(lambda p=p: streamed(llm, p) for p in prompts)) == expected  # type: ignore[misc]

    def until_closed(prompt: list[int]) -> str:
        while True:
            try:
                (output,) = llm.generate([prompt], PARAMS)
            except EngineError as error:
                return str(error)
            assert output.finish_reason == "length" or output.error == "the engine is closed"

    def close() -> str:
        time.sleep(0.1)
        llm.close()
        return "the engine is closed"

    said = at_once(*(lambda p=p: until_closed(p) for p in prompts), close)  # type: ignore[misc]
    assert set(said) == {"the engine is closed"}


@pytest.mark.parametrize("blocks", ["2", 1.5, True, 0, -1])
def test_kv_blocks_that_are_no_number_of_blocks(blocks: object) -> None:
    with pytest.raises(EngineError, match="`kv_blocks` must be a whole number of at least 1, not"):
        LLM(hash_engine(), TOKENIZER, (), kv_blocks=blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [10**12, 2**31])
def test_kv_blocks_that_no_memory_holds(blocks: int) -> None:
    with pytest.raises(EngineError, match=rf"no memory for {blocks} KV blocks \(.* MiB\)\nhint: set `kv_blocks` to"):
        LLM(hash_engine(), TOKENIZER, (), kv_blocks=blocks)
