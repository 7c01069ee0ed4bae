"""A bundle as what is measured: `python -m plankiln.runtime.bench.bundle_worker BUNDLE MANIFEST_SHA256`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import plankiln.bundle
from plankiln.errors import EngineError
from plankiln.runtime import cpu, llm
from plankiln.runtime.bench import worker
from plankiln.runtime.bench.driver import Contender
from plankiln.runtime.bench.text import TEXT
from plankiln.runtime.llm import LLM
from plankiln.runtime.sampling import SamplingParams
from plankiln.runtime.text import Tokenizer

_CHUNK = 64


@dataclass(frozen=True)
class Measured:
    """A bundle as a contender; vocab and the token ids of `TEXT`, as far as its context goes, are for everyone."""

    contender: Contender
    vocab: int
    text: list[int]


def measured(path: Path | str) -> Measured:
    """The bundle that `path` means. Its workers accept no other manifest. Raises BundleError as `open_bundle` does."""
    bundle = plankiln.bundle.open_bundle(path)
    manifest = bundle.manifest
    tokenizer = Tokenizer(
        bundle.tokenizer_json, special_tokens=bundle.manifest.special_tokens, add_bos=bundle.manifest.add_bos
    )
    about = {
        "bundle": manifest.digest,
        "recipe": manifest.name,
        "target": manifest.target.name,
        "isa": manifest.target.isa,
        "formats": manifest.formats.model_dump(),
        "version": manifest.plankiln,
        "source": manifest.source.digest,
    }
    command = [sys.executable, "-m", __name__, str(bundle.path), bundle.manifest_sha256]
    contender = Contender("plankiln", command, about)
    text = tokenizer.encode(TEXT)[: manifest.limits.max_context]
    return Measured(contender, manifest.model.vocab_size, text)


class BundleSubject:
    """A bundle served by `LLM`; every token goes through the same loop, sampling and detokenizer as a user's."""

    def __init__(self, bundle: Path, manifest_sha256: str) -> None:
        self._bundle = bundle
        self._sha256 = manifest_sha256
        self._llm: LLM | None = None
        self._requests: dict[int, int] = {}

    def load(self, threads: int) -> dict[str, Any]:
        with _timed_parts() as parts:
            self._llm = LLM.load(self._bundle, threads=threads, manifest_sha256=self._sha256)
        return {"parts": parts}

    def prepare(self, concurrency: int, longest: int) -> None:
        limits, slots = self._ready.engine.capabilities, self._ready.scheduler.slots
        cache = self._ready.pool.total * limits.block_size
        if longest > limits.max_context:
            raise worker.UnsupportedError(f"a request of {longest} tokens, but the context is {limits.max_context}")
        if concurrency > slots:
            raise worker.UnsupportedError(f"{concurrency} requests at a time, but the bundle serves {slots}")
        if concurrency * longest > cache:
            raise worker.UnsupportedError(f"{concurrency} requests of {longest} tokens, but the cache holds {cache}")

    def add(self, request: int, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._requests[self._ready.submit(prompt, params)] = request

    def step(self) -> Sequence[int]:
        got: list[int] = []
        for delta in self._ready.step():
            if delta.output and delta.output.error:
                raise EngineError(delta.output.error)
            got += [self._requests[delta.request_id]] * len(delta.token_ids)
        return got

    def loss(self, ids: list[int]) -> float:
        logits = self._ready.logits(ids)[:-1]
        return mean_loss(logits, ids[1:])

    @property
    def _ready(self) -> LLM:
        if self._llm is None:
            raise EngineError("nothing is loaded")
        return self._llm


def mean_loss(logits: np.ndarray[Any, np.dtype[np.float32]], targets: Sequence[int]) -> float:
    """Mean over rows of -log softmax(logits)[target] in float64. logits: [len(targets), vocab]."""
    total = 0.0
    for start in range(0, len(targets), _CHUNK):
        rows = logits[start : start + _CHUNK].astype(np.float64)
        chosen = rows[np.arange(len(rows)), targets[start : start + _CHUNK]]
        most = rows.max(axis=1)
        total += float((most + np.log(np.exp(rows - most[:, None]).sum(axis=1)) - chosen).sum())
    return total / len(targets)


@contextmanager
def _timed_parts() -> Iterator[dict[str, float]]:
    """Seconds spent in what `LLM.load` calls, by name; those functions are wrapped for the time of the block."""
    parts: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[name] = time.perf_counter() - begun

        return call

    places: list[tuple[Any, str, str]] = [
        (plankiln.bundle, "open_bundle", "verify"),
        (llm, "Tokenizer", "tokenizer"),
        (cpu, "CpuEngine", "engine"),
    ]
    originals = [getattr(owner, attribute) for owner, attribute, _ in places]
    for (owner, attribute, name), original in zip(places, originals, strict=True):
        setattr(owner, attribute, timed(name, original))
    try:
        yield parts
    finally:
        for (owner, attribute, _), original in zip(places, originals, strict=True):
            setattr(owner, attribute, original)


if __name__ == "__main__":
    worker.main(BundleSubject(Path(sys.argv[1]), sys.argv[2]))
