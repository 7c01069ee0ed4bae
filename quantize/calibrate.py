"""Calibrate a checkpoint with nvidia-modelopt: a checkpoint in, its unified HF checkpoint out.

modelopt chooses the scales; what is ours: which linears keep unrounded inputs (outliers.py), and, unless a recipe says
`clip: false`, the scales and the rounding of int4 weights (awq.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from plankiln.chat_template import ChatTemplate
from plankiln.checkpoint import Checkpoint
from plankiln.quantize.awq import round_checkpoint
from plankiln.quantize.datasets import Texts, texts, token_ids
from plankiln.quantize.outliers import outlier_layers
from plankiln.quantize.presets import DEFAULT_ALPHA, check_exclude, preset, rounded_here
from plankiln.quantize.statistics import batches, decoder_linears, input_statistics, run
from plankiln.quantize.torch_model import torch_model
from plankiln.recipe import Quantize, Text

Progress = Callable[[str, int, int], None]
_TOOLS = ("nvidia-modelopt", "torch", "transformers", "accelerate", "numpy", "tokenizers", "jinja2")
_READERS = ("gguf", "ml_dtypes", "safetensors")
PASSES = {"int4_awq": 2, "w4a8_awq": 2}  # over the text: statistics, then the search


def tools() -> dict[str, str]:
    """Versions of the packages that have a part in it."""
    return {f"tool.{name}": _version(name) for name in (*_TOOLS, *_READERS)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def calibration_key(quantize: Quantize, mirrored: bool) -> dict[str, str]:
    """What a calibration depends on beside the checkpoint, the settings and our own files. Raises TextError."""
    found = texts(quantize.calibration or Text(), "calibration")
    signs = {"mirrored": str(mirrored)} if rounded_here(quantize) else {}
    return {"text": found.digest, **signs, **tools()}


def calibration_ids(checkpoint: Checkpoint, text: Text) -> tuple[Texts, list[list[int]]]:
    """The calibration texts, and their token ids by the checkpoint's tokenizer. Raises TextError."""
    import tokenizers

    found = texts(text, "calibration")
    tokenizer = tokenizers.Tokenizer.from_buffer(checkpoint.tokenizer_json)
    special = {key: value for key, value in checkpoint.special_tokens.items() if isinstance(value, str)}

    def encode(sample: str) -> list[int]:
        ids: list[int] = tokenizer.encode(sample, add_special_tokens=False).ids
        return ids

    def encode_chat(messages: list[Any]) -> list[int]:
        return encode(ChatTemplate(checkpoint.chat_template or "", special).render(messages))

    return found, token_ids(found, encode, encode_chat, text.samples, text.max_tokens)


def calibrate(
    checkpoint: Checkpoint,
    quantize: Quantize,
    out: Path,
    progress: Progress,
    *,
    mirrored: bool,
    resume: Path | None = None,
) -> dict[str, JsonValue]:
    """Write the calibrated checkpoint to the directory `out`; what was decided and what it took.

    mirrored: whether the target takes negative int4 scales. resume: where a layerwise calibration leaves each layer as
    it is done, and finds it again after an interruption. progress("calibrate", layers run, layers in all). The same
    inputs give the same bytes on the same machine. Raises TextError for the calibration text, RecipeError for `exclude`
    patterns that match nothing, CheckpointError.
    """
    import modelopt.torch.quantization as mtq
    import torch

    torch.manual_seed(0)
    clock = _Clock()
    text = quantize.calibration or Text()
    found, ids = calibration_ids(checkpoint, text)
    with clock.phase("load"):
        model = torch_model(checkpoint)
        model.config.architectures = checkpoint.config.get("architectures") or [type(model).__name__]
    linears = decoder_linears(model)
    check_exclude(quantize.exclude or (), [*linears, "lm_head"])
    outliers: dict[str, dict[str, float]] = {}
    if quantize.weights == "int8_smoothquant":
        with clock.phase("statistics"):
            statistics = input_statistics(model, ids, progress)
            alpha = DEFAULT_ALPHA if quantize.alpha is None else quantize.alpha
            outliers = outlier_layers(linears, statistics, alpha)
    needs_text = not rounded_here(quantize) or quantize.kv_cache == "fp8"
    with clock.phase("calibrate"), _quiet(), _layers_shown(model, ids, PASSES.get(quantize.weights, 1), progress):
        config = preset(quantize, list(outliers), resume)
        mtq.quantize(model, config, (lambda model: run(model, ids, lambda *_: None)) if needs_text else None)
    with clock.phase("export"), _quiet():
        _export(model, checkpoint, out)
    if rounded_here(quantize):
        with clock.phase("rounding"):
            del model
            round_checkpoint(checkpoint, out, ids, mirrored, progress)
    return {
        "text": found.digest,
        "text_source": found.source,
        "samples": len(ids),
        "tokens": sum(map(len, ids)),
        "outlier_layers": {name: seen["absmax_over_mean"] for name, seen in outliers.items()},
        "outliers": {name: dict(seen) for name, seen in outliers.items()},
        "calibration_seconds": dict(clock.seconds),
        "calibration_cpu_seconds": dict(clock.cpu_seconds),
        "calibration_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


@contextlib.contextmanager
def _layers_shown(model: Any, ids: Sequence[Sequence[int]], passes: int, progress: Progress) -> Iterator[None]:
    """Each run of a decoder layer is a step of the progress; passes: how often the text goes through the model."""
    layers = model.model.layers
    total, done = passes * len(layers) * batches(ids), 0

    def step(*_: Any) -> None:
        nonlocal done
        done += 1
        progress("calibrate", min(done, total), total)

    handles = [layer.register_forward_hook(step) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _export(model: Any, checkpoint: Checkpoint, out: Path) -> None:
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)
    (out / "tokenizer.json").write_bytes(checkpoint.tokenizer_json)
    special = {key: value for key, value in checkpoint.special_tokens.items() if not key.endswith("_id")}
    if checkpoint.chat_template is not None:
        (out / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps({**special, "tokenizer_class": "PreTrainedTokenizerFast"}))
    generation = {**checkpoint.generation_config, "eos_token_id": list(checkpoint.eos_token_ids)}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """modelopt and transformers print and warn of what a user of ours cannot change."""
    level = logging.root.manager.disable
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(level)


class _Clock:
    """Wall and CPU seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = round(time.perf_counter() - wall, 2)
        self.cpu_seconds[name] = round(time.process_time() - cpu, 2)
