"""What is asked of an engine: seeded prompts of token ids, and how many new tokens each shall get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plankiln.errors import UsageError
from plankiln.runtime.bench.worker import Ids

Request = tuple[Ids, int]
_PROMPT = 128
_DECODED = 128
_LONG_PROMPT = 512
_MIXED = (64, 256)
_LOOP_REQUESTS = {1: 3, 4: 8, 16: 32, 32: 48}


@dataclass(frozen=True)
class Workload:
    """Requests to be served, `concurrency` at a time. kind: which of the times are its result."""

    name: str
    kind: Literal["decode", "prefill", "loop", "load"]
    concurrency: int
    about: str

    def requests(self, vocab: int) -> list[Request]:
        """The same for every engine of this vocabulary."""
        if self.kind == "prefill":
            return [(_ids(_LONG_PROMPT, "prefill", vocab), 1)]
        if self.kind == "load":
            return [(_ids(16, "load", vocab), 1)]
        if self.kind == "decode":
            prompts = [_ids(_PROMPT, f"decode {i}", vocab) for i in range(self.concurrency)]
            return [(prompt, 1 + _DECODED) for prompt in prompts]
        lengths = random.Random("lengths")
        sizes = [(lengths.randint(*_MIXED), lengths.randint(*_MIXED)) for _ in range(_LOOP_REQUESTS[self.concurrency])]
        return [(_ids(prompt, f"loop {i}", vocab), tokens) for i, (prompt, tokens) in enumerate(sizes)]


def _ids(count: int, seed: str, vocab: int) -> Ids:
    """Ids away from both ends of the vocabulary, where special tokens are."""
    chosen = random.Random(seed)
    return [chosen.randrange(vocab // 100, vocab - vocab // 10) for _ in range(count)]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("load", "load", 1, "a new process: load, and the first token after 16"),
        Workload("decode-1", "decode", 1, "one stream, 128 prompt + 128 generated"),
        Workload("prefill-512", "prefill", 1, "a prompt of 512"),
        *(Workload(f"decode-{n}", "decode", n, f"{n} streams at once, 128 + 128 each") for n in (4, 16, 32)),
        *(
            Workload(f"loop-{n}", "loop", n, f"{_LOOP_REQUESTS[n]} requests of 64–256 + 64–256, {n} at a time")
            for n in _LOOP_REQUESTS
        ),
    )
}


def select(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, in our order; all for none. Raises UsageError for an unknown name."""
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UsageError(f"no workload `{unknown[0]}`", hint=f"there are {', '.join(WORKLOADS)}")
    return [workload for name, workload in WORKLOADS.items() if not names or name in names]
