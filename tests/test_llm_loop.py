"""What a caller of LLM sees: outputs, streams, errors, and a loop that lives on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import VOCAB, FailingEngine, FunctionEngine, capabilities, hash_engine, hash_logits, scripted_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import check
from tokenizers_for_tests import SPECIALS, byte_level

from plankiln.errors import EngineError, RequestError
from plankiln.runtime.engine import Capabilities, Int32Array, Step
from plankiln.runtime.llm import LLM, Prompt
from plankiln.runtime.sampling import SamplingParams, sample, uniform

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TOKENIZER = byte_level()
WIDE = capabilities(vocab_size=300)


def text_llm(text: str, *, then: list[int] | None = None, eos: tuple[int, ...] = (1, 3), **habits: Any) -> LLM:
    """Answers the prompt [4] with `text`, one byte a token, then with the ids `then`."""
    tokenizer = byte_level(**habits)
    return LLM(scripted_engine({4: tokenizer.encode(text) + (then or [])}, WIDE), tokenizer, eos)


@pytest.mark.parametrize("eos", [1, 3])
def test_every_eos_of_the_set_ends_the_text(eos: int) -> None:
    """users-met 43: the set has two members, and either ends the text."""
    llm = text_llm("hi", then=[eos])
    output = llm.generate([[4]], SamplingParams(temperature=0))[0]
    assert (output.text, output.finish_reason) == ("hi", "stop")
    assert output.token_ids == (*TOKENIZER.encode("hi"), eos)
    ignored = llm.generate([[4]], SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))[0]
    assert (len(ignored.token_ids), ignored.finish_reason) == (5, "length")


def test_stop_token_is_no_part_of_the_text() -> None:
    (newline,) = TOKENIZER.encode("\n")
    llm = text_llm("one\ntwo", then=[1])
    output = llm.generate([[4]], SamplingParams(temperature=0, stop_token_ids=[newline], ignore_eos=True))[0]
    assert (output.text, output.finish_reason, output.token_ids[-1]) == ("one", "stop", newline)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("END", "ab", "stop"), (["b", "END"], "a", "stop"), ("ENDx", "abENDc", "stop"), ("é", "abENDc", "stop")],
)
def test_stop_strings_are_never_leaked(stop: Any, text: str, reason: str) -> None:
    llm = text_llm("abENDc", then=[1])
    deltas = list(llm.stream([4], SamplingParams(temperature=0, stop=stop)))
    output = deltas[-1].output
    assert output is not None
    assert "".join(d.text for d in deltas) == output.text == text
    assert output.finish_reason == deltas[-1].finish_reason == reason
    assert tuple(i for d in deltas for i in d.token_ids) == output.token_ids


def test_length_flushes_what_was_held_back() -> None:
    llm = text_llm("aé")
    cut = llm.generate([[4]], SamplingParams(temperature=0, max_tokens=2, stop="\ufffd\ufffd"))[0]
    assert (cut.text, cut.finish_reason) == ("a\ufffd", "length")
    last = llm.generate([[4]], SamplingParams(temperature=0, max_tokens=2, stop="\ufffd"))[0]
    assert (last.text, last.finish_reason) == ("a", "stop")


def test_streams_can_be_read_in_turn() -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())
    prompts = [[1, 2, 3], [7]]
    expected = llm.generate(prompts, GREEDY)
    a, b = (llm.stream(p, GREEDY) for p in prompts)
    together = [[d.token_ids for d in pair] for pair in zip(a, b, strict=True)]
    assert [sum(ids, ()) for ids in zip(*together, strict=True)] == [e.token_ids for e in expected]
    check(llm)
    assert llm.scheduler.idle


def test_closing_a_stream_frees_its_blocks_at_the_next_step() -> None:
    """users-met 48: a client that goes away."""
    llm = LLM(hash_engine(), TOKENIZER, ())
    other = llm.submit([9], GREEDY)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=40))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.step()
    assert list(llm.scheduler.running) == [other]
    check(llm)
    unread = llm.stream([1])
    del unread
    assert len(llm.scheduler.waiting) == 0


def test_generate_leaves_the_news_of_submitted_requests_to_step() -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())
    first = llm.submit([5, 6], GREEDY)
    alone = llm.generate([[5, 6]], GREEDY)[0]
    deltas = llm.step()
    assert {d.request_id for d in deltas} == {first}
    assert sum((d.token_ids for d in deltas), ()) == alone.token_ids
    assert deltas[-1].output is not None
    assert llm.step() == []


def test_interrupted_generate_cancels_its_requests() -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())

    def interrupted(step: Step) -> None:
        raise KeyboardInterrupt

    llm.engine.execute = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY)
    del llm.engine.execute
    assert llm.step() == []
    assert llm.scheduler.idle
    assert llm.pool.used == 0


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([-1], "token id `-1` is not in the vocabulary of 300"),
        ([1, 300], "token id `300`"),
        ([2**63], "token id"),
        ([2**70], "text or a list"),
        ([1.5], "text or a list"),
        ([True], "text or a list"),
        ([[1]], "text or a list"),
        ([[1], [2, 3]], "text or a list"),
        (["a"], "text or a list"),
        (None, "text or a list"),
        (7, "text or a list"),
        (b"abc", "text or a list"),
        ("a\ud800", "lone surrogate at character 1"),
        ([1] * 65, "has 65 tokens, but the plan's context is 64"),
    ],
)
def test_bad_prompts_are_refused_and_the_loop_lives_on(prompt: Any, said: str) -> None:
    llm = text_llm("hi", then=[1])
    running = llm.submit([4], GREEDY)
    for attempt in (llm.submit, llm.stream, lambda p: llm.generate([[4], p])):
        with pytest.raises(RequestError, match=said):
            attempt(prompt)
    done = [d.output for _ in range(8) for d in llm.step() if d.output]
    assert [(d.request_id, d.text) for d in done] == [(running, "hi")]
    assert llm.scheduler.idle


def test_params_must_match() -> None:
    llm = text_llm("hi")
    with pytest.raises(RequestError, match="2 prompts, but 1 params"):
        llm.generate([[4], [4]], [GREEDY])
    with pytest.raises(RequestError, match="not `dict`"):
        llm.generate([[4]], {"temperature": 0})  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_prompts_are_texts_or_ids_of_any_kind() -> None:
    llm = LLM(hash_engine(), byte_level(), ())
    ids = llm.tokenizer.encode("!#")
    prompts: list[Prompt] = ["!#", ids, tuple(ids), np.array(ids)]
    outputs = llm.generate(prompts, GREEDY)
    assert {o.prompt_token_ids for o in outputs} == {tuple(ids)}
    assert len({o.token_ids for o in outputs}) == 1
    assert llm.generate("!#", GREEDY)[0].token_ids == outputs[0].token_ids


def test_chat_uses_the_template() -> None:
    llm = LLM(hash_engine(), byte_level(chat_template="<s>{{ messages[0].content }}", add_bos=True), ())
    output = llm.chat([{"role": "user", "content": "!"}], GREEDY)
    assert output.prompt_token_ids == (SPECIALS.index("<s>"), *TOKENIZER.encode("!"))


def test_seed_is_recorded_and_reproduces() -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())
    params = SamplingParams(max_tokens=20)
    first, second = llm.generate([[1], [1]], params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = llm.generate([[1]], SamplingParams(max_tokens=20, seed=second.seed))[0]
    assert again.token_ids == second.token_ids


def test_token_number_k_uses_random_number_k_of_the_seed() -> None:
    params = SamplingParams(max_tokens=30, seed=11)
    tokens = [4, 5]
    for index in range(30):
        logits = hash_logits(np.array(tokens, np.int32))
        tokens += sample(logits[None], [params], [uniform(11, index)]).tolist()
    assert LLM(hash_engine(), TOKENIZER, ()).generate([[4, 5]], params)[0].token_ids == tuple(tokens[2:])


def test_engine_error_fails_the_step_s_requests_only() -> None:
    llm = LLM(FailingEngine({2}, capabilities(max_sequences=2)), TOKENIZER, ())
    expected = LLM(hash_engine(), TOKENIZER, ()).generate([[3]], GREEDY)[0]
    outputs = llm.generate([[1], [2], [3]], GREEDY)
    assert [o.finish_reason for o in outputs] == ["error", "error", "length"]
    assert [len(o.token_ids) for o in outputs] == [2, 2, 8]
    assert outputs[0].error == "the engine failed: the device fell off: step"
    assert outputs[2].error is None
    assert outputs[2].token_ids == expected.token_ids
    check(llm)
    assert llm.pool.used == 0


@settings(max_examples=50, deadline=None)
@given(failures=st.sets(st.integers(0, 30)), count=st.integers(1, 9))
def test_engine_errors_leave_the_pool_whole(failures: set[int], count: int) -> None:
    llm = LLM(FailingEngine(failures, capabilities(max_sequences=3, max_tokens_per_step=5)), TOKENIZER, ())
    ids = [llm.submit([i] * 7, GREEDY) for i in range(count)]
    done = set()
    while not llm.scheduler.idle:
        done |= {d.request_id for d in llm.step() if d.output}
        check(llm)
    assert done == set(ids)


def test_wrong_logits_shape_is_an_engine_error() -> None:
    llm = LLM(FunctionEngine(lambda tokens: np.zeros(7, np.float32)), TOKENIZER, ())
    output = llm.generate([[1]], GREEDY)[0]
    assert output.error == "the engine failed: it returned logits of shape (1, 7), not (1, 33)"


@pytest.mark.parametrize(("value", "said"), [(np.nan, "1 of 33 logits are NaN"), (np.inf, "a logit is +inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_logits_fail_only_their_request(value: float, said: str, temperature: float) -> None:
    def poisoned(tokens: Int32Array) -> np.ndarray[Any, Any]:
        logits = hash_logits(tokens)
        if tokens[0] == 13 and tokens.size == 4:
            logits[5] = value
        return logits

    params = SamplingParams(temperature=temperature, max_tokens=8, seed=1)
    prompts = [[1], [13], [2]]
    good = LLM(hash_engine(), TOKENIZER, ()).generate(prompts, params)
    bad = LLM(FunctionEngine(poisoned), TOKENIZER, ()).generate(prompts, params)
    assert bad[1].finish_reason == "error"
    assert bad[1].error == f"no token can be chosen: {said}"
    assert bad[1].token_ids == good[1].token_ids[:3]
    assert [bad[i].token_ids for i in (0, 2)] == [good[i].token_ids for i in (0, 2)]


@pytest.mark.parametrize("chunk", [None, 1, 3, 1000])
def test_logits_are_teacher_forced(chunk: int | None) -> None:
    llm = LLM(hash_engine(), TOKENIZER, ())
    ids = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 50)]
    expected = np.stack([hash_logits(np.array(ids[: n + 1], np.int32)) for n in range(50)])
    assert np.array_equal(llm.logits(ids, chunk), expected)
    assert llm.pool.used == 0


def test_logits_refusals() -> None:
    llm = LLM(hash_engine(), TOKENIZER, (), kv_blocks=10)
    for ids, said in [([], "empty"), ([1] * 65, "context is 64"), ([1] * 41, "11 KV blocks, but 10 are free")]:
        with pytest.raises(RequestError, match=said):
            llm.logits(ids)
    with pytest.raises(RequestError, match="`chunk` must be at least 1"):
        llm.logits([1], 0)


def test_load_hands_the_bundle_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundle and engine have tests of their own; here it is what passes between them."""
    opened: dict[str, Any] = {}
    limits = {"max_sequences": 2, "max_tokens_per_step": 8, "max_context": 32, "block_size": 4, "max_logit_rows": 4}
    limits["kv_memory"] = 1 << 20
    bundle = SimpleNamespace(
        tokenizer_json=byte_level()._tokenizer.to_str().encode(),
        chat_template="{{ messages[0].content }}",
        eos_token_ids=frozenset({1}),
        weights=(np.zeros(3, np.uint8),),
        sealed_code=lambda: "plan.so",
        manifest=SimpleNamespace(
            special_tokens={"bos_token": "<s>", "ids": [0]},
            add_bos=True,
            gate=None,
            kv_bytes_per_token=16,
            formats=SimpleNamespace(kv_cache="bf16"),
            model=SimpleNamespace(vocab_size=VOCAB),
            limits=SimpleNamespace(model_dump=lambda: limits),
        ),
    )

    def make(code: object, weights: object, limits: Capabilities, threads: int | None) -> FunctionEngine:
        opened.update(code=code, weights=weights, threads=threads)
        return hash_engine(limits)

    monkeypatch.setattr("plankiln.bundle.open_bundle", lambda path, **how: opened.update(path=path, **how) or bundle)
    monkeypatch.setattr("plankiln.runtime.cpu.CpuEngine", make)
    llm = LLM.load("here", threads=3, manifest_sha256="ab", verify="full")
    assert opened == {
        "path": "here",
        "manifest_sha256": "ab",
        "verify": "full",
        "code": "plan.so",
        "weights": bundle.weights[0],
        "threads": 3,
    }
    assert llm.engine.capabilities == Capabilities(
        kv="paged", kv_dtype="bf16", kv_bytes_per_token=16, vocab_size=VOCAB, **limits
    )
    assert llm.pool.total == 16
    assert llm.eos_ids == {1}
    assert llm.chat([{"role": "user", "content": "!"}], GREEDY).prompt_token_ids == tuple(TOKENIZER.encode("!"))
    assert llm.tokenizer.encode("!")[0] == SPECIALS.index("<s>")
    with pytest.raises(EngineError, match="kv_blocks"):
        LLM.load("here", kv_blocks=0)


def test_kv_blocks() -> None:
    assert LLM(hash_engine(), TOKENIZER, ()).pool.total == 8 * 64 // 4
    with pytest.raises(EngineError, match="`kv_blocks` must be a whole number of at least 1"):
        LLM(hash_engine(), TOKENIZER, (), kv_blocks=0)


def test_closing_closes_the_engine() -> None:
    engine = hash_engine()
    with LLM(engine, TOKENIZER, ()):
        pass
    assert engine.closed
