"""The process that is measured: it loads one engine, answers on stdin/stdout, and does all of the timing.

A line of JSON comes in, a line of JSON goes out: {"ok": …}, {"unsupported": why} or {"error": what}. Nothing but the
standard library is imported, for engines of other projects run this file in environments of their own
(`bench/peers/`). Times are seconds; CPU time is that of the whole process, all threads together.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

Ids = list[int]


class UnsupportedError(Exception):
    """What this engine cannot do at all, in words."""


class Subject(Protocol):
    """An engine under measurement. Decoding is greedy and never ends early."""

    def load(self, threads: int) -> dict[str, Any]:
        """Get ready to serve; returns facts for the report. `parts`, if there, are seconds that loading consists of."""

    def prepare(self, concurrency: int, longest: int) -> None:
        """Make room for that many requests of that many tokens, prompt included; this takes none of the measured time.

        Raises UnsupportedError when there is no such room.
        """

    def add(self, request: int, prompt: Ids, tokens: int) -> None:
        """Queue a request for `tokens` new tokens."""

    def step(self) -> Sequence[int]:
        """Compute one step; returns the request of each new token."""

    def loss(self, ids: Ids) -> float:
        """Mean negative log-likelihood, in nats, of ids[1:] given what precedes each."""


@dataclass
class _Live:
    begun: float
    left: int
    last: float | None = None


def serve(subject: Subject, requests: Sequence[tuple[Ids, int]], concurrency: int) -> dict[str, Any]:
    """A closed loop: `concurrency` requests are outstanding until none are left.

    requests: prompt and number of new tokens. `decode` is what came after every request had its first token, and
    is there only when they all started together; `prefill` is what came before.
    """
    waiting = deque(enumerate(requests))
    live: dict[int, _Live] = {}
    first: list[float] = []
    gaps: list[float] = []
    produced = 0
    together = len(requests) <= concurrency
    subject.prepare(concurrency, max(len(prompt) + tokens for prompt, tokens in requests))
    prefill: dict[str, float] = {}
    cpu, begun = time.process_time(), time.perf_counter()
    while waiting or live:
        while waiting and len(live) < concurrency:
            i, (prompt, count) = waiting.popleft()
            live[i] = _Live(time.perf_counter(), count)
            subject.add(i, prompt, count)
        got = subject.step()
        now = time.perf_counter()
        produced += len(got)
        for i in got:
            request = live[i]
            if request.last is None:
                first.append(now - request.begun)
            else:
                gaps.append(now - request.last)
            request.last = now
            request.left -= 1
            if not request.left:
                del live[i]
        if together and not prefill and len(first) == len(requests):
            prefill = {"wall": now - begun, "cpu": time.process_time() - cpu, "tokens": produced}
    total = {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu, "tokens": produced}
    answer: dict[str, Any] = {
        "total": total,
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "first": first,
        "gaps": gaps,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    if prefill:
        answer["prefill"] = prefill
        answer["decode"] = {key: total[key] - prefill[key] for key in total}
    return answer


def load(subject: Subject, threads: int) -> dict[str, Any]:
    """What the subject says of itself, with the time that loading took."""
    wall, cpu = time.perf_counter(), time.process_time()
    facts = subject.load(threads)
    return {**facts, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _answer(subject: Subject, order: dict[str, Any]) -> Any:
    match order["do"]:
        case "load":
            return load(subject, order["threads"])
        case "serve":
            return serve(subject, [(ids, count) for ids, count in order["requests"]], order["concurrency"])
        case "loss":
            return subject.loss(order["ids"])
    raise ValueError(f"unknown order {order['do']!r}")


def main(subject: Subject) -> None:
    """Answer orders until stdin ends, and then end at once, whatever is being computed: the driver is gone.

    The first line says how long the process took to come here, since the monotonic time in $BENCH_STARTED, and the CPU
    time of that.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    started = float(os.environ["BENCH_STARTED"])
    print(json.dumps({"ok": {"wall": time.monotonic() - started, "cpu": time.process_time()}}), file=out)
    orders: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    while True:
        try:
            answer = {"ok": _answer(subject, json.loads(orders.get()))}
        except UnsupportedError as why:
            answer = {"unsupported": str(why)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)


def _read_orders(orders: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)
