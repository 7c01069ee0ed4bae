"""Sampling against a plain oracle (full sort) and against exact distributions (chi-square)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plankiln.errors import RequestError
from plankiln.runtime.sampling import SamplingParams, sample, uniform, why_unusable

VOCABS = [1, 2, 33, 64, 1024, 5000, 8192]
Logits = NDArray[np.float32]


def oracle(logits: Logits, p: SamplingParams) -> NDArray[np.float64]:
    """The distribution a row is drawn from, float64 [vocab], by sorting everything."""
    if p.temperature == 0:
        return np.where(np.arange(logits.size) == logits.argmax(), 1.0, 0.0)
    with np.errstate(over="ignore"):
        x = (logits.astype(np.float64) - logits.max()) / p.temperature
    weights = np.exp(x)
    order = np.argsort(-x, kind="stable")
    keep = order[: p.top_k or None]
    if p.top_p < 1:
        shares = np.cumsum(weights[keep]) / weights[keep].sum()
        keep = keep[: np.count_nonzero(shares < p.top_p) + 1]
    keep = keep[weights[keep] >= p.min_p]
    out = np.zeros(logits.size)
    out[keep] = weights[keep] / weights[keep].sum()
    return out


def draw(logits: Logits, params: SamplingParams | Sequence[SamplingParams], us: Sequence[float]) -> list[int]:
    rows = list(params) if isinstance(params, Sequence) else [params] * len(logits)
    return [int(token) for token in sample(logits, rows, us)]


def supports(logits: Logits, p: SamplingParams, count: int) -> set[int]:
    """Every token that an even grid of `count` random numbers reaches."""
    return set(draw(np.tile(logits, (count, 1)), p, ((np.arange(count) + 0.5) / count).tolist()))


def assert_follows(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Chi-square at one in a million (Wilson and Hilferty's approximation of its quantile)."""
    total = counts.sum()
    assert not counts[expected == 0].any()
    common = expected * total >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*(expected[common] * total), expected[~common].sum() * total]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
    degrees = max(1, sum(w > 0 for w in wanted) - 1)
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


MIXES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, min_p=0.05),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.02, temperature=1.3),
    SamplingParams(top_p=0.999, temperature=3.0),
]


@pytest.mark.parametrize("p", MIXES)
@pytest.mark.parametrize("vocab", [33, 1024])
@pytest.mark.parametrize("masked", [False, True])
def test_frequencies_are_the_exact_probabilities(p: SamplingParams, vocab: int, masked: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits = (3 * rng.standard_normal(vocab)).astype(np.float32)
    if masked:
        logits[rng.random(vocab) < 0.3] = -np.inf
    n = 200_000 // vocab + 6_000
    tokens = draw(np.tile(logits, (n, 1)), p, [uniform(7, i) for i in range(n)])
    assert_follows(np.bincount(tokens, minlength=vocab), oracle(logits, p))


def test_streams_of_neighbouring_seeds_are_independent() -> None:
    logits = np.zeros((20_000, 33), np.float32)
    for us in ([uniform(seed, 0) for seed in range(20_000)], [uniform(seed, seed) for seed in range(20_000)]):
        assert_follows(np.bincount(draw(logits, SamplingParams(), us), minlength=33), np.full(33, 1 / 33))
    pairs = [int(uniform(s, 0) * 8) * 8 + int(uniform(s + 1, 0) * 8) for s in range(0, 20_000, 2)]
    assert_follows(np.bincount(pairs, minlength=64), np.full(64, 1 / 64))


def test_uniform_is_the_philox_stream() -> None:
    seed = 2**64 - 1
    raw = np.random.Philox(counter=0, key=seed).random_raw(200)
    assert [uniform(seed, i) for i in range(200)] == ((raw >> np.uint64(11)) / 2.0**53).tolist()


@st.composite
def rows(draw: st.DrawFn) -> tuple[Logits, SamplingParams]:
    vocab = draw(st.sampled_from(VOCABS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal(vocab) * draw(st.sampled_from([0, 0.1, 3, 30]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    logits[rng.random(vocab) < draw(st.sampled_from([0, 0.5, 0.99]))] = -np.inf
    logits[rng.integers(vocab)] = 1
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 1e-320, 0.2, 1, 3, 1e300])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 40, 300, 10**6])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5013, 0.1007, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0503, 0.3007, 1.0])),
    )
    return logits.astype(np.float32), params


@settings(max_examples=200, deadline=None)
@given(row=rows())
def test_kept_tokens_are_the_oracle_s(row: tuple[Logits, SamplingParams]) -> None:
    logits, p = row
    probabilities = oracle(logits, p)
    for u in (0.0, 0.2501, 0.75, 1 - 2**-53):
        (token,) = draw(logits[None], p, [u])
        assert probabilities[token] > 0
    likely = set(np.flatnonzero(probabilities > 1 / 40).tolist())
    assert likely <= supports(logits, p, 41) <= set(np.flatnonzero(probabilities).tolist())


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.sampled_from(VOCABS))
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject, vocab: int) -> None:
    mixes = data.draw(st.lists(st.sampled_from([*MIXES, SamplingParams(temperature=0)]), min_size=2, max_size=9))
    rng = np.random.default_rng(vocab)
    logits = (4 * rng.standard_normal((len(mixes), vocab))).astype(np.float32)
    us = rng.random(len(mixes)).tolist()
    together = draw(logits, mixes, us)
    assert together == [draw(logits[i : i + 1], [mixes[i]], [us[i]])[0] for i in range(len(mixes))]


@pytest.mark.parametrize("vocab", [33, 5000, 49152])
def test_class_sums_have_the_same_bits_in_every_batch(vocab: int) -> None:
    from plankiln.runtime.sampling import _class_sums

    weights = np.random.default_rng(1).random((7, vocab), np.float32)
    alone = np.concatenate([_class_sums(weights[i : i + 1])[1] for i in range(7)])
    assert np.array_equal(_class_sums(weights)[1], alone)


def test_flat_rows_widen_the_ranking() -> None:
    logits = np.zeros((3, 5000), np.float32)
    p = SamplingParams(top_p=0.75)
    assert draw(logits, p, [0.0, 0.5, 1 - 2**-53]) == [0, 1875, 3749]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.array([[1, 3, 3, 2], [-np.inf, -np.inf, -5, -5]], np.float32)
    assert draw(logits, SamplingParams(temperature=0), [0, 0]) == [1, 2]


def test_unusable_rows_harm_no_other() -> None:
    good = np.arange(33, dtype=np.float32)
    bad = np.stack([good] * 5)
    bad[1, 4], bad[2, 4], bad[3], bad[4, :32] = np.nan, np.inf, -np.inf, -np.inf
    for p in [*MIXES, SamplingParams(temperature=0)]:
        alone = draw(good[None], p, [0.3])[0]
        assert draw(bad, p, [0.3] * 5) == [alone, -1, -1, -1, 32]
    assert [why_unusable(row) for row in bad[1:4]] == [
        "1 of 33 logits are NaN",
        "a logit is +inf",
        "every logit is -inf",
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, math.nan, math.inf, "1", True, None, 1j]),
        ("top_k", [-1, 1.5, True, "3", None, 2**40]),
        ("top_p", [0, -0.1, 1.01, math.nan, None]),
        ("min_p", [-0.1, 1.01, math.nan, None]),
        ("max_tokens", [0, -1, 1.0, True, "9"]),
        ("seed", [-1, 2**64, 0.5, False]),
        ("stop", ["", ["a", ""], [1], None, 3, ["a"] * 65, "x" * 1025]),
        ("stop_token_ids", [[-1], [1.5], 3, "ab", [True]]),
        ("ignore_eos", [1, None, "yes"]),
    ],
)
def test_invalid_values_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"`{name}` must be"):
            SamplingParams(**{name: value})


def test_all_invalid_values_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=-1, top_p=2, stop=[""])
    assert len(caught.value.problems) == 3


def test_values_are_normalised() -> None:
    p = SamplingParams(stop="end", top_k=np.int64(3), temperature=1, stop_token_ids=[np.int32(5)], seed=2**64 - 1)  # type: ignore[arg-type,list-item]
    assert (p.stop, p.top_k, p.stop_token_ids) == (("end",), 3, (5,))
    assert hash(p) == hash(SamplingParams(stop=("end",), top_k=3, stop_token_ids=(5,), seed=2**64 - 1))
