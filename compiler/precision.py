"""Which format each matrix is stored in, and what the linears round their inputs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from plankiln.checkpoint import EMBEDDING, LM_HEAD
from plankiln.compiler.blocks import QuantizedFormat
from plankiln.compiler.formats import ELEMENTS, Element, Format
from plankiln.compiler.stored import StoredInput, stored_format, stored_input, stored_shape
from plankiln.compiler.weights import WeightSource
from plankiln.errors import ExportError, Problem
from plankiln.quantize.formats import GGUF_FORMATS, BlockFormat
from plankiln.recipe import GROUPS

WeightChoice = Literal["fp32", "bf16", "keep", "int4_rtn", "int8_rtn", "auto"]
Activations = Literal["int8", "declared"]
STORED: dict[str, Element] = {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "float32"}


@dataclass(frozen=True)
class Precision:
    """weights: fp32, bf16; keep (as the checkpoint stores them); int4_rtn, int8_rtn (rounded to nearest here); auto
    (each matrix as `chosen` says, rounded here).

    group, minimum: of int4_rtn and int8_rtn. clip: whether scales are searched for the least error. activations: what
    low-bit linears round their inputs to. int8: groups of int8 with scales of their own. declared: what the checkpoint
    says, which is nothing for weight-only formats; the plan is then the reference for the fast one. None: declared
    where the checkpoint declares a rounding, else int8.
    """

    weights: WeightChoice
    group: int = 32
    minimum: bool = False
    activations: Activations | None = None
    clip: bool = False
    chosen: Mapping[str, str] = field(default_factory=dict)

    def of(self, checkpoint: WeightSource, tensor: str) -> Element | QuantizedFormat:
        """The format of one matrix.

        keep: GGUF's Q4_0, Q4_1 and Q8_0 blocks, a quantized checkpoint's matrices, and float tensors as they are; other
        blocks are dequantized to bf16, and so are the matrices that a quantized checkpoint leaves in floats (float32 in
        the reference). int4_rtn: the embedding and the head are int8 in groups of 32, since they are the most
        sensitive.
        """
        if self.weights in get_args(Format):
            return ELEMENTS[self.weights]  # type: ignore[index]
        if self.weights == "keep":
            if checkpoint.quantization is None:
                return _as_stored(checkpoint, tensor)
            floats: Element = "float32" if self.activations == "declared" else "bfloat16"
            return stored_format(checkpoint, tensor) or floats
        if self.weights == "auto":
            return _BY_NAME[self.chosen[tensor]]
        if self.weights == "int8_rtn":
            return BlockFormat(8, self.group)
        return BlockFormat(8, 32) if tensor in (EMBEDDING, LM_HEAD) else BlockFormat(4, self.group, self.minimum)

    def input_of(self, checkpoint: WeightSource, tensor: str) -> StoredInput:
        """What the matrix's linear does with its input, where the checkpoint says it."""
        stored = stored_input(checkpoint, tensor)
        if self.weights != "keep":
            return StoredInput(stored.prescale, None, None)
        if self.activations == "int8" and stored.rounding == "int8 static":
            return StoredInput(stored.prescale, "int8", None)
        return stored

    def check(self, checkpoint: WeightSource, matrices: list[str]) -> None:
        """Raises ExportError naming the matrices whose columns are not whole groups, and the groups that fit all."""
        widths = {name: stored_shape(checkpoint, name)[1] for name in matrices}
        forms = {name: form for name in matrices if isinstance(form := self.of(checkpoint, name), BlockFormat)}
        legal = [group for group in GROUPS if not any(width % group for width in widths.values())]
        hint = f"`quantize.group_size` may be {' or '.join(map(str, legal))}" if legal else "use `bf16` for this model"
        problems = []
        groups = {name: GROUPS[0] if form.scales == "float32" else form.group for name, form in forms.items()}
        for width, group in dict.fromkeys((widths[name], group) for name, group in groups.items()):
            names = [name for name in groups if (widths[name], groups[name]) == (width, group)]
            if width % group:
                others = f" and {len(names) - 1} other matrices have" if len(names) > 1 else " has"
                what = f"`{names[0]}`{others} {width} columns, not whole groups of {group}"
                problems.append(Problem(what, f"`quantize.weights: {self.weights}`", hint))
        if problems:
            raise ExportError(problems)


def _as_stored(checkpoint: WeightSource, tensor: str) -> Element | BlockFormat:
    stored = checkpoint.tensors[tensor].dtype
    return GGUF_FORMATS.get(stored) or STORED.get(stored, "bfloat16")


_BY_NAME: dict[str, Element | BlockFormat] = {
    "bf16": "bfloat16",
    **{form.name: form for form in (BlockFormat(8, 32), BlockFormat(4, 32), BlockFormat(4, 32, minimum=True))},
}
