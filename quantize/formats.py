"""Low-bit weight formats and the numpy twins of what kernels do with them.

A weight is [N, K]. Blocks: group j of a row covers columns j·group … (j+1)·group-1 and has a scale. Two kinds:
symmetric, w = scale · q with signed q; with a minimum, w = scale · q + minimum with unsigned q.
Scales and minima are float16, as GGUF's blocks store them, so such blocks are kept bit for bit; or float32. A group of
all K columns is a per-channel scale. Fp8: w = scale · q with q in e4m3 and one float32 scale for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
LARGEST_HALF = 65504.0
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = 448.0
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # of a group of weights; with less they count as zero
SMALLEST_PEAK = 1e-30  # a group of activations below it counts as zero: 127 / peak must stay finite


@dataclass(frozen=True)
class BlockFormat:
    """bits: 4 or 8. group: columns that share a scale. minimum: whether each group stores one. scales: their type."""

    bits: Literal[4, 8]
    group: int
    minimum: bool = False
    scales: Literal["float16", "float32"] = "float16"

    @property
    def name(self) -> str:
        """What reports and manifests call it: `int4 g32`, `int4+min g32`, `int8 g32`, `int8 per channel`."""
        if self.bits == 8 and self.scales == "float32":
            return "int8 per channel"
        return f"int{self.bits}{'+min' if self.minimum else ''} g{self.group}"

    @property
    def offset(self) -> int:
        """What is added to a stored value to make it unsigned, as the kernels hold it."""
        return 0 if self.minimum else 1 << (self.bits - 1)

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] weight: values, scales, minima."""
        scale = np.dtype(self.scales).itemsize
        return n * k * self.bits // 8 + n * (k // self.group) * (2 * scale if self.minimum else scale)


@dataclass(frozen=True)
class Fp8Format:
    """e4m3 values, and a float32 scale for each row."""

    name = "fp8"

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] weight: values and scales."""
        return n * k + 4 * n


@dataclass(frozen=True)
class Fp8Weight:
    """q [N, K] e4m3, scale [N] float32."""

    q: NDArray[Any]
    scale: Floats

    def dequantize(self) -> Floats:
        """[N, K] float32: each product rounds once."""
        return self.q.astype(np.float32) * self.scale[:, None]


@dataclass(frozen=True)
class Blocks:
    """A quantized weight. q [N, K]: int8, or uint8 with a minimum. scale, minimum [N, K/group]; minimum may be None.

    Scales and minima have the type that the format names.
    """

    format: BlockFormat
    q: NDArray[Any]
    scale: NDArray[Any]
    minimum: NDArray[Any] | None = None

    def dequantize(self) -> Floats:
        """[N, K] float32; the product is exact, the sum rounds once."""
        grouped = self.q.reshape(*self.scale.shape, self.format.group).astype(np.float32)
        values = grouped * self.scale.astype(np.float32)[..., None]
        if self.minimum is not None:
            values += self.minimum.astype(np.float32)[..., None]
        return values.reshape(self.q.shape)

    def unsigned(self) -> NDArray[np.uint8]:
        """q as the kernels hold it: 0 … 2^bits-1."""
        return (self.q.astype(np.int16) + self.format.offset).astype(np.uint8)


def quantize(weight: NDArray[Any], format: BlockFormat) -> Blocks:
    """Round to nearest, each group by its own extremes. weight [N, K] finite, K a multiple of the group.

    Raises ValueError for another K, OverflowError when a group needs a scale that float16 cannot hold.
    """
    n, k = weight.shape
    if k % format.group:
        raise ValueError(f"{k} columns are not a multiple of the group {format.group}")
    groups = weight.astype(np.float32).reshape(n, k // format.group, format.group)
    levels = (1 << format.bits) - 1
    if format.minimum:
        low = np.minimum(groups.min(-1), 0.0)
        minimum = _scales(low, format)
        scale = _scales((groups.max(-1).clip(min=0) - minimum.astype(np.float32)) / levels, format)
        q = _round(groups - minimum.astype(np.float32)[..., None], scale, 0, levels)
        return Blocks(format, q.astype(np.uint8).reshape(n, k), scale, minimum)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    # The extreme value lands exactly on -2^(bits-1), the longer side.
    scale = _scales(peak / np.float32(-format.offset), format)
    q = _round(groups, scale, -format.offset, format.offset - 1)
    return Blocks(format, q.astype(np.int8).reshape(n, k), scale)


def _scales(values: Floats, format: BlockFormat) -> Halves | Floats:
    if format.scales == "float16" and np.abs(values).max(initial=0.0) > LARGEST_HALF:
        raise OverflowError(f"a group's scale or minimum of {np.abs(values).max():g} does not fit float16")
    return values.astype(format.scales)


def _round(values: Floats, scale: Halves | Floats, low: int, high: int) -> Floats:
    wide = scale.astype(np.float32)[..., None]
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=np.abs(wide) >= SMALLEST_SCALE)
    return np.rint(values * inverse).clip(low, high)


# -- GGUF blocks -------------------------------------------------------------------------------------------------------

GGUF_FORMATS = {
    "Q4_0": BlockFormat(4, 32),
    "Q4_1": BlockFormat(4, 32, minimum=True),
    "Q8_0": BlockFormat(8, 32),
}


def from_gguf(raw: NDArray[np.uint8], kind: str) -> Blocks:
    """GGUF's blocks of 32 as they lie in the file, uint8 [N, bytes per row], bit for bit. kind: Q4_0, Q4_1 or Q8_0.

    A block is a float16 scale, then (Q4_1) a float16 minimum, then 16 bytes of nibbles (low ones: columns 0 … 15) or
    32 int8.
    """
    format = GGUF_FORMATS[kind]
    heads = 4 if format.minimum else 2
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, heads + 32 * format.bits // 8)
    halves = np.ascontiguousarray(blocks[..., :heads]).view(np.float16)
    values = blocks[..., heads:]
    q: Any
    if format.bits == 8:
        q = values.view(np.int8)
    else:
        q = np.concatenate([values & 15, values >> 4], -1)
        q = q if format.minimum else q.astype(np.int8) - np.int8(8)
    minimum = halves[..., 1].copy() if format.minimum else None
    return Blocks(format, q.reshape(len(raw), -1), halves[..., 0].copy(), minimum)


# -- activations -------------------------------------------------------------------------------------------------------


def quantize_activations(x: Floats, group: int) -> tuple[NDArray[np.int8], Floats]:
    """Dynamic int8 for each token and group: q [M, K] in -127 … 127 and scale [M, K/group], x ≈ scale · q.

    scale = max|x| / 127, q = round-to-nearest-even(x · (127 / max|x|)), all in float32 as the kernels do.
    """
    m, k = x.shape
    groups = x.reshape(m, k // group, group)
    peak = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(127.0), peak, out=np.zeros_like(peak), where=peak >= SMALLEST_PEAK)
    q = np.rint(groups * inverse[..., None]).astype(np.int8)
    return q.reshape(m, k), peak * np.float32(1.0 / 127.0)


def quantize_static(x: Floats, scale: float) -> NDArray[np.int8]:
    """int8 by one scale for all: round-to-nearest-even(x / scale), saturating at -128 and 127. x [M, K]."""
    rounded: NDArray[np.int8] = np.rint(x / np.float32(scale)).clip(-128, 127).astype(np.int8)
    return rounded


def round_e4m3(x: Floats) -> Floats:
    """The nearest e4m3 value, ties to even, saturating at ±448; NaN stays."""
    with np.errstate(invalid="ignore"):
        rounded: Floats = np.clip(x, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3).astype(np.float32)
    return rounded


def fake_quantize_e4m3(x: Floats, scale: float | None) -> Floats:
    """x [M, K] as e4m3 activations leave it: rounded in units of `scale`, or of max|x| / 448 of each row (None)."""
    if scale is not None:
        return round_e4m3(x / np.float32(scale)) * np.float32(scale)
    own = np.abs(x).max(-1, keepdims=True) * np.float32(1.0 / LARGEST_E4M3)
    inverse = np.divide(np.float32(1.0), own, out=np.zeros_like(own), where=own >= SMALLEST_PEAK)
    values: Floats = round_e4m3(x * inverse) * own
    return values


def matmul_int8(x: Floats, weight: Blocks) -> NDArray[np.float64]:
    """x [M, K] times weight [N, K] transposed, with activations rounded to int8 first; sums in float64: [M, N]."""
    q, scale = quantize_activations(x, weight.format.group)
    rounded = q.reshape(*scale.shape, -1).astype(np.float64) * scale[..., None]
    return rounded.reshape(x.shape) @ weight.dequantize().astype(np.float64).T
