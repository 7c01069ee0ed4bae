"""Low-bit weights whose scales are searched for the least squared error, where `quantize` covers the extremes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.quantize.formats import BlockFormat, Blocks, Floats, quantize

SHRINK = tuple(float(factor) for factor in np.arange(0.98, 0.59, -0.03))  # of a symmetric group's scale
ENDS = (1.0, 0.94, 0.88, 0.82, 0.76)  # of either end of a group with a minimum
MIRROR = -8 / 7  # the extreme value on the shorter side of 4 bits
CHUNK = 1 << 16  # weights searched at a time: they and their temporaries stay in a core's cache

_Parameters = tuple[NDArray[Any], NDArray[Any] | None]


def quantize_clipped(weight: NDArray[Any], format: BlockFormat, importance: NDArray[Any] | None) -> Blocks:
    """Like `quantize`, but each group's scale (and minimum) is the one of a grid of narrower ranges with the least
    squared error, that of `quantize` among them: no group ends up with a larger error, but for float32 rounding.

    weight [N, K] finite; importance [K]: what a squared error in each column costs, not negative; None: 1 everywhere.
    Raises as `quantize` does.
    """
    n, k = weight.shape
    costs = None if importance is None else importance.astype(np.float32).reshape(-1, format.group)
    rows = max(1, CHUNK // k)
    parts = [_search(weight[start : start + rows], format, costs) for start in range(0, max(n, 1), rows)]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Blocks(
        format,
        np.concatenate([part.q for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(minima) if minima else None,
    )


def _search(weight: NDArray[Any], format: BlockFormat, costs: Floats | None) -> Blocks:
    nearest = quantize(weight, format)
    groups = weight.astype(np.float32).reshape(*nearest.scale.shape, format.group)
    searched = _Groups(groups, format, costs)
    scale, minimum = nearest.scale.copy(), None if nearest.minimum is None else nearest.minimum.copy()
    least = searched.error((scale, minimum))
    for candidate in _grid(nearest):
        error = searched.error(candidate)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(scale, candidate[0], where=better)
        if minimum is not None and candidate[1] is not None:
            np.copyto(minimum, candidate[1], where=better)
    q = searched.rounded((scale, minimum)).astype(nearest.q.dtype).reshape(weight.shape)
    return Blocks(format, q, scale, minimum)


def _grid(nearest: Blocks) -> list[_Parameters]:
    """Narrower ranges than those of round-to-nearest, in the types that are stored."""
    scale = nearest.scale.astype(np.float32)
    kind = nearest.scale.dtype
    if nearest.minimum is None:
        mirrored = (MIRROR,) if nearest.format.bits == 4 else ()
        factors = (*SHRINK, *(MIRROR * factor for factor in (1.0, *SHRINK) if mirrored))
        return [((scale * np.float32(factor)).astype(kind), None) for factor in factors]
    low = nearest.minimum.astype(np.float32)
    levels = np.float32((1 << nearest.format.bits) - 1)
    high = low + scale * levels
    grid: list[_Parameters] = []
    for below, above in list(product(ENDS, ENDS))[1:]:
        minimum = (low * np.float32(below)).astype(kind)
        grid.append((((high * np.float32(above) - minimum.astype(np.float32)) / levels).astype(kind), minimum))
    return grid


class _Groups:
    """The weights of one chunk [rows, groups, columns], and room for what is computed of them over and over."""

    def __init__(self, values: Floats, format: BlockFormat, costs: Floats | None) -> None:
        self._values = values
        self._costs = costs
        self._low = -format.offset
        self._high = (1 << format.bits) - 1 - format.offset
        self._room = np.empty_like(values)

    def rounded(self, parameters: _Parameters) -> Floats:
        """The nearest q of every weight, in a buffer that the next call overwrites."""
        scale, minimum = parameters
        wide = scale.astype(np.float32)[..., None]
        inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)
        room = self._room
        if minimum is None:
            np.multiply(self._values, inverse, out=room)
        else:
            np.subtract(self._values, minimum.astype(np.float32)[..., None], out=room)
            np.multiply(room, inverse, out=room)
        np.rint(room, out=room)
        np.maximum(room, np.float32(self._low), out=room)
        np.minimum(room, np.float32(self._high), out=room)
        return room

    def error(self, parameters: _Parameters) -> Floats:
        """The squared error of each group [rows, groups]."""
        scale, minimum = parameters
        room = self.rounded(parameters)
        np.multiply(room, scale.astype(np.float32)[..., None], out=room)
        if minimum is not None:
            np.add(room, minimum.astype(np.float32)[..., None], out=room)
        np.subtract(room, self._values, out=room)
        if self._costs is None:
            total: Floats = np.einsum("rgc,rgc->rg", room, room)
        else:
            np.multiply(room, room, out=room)
            total = np.einsum("rgc,gc->rg", room, self._costs)
        return total
