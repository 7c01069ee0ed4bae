"""Rotary position embedding: what a config may ask for, and its cosine and sine tables.

Frequencies, angles and tables are computed in float32 step by step as `transformers` does, because at long positions
the rounding of a frequency is visible in the angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from plankiln.compiler.config_reader import ConfigReader, did_you_mean, shown

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Floats = NDArray[np.float32]
MAX_POSITIONS = 1 << 27
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_LENGTH_DEPENDENT = "its frequencies depend on each sequence's length; use `yarn` or `linear` scaling"
_REFUSED = {
    "dynamic": _LENGTH_DEPENDENT,
    "longrope": _LENGTH_DEPENDENT,
    "su": _LENGTH_DEPENDENT,
    "mrope": "multimodal RoPE is not supported",
}


@dataclass(frozen=True)
class Rope:
    """RoPE of one model. `original_context` is the length the model saw before scaling (llama3 and yarn)."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def tables(self, head_dim: int, positions: int) -> tuple[Floats, Floats]:
        """Cosine and sine tables [positions, head_dim/2], the attention factor included."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies(head_dim)[None, :]
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor

    def reach(self, max_position: int) -> int:
        """The longest context that the scaling is meant for, given the config's `max_position_embeddings`."""
        if self.kind == "linear":
            return int(max_position * self.factor)
        return int(self.original_context * self.factor) if self.original_context else max_position

    def frequencies(self, head_dim: int) -> Floats:
        """Radians per position, [head_dim/2]."""
        powers = _powers(self.theta, head_dim)
        if self.kind == "linear":
            return (np.float32(1.0) / powers) / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(np.float32(1.0) / powers)
        if self.kind == "yarn":
            return self._yarn(powers, head_dim)
        return np.float32(1.0) / powers

    def _llama3(self, plain: Floats) -> Floats:
        """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
        one = np.float32(1.0)
        wavelength = (one / plain) * np.float32(2 * math.pi)
        stretched = plain / np.float32(self.factor)
        blend = (one / wavelength) * np.float32(self.original_context) - np.float32(self.low_freq_factor)
        blend = blend / np.float32(self.high_freq_factor - self.low_freq_factor)
        between = (one - blend) * plain / np.float32(self.factor) + blend * plain
        is_long = wavelength > np.float32(self.original_context / self.low_freq_factor)
        is_short = wavelength < np.float32(self.original_context / self.high_freq_factor)
        return np.where(is_long, stretched, np.where(is_short, plain, between)).astype(np.float32)

    def _yarn(self, powers: Floats, head_dim: int) -> Floats:
        """YaRN (arXiv:2309.00071): per-frequency blend of interpolation and extrapolation."""
        low = self._yarn_dimension(self.beta_fast, head_dim)
        high = self._yarn_dimension(self.beta_slow, head_dim)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, float(head_dim - 1))
        if low == high:
            high += 0.001
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        keep: Floats = 1 - np.clip(ramp, 0, 1)
        interpolated = np.float32(1.0) / (np.float32(self.factor) * powers)
        return (interpolated * (1 - keep) + (np.float32(1.0) / powers) * keep).astype(np.float32)

    def _yarn_dimension(self, rotations: float, head_dim: int) -> float:
        """The (real-valued) frequency index that turns `rotations` times within the original context."""
        turns = self.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(self.theta))


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The temperature YaRN puts on cosine and sine when the config names none."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _powers(theta: float, head_dim: int) -> Floats:
    """theta ** (2i / head_dim), correctly rounded to float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)


def read_rope(reader: ConfigReader, max_position: int) -> Rope:
    """RoPE from a model's config, in the old spelling (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`)."""
    old, new = reader.table("rope_scaling"), reader.table("rope_parameters")
    if old and new:
        reader.complain("both `rope_scaling` and `rope_parameters` are given", "keep one")
    theta = reader.number("rope_theta", 10000.0, low=1.0, high=1e12)
    reader.fixed("partial_rotary_factor", 1.0, _PARTIAL)
    context = reader.integer("original_max_position_embeddings", 0, high=MAX_POSITIONS)
    table = new or old
    if table is None:
        return Rope("default", _above_one(reader, theta))
    kind = _kind(table)
    inner = table.number("rope_theta", theta, low=1.0, high=1e12)
    if reader.has("rope_theta") and inner != theta:
        table.complain(f"two different `rope_theta`: {theta:g} outside, {inner:g} inside", "keep one")
    table.fixed("partial_rotary_factor", 1.0, _PARTIAL)
    rope = _scaled(table, kind, _above_one(table, inner), context, max_position)
    table.finish(_KEYS[kind])
    return rope


_PARTIAL = "rotating a part of the head is not supported"


def _above_one(reader: ConfigReader, theta: float) -> float:
    if theta <= 1.0:
        reader.complain(f"`rope_theta` must be greater than 1, not {theta:g}")
        return 10000.0
    return theta


def _kind(table: ConfigReader) -> RopeKind:
    named, old_name = table.text("rope_type", ""), table.text("type", "")
    if named and old_name and named != old_name:
        table.complain(f"`rope_type` {shown(named)} and `type` {shown(old_name)} disagree", "keep `rope_type`")
    kind = named or old_name or "default"
    if kind in _KEYS:
        return cast(RopeKind, kind)
    supported = "supported: " + ", ".join(_KEYS)
    table.complain(
        f"RoPE scaling {shown(kind)} is not supported", _REFUSED.get(kind) or did_you_mean(kind, _KEYS, supported)
    )
    table.ignore_rest()
    return "default"


def _scaled(table: ConfigReader, kind: RopeKind, theta: float, context: int, max_position: int) -> Rope:
    if kind == "default":
        return Rope("default", theta)
    if kind == "linear":
        return Rope("linear", theta, factor=_factor(table))
    own_context = table.integer("original_max_position_embeddings", max_position, high=MAX_POSITIONS)
    original = context or own_context
    if kind == "llama3":
        low = table.number("low_freq_factor", None, low=1e-6, high=1e6)
        high = table.number("high_freq_factor", None, low=1e-6, high=1e6)
        if low is None or high is None or high <= low:
            table.complain("llama3 scaling needs `low_freq_factor` < `high_freq_factor`")
            low, high = 1.0, 4.0
        return Rope(kind, theta, _factor(table), original, low_freq_factor=low, high_freq_factor=high)
    factor = _factor(table) if table.has("factor") else max(1.0, max_position / original)
    mscale, mscale_all = (table.number(key, None, low=0.0, high=1e6) for key in ("mscale", "mscale_all_dim"))
    return Rope(
        kind,
        theta,
        factor,
        original,
        beta_fast=table.number("beta_fast", 0.0, low=0.0, high=1e6) or 32.0,
        beta_slow=table.number("beta_slow", 0.0, low=0.0, high=1e6) or 1.0,
        attention_factor=table.number(
            "attention_factor", yarn_attention_factor(factor, mscale, mscale_all), low=0.0, high=1e6
        ),
        truncate=table.flag("truncate", True),
    )


def _factor(table: ConfigReader) -> float:
    factor = table.number("factor", None, low=1.0, high=1e6)
    if factor is None:
        if not table.has("factor"):
            table.complain("`factor` is missing")
        return 1.0
    return factor
