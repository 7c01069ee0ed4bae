"""Which linears int8 activations would break: those whose inputs have outliers that smoothing cannot spread."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from plankiln.quantize.statistics import InputStatistics

LEAST_SIGNAL_TO_NOISE = 18.0  # dB, of a linear's output, where rounding its input by one int8 scale is all the noise


def outlier_layers(
    linears: Mapping[str, Any], statistics: Mapping[str, InputStatistics], alpha: float
) -> dict[str, dict[str, float]]:
    """The modules to keep weight-only: name → the input's absmax and absmax over mean, and the ratio in dB they'd have.

    SmoothQuant (Xiao et al. 2022) divides column j of x by s_j = max|x_j|^alpha / max|w_j|^(1-alpha) and multiplies the
    weights by it. One int8 scale for the rest makes an error of uniform variance step²/12 in every column, against
    outputs of variance Σ E[x_j²]·‖w_j‖² (columns taken as uncorrelated).
    """
    found: dict[str, dict[str, float]] = {}
    for name, module in linears.items():
        seen, weight = statistics[name], module.weight.detach().float()
        peak = seen.peak.clamp(min=1e-8)
        scale = (peak.pow(alpha) / weight.abs().amax(0).clamp(min=1e-8).pow(1 - alpha)).clamp(1e-4, 1e4)
        step = float((peak / scale).amax()) / 127
        norms = (weight * weight).sum(0)
        signal = float((seen.square * norms).sum())
        noise = step * step / 12 * float((norms * scale * scale).sum())
        ratio = 10 * log10(signal / noise) if signal > 0 and noise > 0 else float("inf")
        if ratio < LEAST_SIGNAL_TO_NOISE:
            largest = float(seen.peak.amax())
            found[name] = {
                "absmax": round(largest, 3),
                "absmax_over_mean": round(largest / max(seen.mean, 1e-12), 1),
                "signal_to_noise_db": round(ratio, 1),
            }
    return found
