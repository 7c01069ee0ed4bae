"""From logits to tokens: greedy, temperature, top-k, top-p, min-p.

A row's token depends on its logits, its parameters and its own random number alone, bit for bit: sums run in an
order that the number of rows does not change, and random numbers are a function of (seed, index of the token).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.errors import Problem, RequestError
from plankiln.runtime.engine import FloatArray

MAX_STOPS = 64
_MAX_INT = 2**31 - 1
MAX_STOP_LENGTH = 1024
_FIRST_WIDTH = 256
_COLDEST, _HOTTEST = 1e-30, 1e30
_IntArray = NDArray[np.int64]
_DoubleArray = NDArray[np.float64]


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Raises RequestError, naming every bad value at once.

    max_tokens: most tokens to generate; None is as many as the context has room for. Memory is set aside for all of
        them when the request starts: a bound lets more requests run at a time.
    temperature: divides the logits; 0 takes the most likely token (of equals, the lowest id).
    top_k: keep the k most likely tokens (of equals, the lowest ids); 0 keeps all.
    top_p: then keep the fewest of them that hold this share of what is left.
    min_p: and of them those at least min_p times as likely as the most likely one.
    seed: below 2**64; None draws one, and the output records it.
    stop: strings that end the text and are no part of it; one string or a sequence of at most 64.
    stop_token_ids: tokens that end it, besides the model's own. ignore_eos: the model's own do not.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        problems = [p for field in fields(self) if (p := self._normalise(field.name))]
        if problems:
            raise RequestError(problems)

    def _normalise(self, name: str) -> Problem | None:
        value = getattr(self, name)
        convert, rule = _RULES[name]
        try:
            object.__setattr__(self, name, convert(value))
        except (TypeError, ValueError, OverflowError):
            return Problem(f"`{name}` must be {rule}, not `{_shown(value)}`")
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(value: Any, low: int, high: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not low <= operator.index(value) <= high:
        raise ValueError
    return operator.index(value)


def _number(value: Any, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise ValueError
    number = float(value)
    if not 0 <= number <= high or math.isinf(number) or (open_low and not number):
        raise ValueError
    return number


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > MAX_STOPS or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in strings):
        raise ValueError
    return strings


def _tokens(value: Any) -> tuple[int, ...]:
    return tuple(_integer(token, 0, _MAX_INT) for token in value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_RULES: dict[str, tuple[Any, str]] = {
    "max_tokens": (
        lambda v: None if v is None else _integer(v, 1, _MAX_INT),
        f"None or a whole number from 1 to {_MAX_INT}",
    ),
    "temperature": (lambda v: _number(v, math.inf), "a finite number of at least 0"),
    "top_k": (lambda v: _integer(v, 0, _MAX_INT), f"0 (off) or a whole number up to {_MAX_INT}"),
    "top_p": (lambda v: _number(v, 1, open_low=True), "more than 0 and at most 1"),
    "min_p": (lambda v: _number(v, 1), "between 0 and 1"),
    "seed": (lambda v: None if v is None else _integer(v, 0, 2**64 - 1), "None or an integer from 0 to 2**64 - 1"),
    "stop": (_strings, f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"),
    "stop_token_ids": (_tokens, f"a sequence of token ids, 0 to {_MAX_INT}"),
    "ignore_eos": (_flag, "True or False"),
}


def uniform(seed: int, index: int) -> float:
    """Number `index` of the seed's random stream, in [0, 1): the Philox counter-based generator."""
    return _uniforms(seed, index // 64)[index % 64]


@lru_cache(maxsize=1024)
def _uniforms(seed: int, page: int) -> list[float]:
    raw = np.random.Philox(counter=page * 16, key=seed).random_raw(64)
    return ((raw >> np.uint64(11)) * 2.0**-53).tolist()  # type: ignore[no-any-return]


def sample(logits: FloatArray, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> _IntArray:
    """One token per row: int64 [R], -1 where the logits are NaN, +inf, or nothing but -inf.

    logits: float32 [R, vocab]; params, uniforms: R each, a uniform in [0, 1) is used when the row is not greedy.
    """
    tokens: _IntArray = logits.argmax(axis=1)
    top = np.take_along_axis(logits, tokens[:, None], axis=1)
    usable = np.isfinite(top[:, 0])
    drawn = [row for row, p in enumerate(params) if usable[row] and p.temperature > 0]
    if drawn:
        chosen = [params[row] for row in drawn]
        temperature = np.array([min(max(p.temperature, _COLDEST), _HOTTEST) for p in chosen], np.float32)
        with np.errstate(over="ignore"):
            scaled = (logits[drawn] - top[drawn]) / temperature[:, None]
        min_p = np.array([p.min_p for p in chosen])
        u = np.array([uniforms[row] for row in drawn])
        vocab = logits.shape[1]
        top_k = np.array([min(p.top_k or vocab, vocab) for p in chosen])
        top_p = np.array([p.top_p for p in chosen])
        ranked = (top_k < vocab) | (top_p < 1)
        picked = np.empty(len(drawn), np.int64)
        if not ranked.all():
            picked[~ranked] = _draw_any(scaled[~ranked], min_p[~ranked], u[~ranked])
        if ranked.any():
            picked[ranked] = _draw_ranked(*(a[ranked] for a in (scaled, top_k, top_p, min_p, u)))
        tokens[drawn] = picked
    tokens[~usable] = -1
    return tokens


def choose(logits: FloatArray, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int | str]:
    """`sample`, with the reason in place of a token that cannot be had. What fails for one row leaves the others."""
    try:
        tokens: list[int | str] = sample(logits, params, uniforms).tolist()
    except Exception:  # out of memory, say, where one row may still fit
        tokens = [_alone(*row) for row in zip(logits, params, uniforms, strict=True)]
    return [f"no token can be chosen: {why_unusable(logits[i])}" if t == -1 else t for i, t in enumerate(tokens)]


def _alone(logits: FloatArray, params: SamplingParams, uniform: float) -> int | str:
    try:
        return int(sample(logits[None], [params], [uniform])[0])
    except Exception as error:
        return f"sampling failed: {str(error) or type(error).__name__}"


def why_unusable(row: FloatArray) -> str:
    """What is wrong with a row of logits [vocab] that gave no token."""
    if np.isnan(row).any():
        return f"{np.count_nonzero(np.isnan(row))} of {row.size} logits are NaN"
    return "a logit is +inf" if np.isposinf(row).any() else "every logit is -inf"


def _draw_any(scaled: FloatArray, min_p: _DoubleArray, u: _DoubleArray) -> _IntArray:
    """Inverse CDF over the whole vocabulary; ids are visited residue class by residue class (the sums are cheap then).

    scaled [n, vocab]: logits less their maximum, over the temperature.
    """
    weights = np.exp(scaled)
    if min_p.any():
        weights[weights < min_p[:, None]] = 0
    lanes, mass = _class_sums(weights)
    n, depth, classes = lanes.shape
    target = u * mass[:, -1]
    group = (mass <= target[:, None]).sum(axis=1)
    before = np.where(group > 0, mass[np.arange(n), group - 1], 0)
    members = lanes[np.arange(n), :, group]
    inside = np.cumsum(members, axis=1, dtype=np.float64) + before[:, None]
    last = depth - 1 - (members > 0)[:, ::-1].argmax(axis=1)
    return np.asarray(np.minimum((inside <= target[:, None]).sum(axis=1), last) * classes + group)


def _class_sums(weights: FloatArray) -> tuple[FloatArray, _DoubleArray]:
    """The weights as [n, depth, classes] and the running sums [n, classes] of the classes' masses."""
    n, vocab = weights.shape
    lanes = weights.reshape(n, math.gcd(vocab, 64), -1)
    return lanes, np.cumsum(lanes.sum(axis=1, dtype=np.float64), axis=1)


def _draw_ranked(
    scaled: FloatArray, top_k: _IntArray, top_p: _DoubleArray, min_p: _DoubleArray, u: _DoubleArray
) -> _IntArray:
    """Inverse CDF over the most likely tokens, most likely first; as many are ranked as the rows turn out to need."""
    n, vocab = scaled.shape
    limited = top_k < vocab
    mass = np.zeros(n)
    if not limited.all():
        mass[~limited] = _class_sums(np.exp(scaled[~limited]))[1][:, -1]
    tokens = np.zeros(n, np.int64)
    rows = np.arange(n)
    width = min(vocab, max(_FIRST_WIDTH, int(top_k[limited].max(initial=0))))
    while rows.size:
        here = np.arange(rows.size)
        wide = scaled[rows] if rows.size < n else scaled
        values = _largest(wide, width)
        weights = np.exp(values)
        running = np.cumsum(weights, axis=1, dtype=np.float64)
        limit = np.minimum(top_k[rows], width)
        whole = np.where(limited[rows], running[here, limit - 1], mass[rows])
        share = (top_p[rows] * whole)[:, None]
        kept = np.minimum((running < share).sum(axis=1) + 1, limit)
        kept = np.minimum(kept, (weights >= min_p[rows, None]).sum(axis=1))
        target = (u[rows] * running[here, kept - 1])[:, None]
        rank = (running <= target).sum(axis=1)
        short = ~limited[rows] & (running[:, -1:] < share)[:, 0] & (width < vocab)
        tokens[rows[~short]] = _ids_at(wide[~short], values[~short], rank[~short])
        rows = rows[short]
        width = min(vocab, 4 * width)
    return tokens


def _largest(scaled: FloatArray, width: int) -> FloatArray:
    """Each row's `width` largest values, largest first; -inf where a row has no more finite ones."""
    n, vocab = scaled.shape
    depth = max(1, vocab // (4 * width))
    classes = vocab // depth
    maxima = scaled[:, : depth * classes].reshape(n, depth, classes).max(axis=1)
    # `width` classes hold a value of at least their width-th largest maximum, so at least `width` values pass it.
    floor = np.partition(maxima, classes - width, axis=1)[:, classes - width, None]
    places = np.flatnonzero((scaled >= floor) & (scaled > -np.inf))
    rows = places // vocab
    rank = np.arange(rows.size) - np.searchsorted(rows, np.arange(n))[rows]
    values = np.full((n, max(width, int(rank.max()) + 1)), -np.inf, np.float32)
    values[rows, rank] = scaled.ravel()[places]
    values.sort(axis=1)
    return np.ascontiguousarray(values[:, : -width - 1 : -1])


def _ids_at(scaled: FloatArray, values: FloatArray, rank: _IntArray) -> _IntArray:
    """The id at each row's place `rank` in the order: largest value first, of equal values the lowest id first."""
    n, vocab = scaled.shape
    chosen = values[np.arange(n), rank, None]
    larger = (values > chosen).sum(axis=1)
    places = np.flatnonzero(scaled == chosen)
    return np.asarray(places[np.searchsorted(places, np.arange(n) * vocab) + rank - larger] % vocab)
