"""How far each stored matrix is from the source's: the rows of a build's report."""

from __future__ import annotations

import numpy as np
from pydantic import JsonValue

from plankiln.checkpoint import Checkpoint
from plankiln.compiler.cpu.program import Program, Weight
from plankiln.compiler.stored import stored_input
from plankiln.compiler.weights import Slice, whole
from plankiln.quantize.formats import GGUF_FORMATS, BlockFormat, Blocks, Floats, Fp8Format, Fp8Weight
from plankiln.quantize.report import relative_error

_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
_NORMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}


def matrix_errors(program: Program, source: Checkpoint, stored: Checkpoint) -> list[JsonValue]:
    """A row for each matrix of the program, in its order. source: the unquantized model; stored: what was packed.

    A calibrated matrix was divided by its pre-scale, which its input is multiplied by, or a norm that took it up.
    """
    rows: list[JsonValue] = []
    for weight in program.weights:
        if weight.layout != "tiles":
            continue
        exact = weight.format == "float32" and stored is source
        if exact or all(_is_kept(part, weight, source) for part in weight.parts):
            rows += [_row(part, weight, 0.0) for part in weight.parts]
            continue
        values = weight.read()
        matrix = values.dequantize() if isinstance(values, Blocks | Fp8Weight) else values.astype(np.float32)
        start = 0
        for part in weight.parts:
            assert isinstance(part, Slice)
            count = part.stop - part.start
            own = matrix[start : start + count] * _column_factors(part.tensor, source, stored)
            start += count
            original = whole(source, part.tensor, "float32").rows()[part.start : part.stop]
            rows.append(_row(part, weight, relative_error(original, own)))
    return rows


def _is_kept(part: object, weight: Weight, source: Checkpoint) -> bool:
    """Whether the source's own blocks were taken bit for bit."""
    assert isinstance(part, Slice)
    return GGUF_FORMATS.get(source.tensors[part.tensor].dtype) == weight.format


def _row(part: object, weight: Weight, error: float) -> JsonValue:
    assert isinstance(part, Slice)
    nbytes = weight.nbytes * (part.stop - part.start) // weight.n
    return {"name": part.tensor, "format": _format(weight), "bytes": nbytes, "error": error}


def _format(weight: Weight) -> str:
    return weight.format.name if isinstance(weight.format, BlockFormat | Fp8Format) else _NAMES[weight.format]


def _column_factors(tensor: str, source: Checkpoint, stored: Checkpoint) -> Floats:
    """What the columns of a stored matrix stand multiplied by in the model: [K], or one."""
    one = np.ones(1, np.float32)
    if source is stored:
        return one
    prescale = stored_input(stored, tensor).prescale
    if prescale is not None:
        return prescale
    layer, _, module = tensor.removesuffix(".weight").rpartition(".")
    if module not in _NORMS:
        return one
    norm = f"{layer.rpartition('.')[0]}.{_NORMS[module]}.weight"
    before, after = (checkpoint.read(norm).astype(np.float32) for checkpoint in (source, stored))
    ratio: Floats = np.divide(after, before, out=np.ones_like(after), where=before != 0)
    return ratio
