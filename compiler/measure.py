"""What each stage of a build takes: seconds, and the peak of memory."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_PROC = Path("/proc/self")


class Progress(Protocol):
    """Is told what a build is doing."""

    def stage(self, name: str, target: str) -> None:
        """A stage begins; `target` is empty for a stage that all targets share."""

    def note(self, text: str) -> None:
        """Something a user should know, in one line."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` units of the present stage's work are done; the total is 0 when unknown."""


@dataclass
class Clock:
    """Tells the progress what begins, and keeps what each stage took: seconds, and peak resident bytes of this process.

    Where the kernel does not let the peak start anew, that of a stage is the process's so far.
    """

    progress: Progress
    target: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    peak_rss: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        self.progress.stage(name, self.target)
        start = time.perf_counter()
        with suppress(OSError):
            (_PROC / "clear_refs").write_text("5")  # VmHWM starts anew
        yield
        self.seconds[name] = round(time.perf_counter() - start, 4)
        if peak := process_bytes("VmHWM"):
            self.peak_rss[name] = peak

    def children_peak_rss(self) -> int:
        """The largest peak of resident bytes among the processes that this one has waited for."""
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def process_bytes(name: str) -> int:
    """A size that /proc/self/status states, such as VmRSS or VmSize; 0 where there is none."""
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", (_PROC / "status").read_text(), re.M):
            return int(found[1]) << 10
    return 0
