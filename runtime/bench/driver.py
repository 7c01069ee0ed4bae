"""Starts workers, asks them in turn, and makes rows of what they answer.

Whoever is compared is measured in one run: repetition by repetition, each contender once, in rotating order. A busy
neighbour or a slower clock then hits all of them alike.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import exp
from types import TracebackType
from typing import Any, Self

from plankiln.errors import EngineError
from plankiln.runtime.bench.machine import Busy, commit, hardware, others
from plankiln.runtime.bench.results import Numbers, load_numbers, medians, numbers, tidy
from plankiln.runtime.bench.worker import UnsupportedError
from plankiln.runtime.bench.workload import WORKLOADS, Request, Workload

Row = dict[str, Any]
_LONGEST_S = 900
_WARM_UP = 4


@dataclass(frozen=True)
class Contender:
    """Whoever is measured. command: starts its worker. about: facts that go into each of its rows."""

    name: str
    command: Sequence[str]
    about: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Worker:
    """A running worker process. Raises EngineError when it dies, hangs or reports an error."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        environment = {**os.environ, **contender.environment, "BENCH_STARTED": str(time.monotonic())}
        self._process = subprocess.Popen(
            contender.command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.start: dict[str, float] = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def ask(self, do: str, **order: Any) -> Any:
        """Its answer. Raises UnsupportedError when it says so."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has died: reading tells
            print(json.dumps({"do": do, **order}), file=self._process.stdin, flush=True)
        return self._read()

    def serve(self, requests: Sequence[Request], concurrency: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("serve", requests=requests, concurrency=concurrency)
        return answer

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # its children too: some libraries leave one behind
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> Any:
        assert self._process.stdout
        watchdog = threading.Timer(_LONGEST_S, self._kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise EngineError(f"its process ended with status {self._process.wait()}", self.contender.name)
        answer = json.loads(line)
        if "unsupported" in answer:
            raise UnsupportedError(answer["unsupported"])
        if "error" in answer:
            raise EngineError(answer["error"], self.contender.name)
        return answer["ok"]


@dataclass
class _Entry:
    """A contender at one number of threads; `dead` says why it is measured no more."""

    contender: Contender
    threads: int
    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    perplexity: float | None = None
    note: str = ""
    dead: str = ""


class Bench:
    """One run. text: token ids of `TEXT`, whose perplexity is taken. vocab: entries that prompts are drawn from.

    say: told what is going on. strict: an error of a contender is raised, not made a row with `failed`.
    """

    def __init__(
        self, *, vocab: int, text: Sequence[int], repetitions: int, say: Callable[[str], None], strict: bool
    ) -> None:
        self._vocab = vocab
        self._text = list(text)
        self._repetitions = repetitions
        self._say = say
        self._strict = strict
        self._common = {"machine": hardware(), "commit": commit()}

    def run(
        self, contenders: Sequence[Contender], workloads: Sequence[Workload], threads: Sequence[int]
    ) -> Iterator[Row]:
        """A row for each number of threads, workload and contender, as soon as it is known."""
        for count in threads:
            entries = [_Entry(contender, count) for contender in contenders]
            with ExitStack() as stack:
                for entry in entries:
                    with self._spared(entry):
                        self._begin(entry, stack)
                for workload in workloads:
                    yield from self._measure(entries, workload)

    def _begin(self, entry: _Entry, stack: ExitStack) -> None:
        self._say(f"{entry.contender.name}, threads {entry.threads}: loading")
        entry.perplexity, entry.note = self._perplexity(entry)
        entry.worker = stack.enter_context(Worker(entry.contender))
        entry.facts = entry.worker.ask("load", threads=entry.threads)
        prompt, _ = WORKLOADS["decode-1"].requests(self._vocab)[0]
        with suppress(UnsupportedError):  # a small context: its workloads will say so
            entry.worker.serve([(prompt, _WARM_UP)], 1)

    def _perplexity(self, entry: _Entry) -> tuple[float | None, str]:
        """In a process of its own, for all those logits would show in the peak memory of what follows."""
        with Worker(entry.contender) as worker:
            worker.ask("load", threads=entry.threads)
            try:
                loss = worker.ask("loss", ids=self._text)
            except UnsupportedError as why:
                return None, str(why)
        return tidy(exp(loss)), f"{len(self._text)} tokens of plankiln.runtime.bench.text"

    def _measure(self, entries: list[_Entry], workload: Workload) -> Iterator[Row]:
        requests = workload.requests(self._vocab)
        found: list[list[Numbers]] = [[] for _ in entries]
        skipped = [entry.dead for entry in entries]
        for repetition in range(self._repetitions):
            for turn in range(len(entries)):
                i = (turn + repetition) % len(entries)
                if skipped[i] or entries[i].dead:
                    continue
                what = f"{workload.name}, repetition {repetition + 1} of {self._repetitions}"
                self._say(f"{entries[i].contender.name}, threads {entries[i].threads}: {what}")
                try:
                    with self._spared(entries[i]):
                        found[i].append(self._once(entries[i], workload, requests))
                except UnsupportedError as why:
                    skipped[i] = str(why)
        for entry, repetitions, reason in zip(entries, found, skipped, strict=True):
            yield self._row(entry, workload, repetitions, reason)

    def _once(self, entry: _Entry, workload: Workload, requests: Sequence[Request]) -> Numbers:
        before, driver = Busy.now(), time.process_time()
        if workload.kind == "load":
            with Worker(entry.contender) as fresh:
                loaded = fresh.ask("load", threads=entry.threads)
                answer = fresh.serve(requests, workload.concurrency)
            result = load_numbers(fresh.start, loaded, answer)
            own = fresh.start["cpu"] + loaded["cpu"] + answer["total"]["cpu"]
        else:
            assert entry.worker
            answer = entry.worker.serve(requests, workload.concurrency)
            result, own = numbers(workload, answer), answer["total"]["cpu"]
        return result | others(before, Busy.now(), own + time.process_time() - driver)

    @contextmanager
    def _spared(self, entry: _Entry) -> Iterator[None]:
        """The others go on when a contender fails."""
        try:
            yield
        except EngineError as error:
            if self._strict:
                raise
            entry.dead = str(error)
            self._say(f"{entry.contender.name}: {error}")

    def _row(self, entry: _Entry, workload: Workload, repetitions: list[Numbers], skipped: str) -> Row:
        row: Row = {"bench": workload.name, "what": workload.about, "engine": entry.contender.name}
        row["threads"] = entry.threads
        if repetitions:
            row["median"] = medians(repetitions)
            row["repetitions"] = [{key: tidy(value) for key, value in r.items()} for r in repetitions]
        else:
            row["failed" if entry.dead else "skipped"] = entry.dead or skipped
        row["perplexity"] = entry.perplexity
        row["perplexity_of"] = entry.note
        facts = {key: value for key, value in entry.facts.items() if isinstance(value, str)}
        return {**row, **entry.contender.about, **facts, **self._common}
