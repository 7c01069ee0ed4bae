"""From one answer of a worker to numbers, and from repetitions to one row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from plankiln.runtime.bench.workload import Workload

Numbers = dict[str, float]
_MS = 1000


def numbers(workload: Workload, answer: dict[str, Any]) -> Numbers:
    """What one repetition says. `…_per_cpu_s` are tokens per second of CPU time, `…_per_s` per second of wall time."""
    result: Numbers = {}
    if workload.kind == "decode":
        result |= _rates("decode", answer["decode"]["tokens"], answer["decode"])
    if workload.kind in ("decode", "prefill"):
        result |= _rates("prefill", answer["prompt_tokens"], answer["prefill"])
    if workload.kind == "loop":
        result |= _rates("output", answer["total"]["tokens"], answer["total"])
    for name, seconds in (("ttft", answer["first"]), ("gap", answer["gaps"])):
        if seconds:
            result[f"{name}_p50_ms"] = _MS * quantile(seconds, 0.5)
            result[f"{name}_p99_ms"] = _MS * quantile(seconds, 0.99)
    result["peak_rss_mib"] = answer["peak_rss"] / 2**20
    return result


def load_numbers(start: dict[str, float], loaded: dict[str, Any], answer: dict[str, Any]) -> Numbers:
    """A new process: interpreter and imports (`start`), load, first token; and what loading consists of."""
    first = answer["total"]
    parts = {f"load_{name}_s": seconds for name, seconds in loaded.get("parts", {}).items()}
    return {
        "start_s": start["wall"],
        "load_s": loaded["wall"],
        **parts,
        "first_token_s": first["wall"],
        "load_to_first_token_s": loaded["wall"] + first["wall"],
        "load_to_first_token_cpu_s": loaded["cpu"] + first["cpu"],
        "peak_rss_mib": answer["peak_rss"] / 2**20,
    }


def _rates(name: str, tokens: float, took: dict[str, float]) -> Numbers:
    return {f"{name}_per_cpu_s": tokens / max(took["cpu"], 1e-9), f"{name}_per_s": tokens / max(took["wall"], 1e-9)}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def medians(repetitions: Sequence[Numbers]) -> Numbers:
    """Of each number, with four significant digits."""
    return {key: tidy(statistics.median(r[key] for r in repetitions)) for key in repetitions[0]}


def tidy(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
