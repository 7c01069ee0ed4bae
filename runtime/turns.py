"""One thread at a time, first come first served: a lock alone lets the thread that has just left it in again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """A queue of threads, each of which waits for the lock of the one ahead of it.

    An interrupted wait ends early and lets those behind it through: `_turn` then still keeps them apart. What is done
    in a turn may take another inside: its thread does not queue behind those that wait for it.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._last = threading.RLock()
        self._owner: int | None = None  # an interrupt may leave it behind, so it alone lets nobody in

    def take(self, work: Callable[[], Result]) -> Result:
        """Wait for the thread's turn and do the work in it."""
        if self._owner == threading.get_ident():
            with self._turn:
                return work()
        mine = threading.RLock()
        with mine:
            ahead, self._last = self._last, mine  # no call in between, so no other thread comes there
            with ahead, self._turn:
                self._owner = threading.get_ident()
                try:
                    return work()
                finally:
                    self._owner = None
