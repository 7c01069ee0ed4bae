"""Assign every activation an offset in one arena, in bytes per token: the arena grows with the step's limit."""

from __future__ import annotations

from dataclasses import dataclass

from plankiln.compiler.cpu.program import Buffer, Program

ALIGNMENT = 64  # so that a buffer starts on a cache line whatever the step's token limit


@dataclass(frozen=True)
class Arena:
    """`offsets[buffer] * max_tokens` is where a buffer starts; the arena is bytes_per_token * max_tokens long."""

    offsets: dict[Buffer, int]
    bytes_per_token: int


def plan_memory(program: Program, outputs: tuple[str, ...] = ("logits",)) -> Arena:
    """Place the buffers so that two share bytes only when they are never alive together.

    A buffer is alive from a call that writes it without reading it to the last call that reads it before the next such
    write. Largest first, each at the lowest free offset. `outputs` live outside the arena.
    """
    alive = _alive(program)
    buffers = sorted((b for b in alive if b.name not in outputs), key=lambda b: (-b.row_bytes, b.name))
    offsets: dict[Buffer, int] = {}
    for buffer in buffers:
        size = _aligned(buffer.row_bytes)
        taken = sorted((offsets[o], offsets[o] + _aligned(o.row_bytes)) for o in offsets if alive[o] & alive[buffer])
        start = 0
        for low, high in taken:
            if start + size <= low:
                break
            start = max(start, high)
        offsets[buffer] = start
    return Arena(offsets, max((offsets[b] + _aligned(b.row_bytes) for b in offsets), default=0))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _alive(program: Program) -> dict[Buffer, set[int]]:
    """For each buffer the calls during which its content matters."""
    alive: dict[Buffer, set[int]] = {}
    since: dict[Buffer, int] = {}
    for i, call in enumerate(program.calls):
        for buffer in call.read:
            alive.setdefault(buffer, set()).update(range(since[buffer], i + 1))
        for buffer in call.write:
            alive.setdefault(buffer, set()).add(i)
            if buffer not in call.read:
                since[buffer] = i
    return alive
