"""What a target's weights are read from: the source itself, or the checkpoint that calibration makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.precision import Precision, WeightChoice
from plankiln.compiler.stages import formats_stage, quantize_stage
from plankiln.compiler.store import Entry, Stage
from plankiln.errors import BuildError
from plankiln.host import store_directory
from plankiln.manifest import QuantizationRecord
from plankiln.recipe import CALIBRATED, Quantize
from plankiln.target import Target

Run = Callable[[Stage, Callable[[Path], dict[str, JsonValue]]], Entry]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """checkpoint: what the weights are read from. precision: how. record, report: what was decided on the way.

    keys: the store's entries that it rests on.
    """

    checkpoint: Checkpoint
    precision: Precision
    record: QuantizationRecord | None
    report: dict[str, JsonValue]
    keys: tuple[str, ...]


def prepare(
    source: Checkpoint, quantize: Quantize, target: Target, run: Run, stack: ExitStack, progress: Progress
) -> Prepared:
    """Calibrate, or choose formats, where the recipe asks for it; each a stage that `run` finds or makes.

    quantize: with a group size that is a number. What is opened is closed by `stack`. Raises what the stages raise,
    BuildError where the packages that calibrate are not installed.
    """
    group = quantize.group_size
    assert group != "auto"
    plain = Precision(
        "keep" if quantize.weights in CALIBRATED else cast(WeightChoice, quantize.weights),
        group or 32,
        bool(quantize.minimum),
        quantize.activations,
        bool(quantize.clip) and quantize.weights == "int4_rtn",
    )
    if quantize.is_calibrated:
        mirrored = target.kind == "cpu"  # TensorRT's scales are positive
        calibrate, stage = _calibration(source, quantize, mirrored)
        resume = store_directory() / "layerwise" / stage.key if quantize.layerwise else None
        how: dict[str, Any] = {"mirrored": mirrored, "resume": resume}
        entry = run(stage, lambda made: calibrate(source, quantize, made, progress, **how))
        if resume:
            shutil.rmtree(resume, ignore_errors=True)
        checkpoint = stack.enter_context(open_checkpoint(str(entry.path), base=Path()))
        return Prepared(checkpoint, plain, _record(quantize, entry), dict(entry.record.result), (stage.key,))
    if quantize.weights == "auto":
        choose, stage = _choice(source, quantize)
        entry = run(stage, lambda made: choose(source, quantize, progress))
        chosen = cast("dict[str, str]", entry.record.result["formats"])
        precision = Precision("auto", activations=quantize.activations, clip=quantize.clip is not False, chosen=chosen)
        return Prepared(source, precision, _record(quantize, entry), dict(entry.record.result), (stage.key,))
    return Prepared(source, plain, None, {}, ())


def _calibration(
    source: Checkpoint, quantize: Quantize, mirrored: bool
) -> tuple[Callable[..., dict[str, JsonValue]], Stage]:
    try:
        from plankiln.quantize.calibrate import calibrate, calibration_key

        return calibrate, quantize_stage(source.digest, quantize, calibration_key(quantize, mirrored))
    except ModuleNotFoundError as error:
        raise _not_installed(quantize, error) from None


def _choice(source: Checkpoint, quantize: Quantize) -> tuple[Callable[..., dict[str, JsonValue]], Stage]:
    try:
        from plankiln.quantize.sensitivity import choice_key, choose_formats

        return choose_formats, formats_stage(source.digest, quantize, choice_key(quantize))
    except ModuleNotFoundError as error:
        raise _not_installed(quantize, error) from None


def _not_installed(quantize: Quantize, error: ModuleNotFoundError) -> BuildError:
    hint = "install what calibrates: `pip install 'plankiln[build,quantize]'`"
    return BuildError(f"`quantize.weights: {quantize.weights}` needs the package `{error.name}`", hint=hint)


def _record(quantize: Quantize, entry: Entry) -> QuantizationRecord:
    """The part of a stage's report that belongs into the manifest."""
    result = entry.record.result
    known = {name: result[name] for name in ("text", "samples", "tokens", "outlier_layers") if name in result}
    return QuantizationRecord.model_validate({"algorithm": quantize.weights, **known})
