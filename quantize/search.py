"""Choose one option for each unit: the least total cost under a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One way to store a unit. cost: what it loses; any unit, as long as costs of several units add up."""

    name: str
    nbytes: int
    cost: float


def cheapest_bytes(units: Sequence[Sequence[Option]]) -> int:
    """Bytes of the smallest choice."""
    return sum(min(option.nbytes for option in options) for options in units)


def choose(units: Sequence[Sequence[Option]], budget: int) -> list[Option]:
    """One option for each unit, of at most `budget` bytes together.

    Starts from the smallest options and takes, again and again, the step that saves most cost for a byte among those
    that still fit. The result's cost exceeds the least possible by no more than one such step saves. The same input
    gives the same choice. ValueError when even the smallest options do not fit.
    """
    chosen = [min(options, key=lambda option: (option.nbytes, option.cost)) for options in units]
    left = budget - sum(option.nbytes for option in chosen)
    if left < 0:
        raise ValueError(f"{budget} bytes are {-left} too few")
    while True:
        best, best_rate = None, 0.0
        for index, options in enumerate(units):
            now = chosen[index]
            for option in options:
                more = option.nbytes - now.nbytes
                if 0 < more <= left and (now.cost - option.cost) / more > best_rate:
                    best, best_rate = (index, option), (now.cost - option.cost) / more
        if best is None:
            return chosen
        left -= best[1].nbytes - chosen[best[0]].nbytes
        chosen[best[0]] = best[1]
