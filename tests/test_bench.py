"""Measuring: the closed loop, the process between, what becomes of failures, and the table. No test asserts a speed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import VOCAB, capabilities, hash_engine, hash_logits
from tokenizers_for_tests import byte_level

from plankiln import cli
from plankiln.errors import EngineError, UsageError
from plankiln.runtime.bench import bundle_worker, worker
from plankiln.runtime.bench.bundle_worker import BundleSubject, Measured
from plankiln.runtime.bench.driver import Bench, Contender, Row
from plankiln.runtime.bench.machine import Busy, others
from plankiln.runtime.bench.results import medians, numbers, quantile
from plankiln.runtime.bench.worker import UnsupportedError, serve
from plankiln.runtime.bench.workload import WORKLOADS, select
from plankiln.runtime.llm import LLM

ROOT = Path(__file__).parent.parent
# A worker whose engine makes one token of each request a step. Its trouble is argv[1].
FAKE = f"""
import os, sys, time
sys.path.insert(0, {str(Path(worker.__file__).parent)!r})
import worker
trouble = sys.argv[1]
class Fake:
    def load(self, threads):
        if trouble == "orphan" and not os.fork():
            time.sleep(60)
        if trouble == "load":
            raise ValueError("no such model")
        print("a library that talks")
        self.left = {{}}
        return {{"version": f"7 on {{threads}}", "parts": {{"weights": 0.5}}}}
    def prepare(self, concurrency, longest):
        if trouble == "narrow" and concurrency > 1:
            raise worker.UnsupportedError("one at a time")
        if trouble == "short" and longest > 64:
            raise worker.UnsupportedError("too long")
        if trouble == "dies" and longest > 256:
            os._exit(3)
    def add(self, request, prompt, tokens):
        self.left[request] = tokens
    def step(self):
        while trouble == "endless":
            pass
        got = list(self.left)
        self.left = {{i: n - 1 for i, n in self.left.items() if n > 1}}
        return got
    def loss(self, ids):
        if trouble == "silent":
            raise worker.UnsupportedError("it gives no logits")
        return len(ids) / 10
worker.main(Fake())
"""


class Counting:
    """One token of each request a step; remembers how many were outstanding."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.outstanding: list[int] = []

    def load(self, threads: int) -> dict[str, Any]:
        return {}

    def prepare(self, concurrency: int, longest: int) -> None:
        self.prepared = (concurrency, longest)

    def add(self, request: int, prompt: list[int], tokens: int) -> None:
        self.left[request] = tokens

    def step(self) -> Sequence[int]:
        got = list(self.left)
        self.outstanding.append(len(got))
        self.left = {i: n - 1 for i, n in self.left.items() if n > 1}
        return got

    def loss(self, ids: list[int]) -> float:
        return 0.0


@pytest.fixture
def contender(tmp_path: Path) -> Callable[[str], Contender]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return lambda trouble: Contender(trouble, [sys.executable, str(script), trouble], {"formats": "none"})


def bench(contenders: Sequence[Contender], *names: str, strict: bool = False, repetitions: int = 2) -> list[Row]:
    run = Bench(vocab=1000, text=[1, 2, 3], repetitions=repetitions, say=lambda text: None, strict=strict)
    return list(run.run(contenders, select(names), [1]))


class TestServe:
    def test_all_at_once(self) -> None:
        subject = Counting()
        answer = serve(subject, [([1, 2], 3), ([3], 3)], 2)
        assert subject.prepared == (2, 5)
        assert (answer["total"]["tokens"], answer["prefill"]["tokens"], answer["decode"]["tokens"]) == (6, 2, 4)
        assert (len(answer["first"]), len(answer["gaps"]), answer["prompt_tokens"]) == (2, 4, 3)
        assert answer["peak_rss"] > 1 << 20
        assert answer["total"]["wall"] >= answer["decode"]["wall"] > 0

    def test_closed_loop(self) -> None:
        subject = Counting()
        answer = serve(subject, [([1], n) for n in (1, 2, 3, 1, 1)], 2)
        assert subject.outstanding == [2, 2, 2, 2]
        assert answer["total"]["tokens"] == 8
        assert "decode" not in answer


class TestBundle:
    @pytest.fixture
    def subject(self, monkeypatch: pytest.MonkeyPatch) -> BundleSubject:
        limits = capabilities(max_context=32, max_sequences=3)
        made = LLM(hash_engine(limits), byte_level(), (), kv_blocks=12)
        monkeypatch.setattr(LLM, "load", lambda path, *, threads, manifest_sha256: made)
        subject = BundleSubject(Path("here"), "ab")
        assert subject.load(1) == {"parts": {}}
        return subject

    def test_serves_what_is_asked_whatever_the_model_says(self, subject: BundleSubject) -> None:
        answer = serve(subject, [([1, 2, 3], 5), ([4], 2), ([5], 7)], 2)
        assert answer["total"]["tokens"] == 14
        assert len(answer["first"]) == 3

    def test_loss(self, subject: BundleSubject) -> None:
        ids = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 20)]
        expected = 0.0
        for i in range(1, 20):
            row = hash_logits(np.array(ids[:i], np.int32)).astype(np.float64)
            expected -= math.log(np.exp(row[ids[i]]) / np.exp(row).sum()) / 19
        assert subject.loss(ids) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(
        ("concurrency", "longest", "said"),
        [(1, 33, "the context is 32"), (4, 8, "the bundle serves 3"), (3, 20, "the cache holds 48")],
    )
    def test_refuses_what_cannot_run_as_asked(
        self, subject: BundleSubject, concurrency: int, longest: int, said: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=said):
            subject.prepare(concurrency, longest)

    def test_an_engine_s_failure_ends_the_measurement(self, subject: BundleSubject) -> None:
        subject._ready.engine.execute = lambda step: np.zeros((1, 1))  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match="logits of shape"):
            serve(subject, [([1], 2)], 1)

    def test_parts_of_loading_are_timed_and_what_was_wrapped_is_put_back(self) -> None:
        before = bundle_worker.llm.Tokenizer
        with bundle_worker._timed_parts() as parts, pytest.raises(Exception, match="tokenizer"):
            bundle_worker.llm.Tokenizer(b"no tokenizer")
        assert bundle_worker.llm.Tokenizer is before
        assert list(parts) == ["tokenizer"]


class TestRun:
    def test_rows(self, contender: Callable[[str], Contender]) -> None:
        rows = bench([contender("a"), contender("b")], "load", "decode-4", "loop-1")
        assert [(r["bench"], r["engine"]) for r in rows] == [
            (w, e) for w in ("load", "decode-4", "loop-1") for e in "ab"
        ]
        for row in rows:
            assert (row["perplexity"], row["threads"], row["version"]) == (1.35, 1, "7 on 1")
            assert row["machine"]["cores"] >= 1
            assert {"commit", "formats", "what"} <= set(row)
            assert len(row["repetitions"]) == 2
            assert set(row["median"]) == set(row["repetitions"][0])
            assert 0 <= row["median"]["others"] <= 1
        load, decode, loop = (row["median"] for row in rows[::2])
        assert load["load_weights_s"] == 0.5
        assert load["load_to_first_token_s"] >= load["load_s"]
        assert {"decode_per_cpu_s", "decode_per_s", "prefill_per_s", "gap_p99_ms"} <= set(decode)
        assert {"output_per_cpu_s", "ttft_p50_ms", "ttft_p99_ms"} <= set(loop)

    def test_one_contender_s_trouble_is_its_own(self, contender: Callable[[str], Contender]) -> None:
        names = ["load", "dies", "narrow", "short", "silent", "fine"]
        rows = bench([contender(n) for n in names], "prefill-512", "decode-4", repetitions=1)
        told = {(r["engine"], r["bench"]): r.get("failed") or r.get("skipped") or "measured" for r in rows}
        assert told["load", "prefill-512"] == told["load", "decode-4"] == "ValueError: no such model: load"
        assert told["dies", "prefill-512"] == told["dies", "decode-4"] == "its process ended with status 3: dies"
        assert (told["narrow", "prefill-512"], told["narrow", "decode-4"]) == ("measured", "one at a time")
        assert {told["short", w] for w in ("prefill-512", "decode-4")} == {"too long"}
        assert {told[n, w] for n in ("silent", "fine") for w in ("prefill-512", "decode-4")} == {"measured"}
        silent = next(r for r in rows if r["engine"] == "silent")
        assert (silent["perplexity"], silent["perplexity_of"]) == (None, "it gives no logits")

    def test_alone_its_trouble_is_an_error(self, contender: Callable[[str], Contender]) -> None:
        with pytest.raises(EngineError, match="no such model"):
            bench([contender("load")], "decode-1", strict=True)

    def test_a_child_that_a_library_leaves_behind_is_not_waited_for(
        self, contender: Callable[[str], Contender]
    ) -> None:
        begun = time.monotonic()
        assert "median" in bench([contender("orphan")], "load", repetitions=1)[0]
        assert time.monotonic() - begun < 30

    def test_a_worker_ends_with_its_driver(self, contender: Callable[[str], Contender]) -> None:
        process = subprocess.Popen(
            contender("endless").command,
            env={**os.environ, "BENCH_STARTED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin
        assert process.stdout
        process.stdin.write('{"do": "load", "threads": 1}\n{"do": "serve", "requests": [[[1], 2]], "concurrency": 1}\n')
        process.stdin.flush()
        assert [json.loads(process.stdout.readline()).keys() for _ in range(2)] == [{"ok"}, {"ok"}]
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()


class TestNumbers:
    def test_rates(self) -> None:
        took = {"tokens": 50, "wall": 2.0, "cpu": 4.0}
        answer = {"total": took, "prefill": took, "decode": took, "prompt_tokens": 100, "peak_rss": 3 << 20}
        answer |= {"first": [0.1, 0.3], "gaps": [0.01] * 99 + [0.5]}
        decode = numbers(WORKLOADS["decode-1"], answer)
        assert (decode["decode_per_cpu_s"], decode["decode_per_s"], decode["prefill_per_s"]) == (12.5, 25, 50)
        assert (decode["gap_p50_ms"], decode["gap_p99_ms"], decode["ttft_p50_ms"]) == (10, 500, 300)
        assert decode["peak_rss_mib"] == 3
        assert numbers(WORKLOADS["loop-1"], answer)["output_per_cpu_s"] == 12.5

    def test_medians_and_quantiles(self) -> None:
        assert medians([{"x": 1.0}, {"x": 123456.0}, {"x": 2.00004}]) == {"x": 2.0}
        assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 2, 3, 3]

    def test_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        before, after = Busy(everyone=10, stolen=0, wall=0), Busy(everyone=17, stolen=1, wall=5)
        assert others(before, after, own=4) == {"others": 0.3, "stolen": 0.1}
        assert others(before, after, own=9)["others"] == 0


class TestWorkloads:
    def test_are_seeded_and_stay_inside_the_vocabulary(self) -> None:
        for workload in WORKLOADS.values():
            requests = workload.requests(500)
            assert requests == workload.requests(500)
            assert all(0 <= i < 500 for prompt, _ in requests for i in prompt)
        assert [len(p) + n for p, n in WORKLOADS["decode-16"].requests(500)] == [257] * 16
        assert {p[0] for p, _ in WORKLOADS["decode-16"].requests(50000)} != {0}
        assert all(64 <= len(p) <= 256 and 64 <= n <= 256 for p, n in WORKLOADS["loop-32"].requests(500))

    def test_select(self) -> None:
        assert select([]) == list(WORKLOADS.values())
        assert [w.name for w in select(["loop-1", "load"])] == ["load", "loop-1"]
        with pytest.raises(UsageError, match="no workload `decode`"):
            select(["decode"])


def test_the_command_prints_a_line_for_each_row(
    contender: Callable[[str], Contender], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle_worker, "measured", lambda path: Measured(contender("fine"), 1000, [1, 2]))
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "here", "-w", "decode-1", "-w", "prefill-512", "--threads", "1", "--repetitions", "1"])
    out, err = capsys.readouterr()
    assert not done.value.code
    assert [json.loads(line)["bench"] for line in out.splitlines()] == ["decode-1", "prefill-512"]
    assert "fine, threads 1: decode-1, repetition 1 of 1" in err
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "here", "-w", "decode"])
    assert done.value.code == 2
    assert "there are load, decode-1" in capsys.readouterr().err


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import compare  # type: ignore[import-not-found]

    return compare


def test_the_table_shows_where_we_lose(compare: Any) -> None:
    def row(engine: str, name: str, **median: float) -> Row:
        median["others"] = 0.25
        return {"engine": engine, "bench": name, "threads": 1, "median": median, "perplexity": 12.345}

    rows = [
        row("plankiln", "decode-1", decode_per_cpu_s=90, peak_rss_mib=300),
        row("x", "decode-1", decode_per_cpu_s=120, peak_rss_mib=600),
        row("y", "decode-1", decode_per_cpu_s=60, peak_rss_mib=400),
        row("plankiln", "load", load_to_first_token_s=0.25),
        {"engine": "y", "bench": "load", "threads": 1, "skipped": "no", "perplexity": None},
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in compare.table(rows).splitlines()]
    assert lines[0] == ["", "plankiln", "x", "y", "ours / best peer", "others' CPU"]
    found = {line[0]: line[1:] for line in lines}
    assert found["decode-1, tokens per CPU-second"] == ["90", "120", "60", "0.75", "25%"]
    assert found["peak RSS of one stream, MiB"] == ["300", "600", "400", "1.33", "25%"]
    assert found["load to first token, ms"] == ["250", "–", "–", "", "25%"]
    assert found["perplexity"] == ["12.3", "12.3", "12.3", "", ""]


def test_peers_that_are_not_there_are_left_out(compare: Any, tmp_path: Path) -> None:
    assert compare.peers(tmp_path) == []
    for path in ("ort/bin/python", "models/ort-int4"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "models/ort-int4.seconds").write_text("12.5\n")
    (found,) = compare.peers(tmp_path)
    assert (found.name, found.about["build_s"]) == ("ORT-GenAI int4", 12.5)


@pytest.mark.peer
def test_every_peer_answers(compare: Any) -> None:
    """Needs what `make bench-peers` has made."""
    found = compare.peers(Path(os.environ.get("PEERS", "~/.cache/plankiln/peers")).expanduser())
    assert len(found) == len(compare.PEERS)
    run = Bench(vocab=49152, text=list(range(1000, 1100)), repetitions=1, say=print, strict=True)
    for row in run.run(found, select(["load", "decode-4"]), [1]):
        assert row["median"]
        assert row["perplexity"] > 1
