"""NVFP4: e2m1 values in groups of 16 columns, each with an e4m3 scale, and one float32 scale for the whole matrix.

As checkpoints store it: two columns in a byte, the even one low. value = e2m1 · group scale · matrix scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.quantize.formats import E4M3, LARGEST_E4M3, Floats, round_e4m3

GROUP = 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # by the three low bits; the fourth is the sign
_VALUES = np.concatenate([E2M1, -E2M1])
_TIES = (E2M1[1:] + E2M1[:-1]) / 2


@dataclass(frozen=True)
class Nvfp4Weight:
    """packed uint8 [N, K/2], group_scale e4m3 [N, K/16], scale: the matrix's."""

    packed: NDArray[np.uint8]
    group_scale: NDArray[Any]
    scale: float

    def dequantize(self) -> Floats:
        """[N, K] float32; each value is two roundings of the exact product at most."""
        codes = np.stack([self.packed & 15, self.packed >> 4], -1).reshape(len(self.packed), -1)
        scales = self.group_scale.astype(np.float32) * np.float32(self.scale)
        values: Floats = _VALUES[codes] * np.repeat(scales, GROUP, axis=1)
        return values


def quantize_nvfp4(weight: NDArray[Any]) -> Nvfp4Weight:
    """Round to nearest, ties to the even code. weight [N, K] finite, K a multiple of 16.

    A group of zeros, or one so small that its scale rounds to zero in e4m3, is stored as zeros.
    """
    n, k = weight.shape
    groups = weight.astype(np.float32).reshape(n, k // GROUP, GROUP)
    peak = np.abs(groups).max(-1)
    scale = float(peak.max(initial=0.0)) / (6 * LARGEST_E4M3) or 1.0
    group_scale = round_e4m3(peak / np.float32(6 * scale))
    step = group_scale * np.float32(scale)
    inverse = np.divide(np.float32(1.0), step, out=np.zeros_like(step), where=step > 0)
    with np.errstate(over="ignore"):
        magnitudes = np.abs(groups) * inverse[..., None]
    below, above = np.searchsorted(_TIES, magnitudes, "left"), np.searchsorted(_TIES, magnitudes, "right")
    codes = np.where(below % 2 == 0, below, above)  # they differ at a tie only, by one
    codes = (codes | np.where(np.signbit(groups), 8, 0)).astype(np.uint8).reshape(n, k)
    return Nvfp4Weight(codes[:, 0::2] | codes[:, 1::2] << 4, group_scale.astype(E4M3), scale)
