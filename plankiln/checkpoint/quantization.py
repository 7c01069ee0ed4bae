"""What a quantized checkpoint of nvidia-modelopt ("unified HF checkpoint") says of its linears and of its KV cache.

`hf_quant_config.json`, or `quantization_config` in config.json, names an algorithm for all linears or (mixed precision)
for each; the tensors beside a linear's weight hold its scales. Shapes are those of the linear, [N, K].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from plankiln.errors import CheckpointError, Problem

Algorithm = Literal["fp8", "fp8_per_token", "int8_smoothquant", "int4_awq", "w4a8_awq", "nvfp4", "int8"]

ALGORITHMS: dict[str, Algorithm] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_per_token",
    "W8A8_SQ_PER_CHANNEL": "int8_smoothquant",
    "W8A16": "int8",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}
_FLOATS = ("F32", "F16", "BF16")
_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
_KV_SUFFIXES = ("k_proj.k_scale", "v_proj.v_scale")


class TensorHeader(Protocol):
    """A tensor before any of its bytes is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class LinearQuantization:
    """How one linear is quantized. group: columns that share a scale, where groups have one."""

    algorithm: Algorithm
    group: int | None = None


@dataclass(frozen=True)
class Quantization:
    """modules: the quantized linears by name; others are stored in floats. scales: each layer's KV scales (k, v)."""

    modules: Mapping[str, LinearQuantization] = field(default_factory=dict)
    kv_cache: Literal["fp8"] | None = None
    scales: tuple[tuple[float, float], ...] = ()

    def linear(self, module: str) -> LinearQuantization | None:
        """How `model.layers.0.mlp.down_proj`, say, is quantized; None where it is stored in floats."""
        return self.modules.get(module)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Scales of the layer's keys and values in an fp8 cache."""
        return self.scales[layer]


def read_quantization(
    declared: Mapping[str, Any], tensors: Mapping[str, TensorHeader], read: Any, where: str
) -> Quantization | None:
    """The quantization that a file declares; None where it declares none.

    declared: the content of hf_quant_config.json's `quantization`, or config.json's `quantization_config`. read(name)
    gives a tensor. Raises CheckpointError for algorithms that are not ours, and for scales that are missing, stray,
    misshapen, not positive, or not finite.
    """
    method = declared.get("quant_method", "modelopt")
    if method != "modelopt":
        hint = "quantize the original checkpoint with a recipe, or use one that nvidia-modelopt exported"
        raise CheckpointError(f"the checkpoint is quantized by `{method}`, which is not supported", where, hint)
    modules = dict(_modules(declared, tensors, where))
    problems = [problem for name, linear in modules.items() for problem in _check(name, linear, tensors, read, where)]
    stray = [name for name in tensors if _scale_of(name) is not None and _scale_of(name) not in modules]
    problems += [Problem(f"`{name}` belongs to no quantized linear", where, "export it again") for name in stray]
    kv = declared.get("kv_cache_quant_algo") or _algorithm_of(declared.get("kv_cache_scheme"))
    scales: tuple[tuple[float, float], ...] = ()
    if kv == "FP8":
        scales = _kv_scales(tensors, read, where, problems)
    elif kv:
        problems.append(Problem(f"KV cache algorithm `{kv}` is not supported", where, "supported: FP8"))
    if problems:
        raise CheckpointError(problems)
    return Quantization(modules, "fp8" if kv else None, scales)


def _algorithm_of(scheme: object) -> object:
    """What config.json's `kv_cache_scheme` is called elsewhere."""
    if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "FP8"
    return scheme


def owned_tensors(quantization: Quantization, name: str) -> bool:
    """Whether the tensor `name` is one of the scales that quantization explains."""
    module = _scale_of(name)
    return module in quantization.modules or (quantization.kv_cache is not None and name.endswith(_KV_SUFFIXES))


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """[N/2, K] bytes → [N, K] int4 values: row 2i in the low nibbles, row 2i+1 in the high ones."""
    both: NDArray[np.int8] = np.stack([packed << 4, packed], 1).view(np.int8) >> 4
    return both.reshape(-1, packed.shape[1])


def stored_shape(linear: LinearQuantization, n: int, k: int) -> tuple[str, tuple[int, int]]:
    """Type and shape in which the weight of an [n, k] linear is stored."""
    match linear.algorithm:
        case "fp8" | "fp8_per_token":
            return "F8_E4M3", (n, k)
        case "int8" | "int8_smoothquant":
            return "I8", (n, k)
        case "nvfp4":
            return "U8", (n, k // 2)
        case _:
            return "U8", (n // 2, k)


def _modules(
    declared: Mapping[str, Any], tensors: Mapping[str, TensorHeader], where: str
) -> Iterator[tuple[str, LinearQuantization]]:
    algorithm, layers = declared.get("quant_algo"), declared.get("quantized_layers")
    if algorithm is None and layers is None:
        return
    if not isinstance(layers, Mapping | None):
        raise CheckpointError("`quantized_layers` is no object", where, "export it again")
    for name in sorted(tensors):
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        if ".layers." not in module and module != "lm_head":
            hint = "export it with the embedding excluded, as nvidia-modelopt does"
            raise CheckpointError(f"`{module}` is quantized, which only linears may be", where, hint)
        own = (layers or {}).get(module, {}) if algorithm in (None, "MIXED_PRECISION") else declared
        if not isinstance(own, Mapping):
            raise CheckpointError(f"`quantized_layers` says nothing usable of `{module}`", where, "export it again")
        wanted = own.get("quant_algo")
        found = ALGORITHMS.get(str(wanted))
        if found is None:
            hint = "supported: " + ", ".join(ALGORITHMS)
            raise CheckpointError(f"`{module}` has the unknown quantization `{wanted}`", where, hint)
        group = own.get("group_size")
        if found in ("int4_awq", "w4a8_awq", "nvfp4"):
            if not isinstance(group, int) or isinstance(group, bool) or group < 1:
                raise CheckpointError(f"`group_size` of `{module}` is {group!r}", where, "it must be a whole number")
            yield module, LinearQuantization(found, group)
        else:
            yield module, LinearQuantization(found)


def _scale_of(name: str) -> str | None:
    module, _, last = name.rpartition(".")
    return module if last in _SUFFIXES else None


def _check(
    module: str, linear: LinearQuantization, tensors: Mapping[str, TensorHeader], read: Any, where: str
) -> Iterator[Problem]:
    """What is wrong with the scales of one linear."""
    weight = tensors.get(f"{module}.weight")
    if weight is None or len(weight.shape) != 2:
        yield Problem(f"`{module}.weight` is missing or not a matrix", where, "download the checkpoint again")
        return
    rows, columns = weight.shape
    n = 2 * rows if linear.algorithm in ("int4_awq", "w4a8_awq") else rows
    k = 2 * columns if linear.algorithm == "nvfp4" else columns
    dtype, _ = stored_shape(linear, n, k)
    if weight.dtype != dtype:
        what = f"tensor `{module}.weight` has dtype `{weight.dtype}` where `{linear.algorithm}` needs `{dtype}`"
        yield Problem(what, where, "hf_quant_config.json and the weights disagree")
        return
    if linear.group is not None and k % linear.group:
        yield Problem(f"`{module}` has {k} columns, not whole groups of {linear.group}", where, "export it again")
        return
    for suffix, shapes in _scale_shapes(linear, n, k).items():
        name = f"{module}.{suffix}"
        header = tensors.get(name)
        optional = suffix == "pre_quant_scale" and linear.algorithm != "int8"
        if header is None:
            if not optional:
                yield Problem(f"missing tensor `{name}`", where, "export the checkpoint again")
        elif header.shape not in shapes:
            what = f"tensor `{name}` has shape {list(header.shape)} where {list(shapes[0])} is expected"
            yield Problem(what, where, "hf_quant_config.json and the weights disagree")
        elif header.dtype not in (*_FLOATS, "F8_E4M3"):
            yield Problem(f"tensor `{name}` has dtype `{header.dtype}` where floats are expected", where)
        else:
            values = read(name).astype(np.float32)
            groups = suffix == "weight_scale" and linear.algorithm in ("int4_awq", "w4a8_awq", "nvfp4")
            signed = suffix == "weight_scale" and linear.algorithm == "int4_awq"  # ours for CPUs: see quantize/rounding
            least = -np.inf if signed else 0.0 if groups else np.finfo(np.float32).smallest_subnormal
            if not np.isfinite(values).all() or (values < least).any():
                yield Problem(f"tensor `{name}` holds scales that are not positive numbers", where, "calibrate again")


def _scale_shapes(linear: LinearQuantization, n: int, k: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes of the tensors that a linear must have beside its weight (pre_quant_scale: may have)."""
    one: tuple[tuple[int, ...], ...] = ((), (1,))
    columns: dict[str, tuple[tuple[int, ...], ...]] = {"pre_quant_scale": ((k,),)}
    groups: tuple[tuple[int, ...], ...] = ((n, k // (linear.group or k)),)
    match linear.algorithm:
        case "fp8":
            return {"weight_scale": (*one, (n,), (n, 1)), "input_scale": one, **columns}
        case "fp8_per_token" | "int8":
            return {"weight_scale": ((n,), (n, 1))}
        case "int8_smoothquant":
            return {"weight_scale": ((n,), (n, 1)), "input_scale": one, **columns}
        case "int4_awq":
            return {"weight_scale": groups, **columns}
        case "w4a8_awq":
            return {"weight_scale": groups, "weight_scale_2": one, "input_scale": one, **columns}
        case _:
            return {"weight_scale": groups, "weight_scale_2": one, "input_scale": one, **columns}


def _kv_scales(
    tensors: Mapping[str, TensorHeader], read: Any, where: str, problems: list[Problem]
) -> tuple[tuple[float, float], ...]:
    """Each layer's scales. Scales that are all one, or all alike, were never measured: a problem."""
    prefix = "model.layers."
    numbers = {match[1] for name in tensors if (match := re.match(r"model\.layers\.(\d{1,4})\.", name))}
    layers = 1 + max(map(int, numbers), default=-1)
    found: list[tuple[float, float]] = []
    missing: list[str] = []
    for layer in range(layers):
        names = [f"{prefix}{layer}.self_attn.{suffix}" for suffix in _KV_SUFFIXES]
        missing += [name for name in names if name not in tensors or tensors[name].shape not in ((), (1,))]
        if not missing:
            k, v = (float(read(name).astype(np.float32).reshape(())) for name in names)
            found.append((k, v))
    hint = "calibrate the KV cache, or declare unit scales with `kv_cache: fp8_cast`"
    if missing:
        what = f"the FP8 KV cache has no scale `{missing[0]}`"
        problems.append(Problem(what + (f" and {len(missing) - 1} more" if missing[1:] else ""), where, hint))
        return ()
    values = {value for pair in found for value in pair}
    if not all(np.isfinite(value) and value > 0 for value in values):
        problems.append(Problem("the FP8 KV cache's scales are not all positive numbers", where, hint))
    elif values == {1.0} or (len(values) == 1 and layers > 1):
        what = f"every scale of the FP8 KV cache is {values.pop():g}: it was not measured"
        problems.append(Problem(what, where, hint))
    return tuple(found)
