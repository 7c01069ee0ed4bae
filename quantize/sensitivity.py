"""`weights: auto`: a format for each matrix, the least loss of the model's predictions under an average of bits.

The loss is the Kullback-Leibler divergence of the next-token distribution from the unquantized model's, on
calibration text, with one unit quantized and all else in float32. Matrices that kernels fuse (q, k and v; gate and up)
are one unit. It is measured for each unit's coarsest lossy format. A small error of the weights costs its square, so
the loss of the other formats is that one times the ratio of their squared errors, each column weighed by its input's
mean square.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import ml_dtypes
import numpy as np
from pydantic import JsonValue

from plankiln.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from plankiln.errors import RecipeError
from plankiln.quantize.calibrate import calibration_ids, tools
from plankiln.quantize.clip import quantize_clipped
from plankiln.quantize.datasets import texts
from plankiln.quantize.divergence import Divergence
from plankiln.quantize.formats import GGUF_FORMATS, BlockFormat, Floats, quantize
from plankiln.quantize.presets import check_exclude
from plankiln.quantize.search import Option, cheapest_bytes, choose
from plankiln.quantize.statistics import input_statistics
from plankiln.quantize.torch_model import torch_model
from plankiln.recipe import Quantize, Text

Progress = Callable[[str, int, int], None]
BF16 = "bf16"
BLOCKS = {form.name: form for form in (BlockFormat(4, 32), BlockFormat(4, 32, minimum=True), BlockFormat(8, 32))}
SAMPLES, TOKENS = 4, 128  # of the calibration text: each unit costs a forward of them
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


@dataclass(frozen=True)
class Unit:
    """Matrices (tensor names) that share a format; formats: those it may take, the coarsest first."""

    name: str
    tensors: tuple[str, ...]
    formats: tuple[str, ...]


def choice_key(quantize: Quantize) -> dict[str, str]:
    """What a choice depends on beside the checkpoint, the settings and our own files. Raises TextError."""
    found = texts(quantize.calibration or Text(), "calibration")
    return {"text": found.digest, **tools()}


def choose_formats(checkpoint: Checkpoint, quantize: Quantize, progress: Progress) -> dict[str, JsonValue]:
    """The format of every matrix (`formats`), what each would lose in nats (`sensitivity`), the average `bits`.

    Embedding and head are int8 at least; `exclude`d modules and matrices that are not whole groups are bf16.
    progress("sensitivity", units done, units in all). Raises RecipeError when `bits` is less than the coarsest formats
    take or an `exclude` pattern matches nothing, TextError for the calibration text, CheckpointError.
    """
    assert quantize.bits is not None
    started = time.process_time()
    text = quantize.calibration or Text()
    few = {"samples": min(text.samples, SAMPLES), "max_tokens": min(text.max_tokens, TOKENS)}
    shorter = text.model_copy(update=few)
    found, ids = calibration_ids(checkpoint, shorter)
    units = model_units(checkpoint, quantize.exclude or ())
    weights = sum(_size(checkpoint, name) for unit in units for name in unit.tensors)
    budget = int(quantize.bits * weights / 8)
    names = [[Option(title, _nbytes(checkpoint, unit, title), 0.0) for title in unit.formats] for unit in units]
    _check_budget(names, budget, weights)
    losses = measure_losses(checkpoint, units, ids, quantize.clip is not False, progress)
    options = [
        [Option(name, _nbytes(checkpoint, unit, name), loss) for name, loss in losses[unit.name].items()]
        for unit in units
    ]
    _check_budget(options, budget, weights)  # formats that cannot hold a unit's scales are gone
    chosen = choose(options, budget)
    return {
        "formats": {tensor: option.name for unit, option in zip(units, chosen, strict=True) for tensor in unit.tensors},
        "sensitivity": {name: dict(loss) for name, loss in losses.items()},
        "bits": round(8 * sum(option.nbytes for option in chosen) / weights, 4),
        "predicted_kl": sum(option.cost for option in chosen),
        "text": found.digest,
        "text_source": found.source,
        "samples": len(ids),
        "tokens": sum(map(len, ids)),
        "calibration_cpu_seconds": {"sensitivity": round(time.process_time() - started, 2)},
    }


def model_units(checkpoint: Checkpoint, exclude: Sequence[str]) -> list[Unit]:
    """The model's matrices in units. Raises RecipeError for an `exclude` pattern that matches no module."""
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    matrices = [
        name
        for name, info in checkpoint.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight") and not (tied and name == LM_HEAD)
    ]
    modules = {name: [name.removesuffix(".weight")] for name in matrices}
    if tied:
        modules[EMBEDDING].append(LM_HEAD.removesuffix(".weight"))
    check_exclude(exclude, [module for names in modules.values() for module in names])
    units: dict[str, Unit] = {}
    for name in matrices:
        excluded = any(fnmatchcase(module, pattern) for module in modules[name] for pattern in exclude)
        formats = _formats(checkpoint, name, excluded)
        layer, _, last = modules[name][0].rpartition(".")
        title = modules[name][0] if excluded or last not in _FUSED else f"{layer}.{_FUSED[last]}"
        before = units[title].tensors if title in units else ()
        units[title] = Unit(title, (*before, name), formats)
    return list(units.values())


def _formats(checkpoint: Checkpoint, name: str, excluded: bool) -> tuple[str, ...]:
    if excluded or checkpoint.tensors[name].shape[1] % 32:
        return (BF16,)
    outer = name in (EMBEDDING, LM_HEAD)
    return (*(title for title, form in BLOCKS.items() if form.bits == 8 or not outer), BF16)


def measure_losses(
    checkpoint: Checkpoint, units: Sequence[Unit], ids: Sequence[Sequence[int]], clip: bool, progress: Progress
) -> dict[str, dict[str, float]]:
    """For each unit and each of its formats, the mean divergence in nats when it alone is quantized.

    A format that the source's blocks lie in loses nothing. One whose scales float16 cannot hold is left out.
    """
    model = torch_model(checkpoint)
    squares = {f"{name}.weight": seen.square.numpy() for name, seen in input_statistics(model, ids, progress).items()}
    divergence = Divergence(model, ids)
    losses: dict[str, dict[str, float]] = {}
    for number, unit in enumerate(units):
        errors: dict[str, float] = {}
        scale: float | None = None
        for title in unit.formats:
            kept = BLOCKS.get(title)
            if kept and all(GGUF_FORMATS.get(checkpoint.tensors[name].dtype) == kept for name in unit.tensors):
                errors[title] = 0.0
                continue
            try:
                rounded = {name: _rounded(_weight(model, name), title, clip) for name in unit.tensors}
            except OverflowError:
                continue
            errors[title] = sum(_error(_weight(model, name), new, squares.get(name)) for name, new in rounded.items())
            if scale is None and errors[title] > 0:
                scale = divergence.of(rounded) / errors[title]
        losses[unit.name] = {title: error * (scale or 0.0) for title, error in errors.items()}
        progress("sensitivity", number + 1, len(units))
    return losses


def _rounded(weight: Floats, title: str, clip: bool) -> Floats:
    """What a matrix [N, K] becomes in a format."""
    if title == BF16:
        return weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    form = BLOCKS[title]
    return (quantize_clipped(weight, form, None) if clip else quantize(weight, form)).dequantize()


def _error(weight: Floats, rounded: Floats, square: Floats | None) -> float:
    errors = np.square(rounded - weight).sum(0, dtype=np.float64)
    return float(errors.sum() if square is None else errors @ square)


def _weight(model: Any, name: str) -> Floats:
    array: Floats = model.get_parameter(name).detach().numpy()
    return array


def _size(checkpoint: Checkpoint, name: str) -> int:
    n, k = checkpoint.tensors[name].shape
    return n * k


def _nbytes(checkpoint: Checkpoint, unit: Unit, title: str) -> int:
    if title == BF16:
        return sum(2 * _size(checkpoint, name) for name in unit.tensors)
    shapes = [checkpoint.tensors[name].shape for name in unit.tensors]
    return sum(BLOCKS[title].nbytes(n, k) for n, k in shapes)


def _check_budget(options: Sequence[Sequence[Option]], budget: int, weights: int) -> None:
    smallest = cheapest_bytes(options)
    if smallest > budget:
        least = -(-smallest * 800 // weights) / 100
        what = f"`bits: {budget * 8 / weights:.4g}` is less than this model's coarsest formats take"
        raise RecipeError(what, "`quantize.bits`", f"write `bits: {least:.2f}` or more")
