"""Our formats as nvidia-modelopt's configurations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from plankiln.errors import Problem, RecipeError
from plankiln.recipe import PRESETS, Quantize
from plankiln.target import did_you_mean

_NAMES = {ours: theirs for theirs, ours in PRESETS.items()}
DEFAULT_ALPHA = 0.5
_KV = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}, "enable": True}


def preset(quantize: Quantize, weight_only: Sequence[str], resume: Path | None = None) -> dict[str, Any]:
    """The configuration for `mtq.quantize`. weight_only: modules whose inputs are not rounded. resume: where a
    layerwise calibration leaves what is done."""
    import modelopt.torch.quantization as mtq

    name = "INT4_BLOCKWISE_WEIGHT_ONLY_CFG" if rounded_here(quantize) else _NAMES.get(quantize.weights)
    nothing = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, name)) if name else nothing
    entries: list[dict[str, Any]] = config["quant_cfg"]
    if quantize.group_size is not None and quantize.weights in ("int4_awq", "w4a8_awq"):
        for entry in entries:
            cfg = entry.get("cfg") or {}
            for part in cfg if isinstance(cfg, list) else [cfg]:
                if "block_sizes" in part:
                    part["block_sizes"] = {-1: quantize.group_size, "type": "static"}
    if quantize.weights == "int8_smoothquant":
        alpha = DEFAULT_ALPHA if quantize.alpha is None else quantize.alpha
        config["algorithm"] = {"method": "smoothquant", "alpha": alpha}
    entries += [{"quantizer_name": f"{module}.input_quantizer", "enable": False} for module in weight_only]
    entries += [{"quantizer_name": f"{pattern}.*_quantizer", "enable": False} for pattern in quantize.exclude or ()]
    if quantize.kv_cache == "fp8":
        entries.append(dict(_KV))
    if quantize.layerwise and not rounded_here(quantize):  # which goes layer by layer anyway
        method = config["algorithm"]
        settings = method if isinstance(method, dict) else {"method": method}
        config["algorithm"] = {**settings, "layerwise": {"enable": True, "checkpoint_dir": resume and str(resume)}}
    return config


def rounded_here(quantize: Quantize) -> bool:
    """Whether awq.py makes the int4 weights that modelopt only lays out."""
    return quantize.weights == "int4_awq" and quantize.clip is not False


def check_exclude(patterns: Sequence[str], modules: Sequence[str]) -> None:
    """Raises RecipeError for each pattern that names none of the modules."""
    problems = [
        Problem(f"`{pattern}` matches no module", "`quantize.exclude`", did_you_mean(pattern, modules))
        for pattern in patterns
        if not any(fnmatchcase(module, pattern) for module in modules)
    ]
    if problems:
        raise RecipeError(problems)
