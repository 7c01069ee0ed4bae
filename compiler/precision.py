"""Which format each matrix is stored in, and what the linears round their inputs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plankiln.checkpoint import EMBEDDING, LM_HEAD
from plankiln.compiler.formats import ELEMENTS, Element, Format
from plankiln.compiler.weights import WeightSource
from plankiln.errors import ExportError, Problem
from plankiln.quantize.formats import GGUF_FORMATS, BlockFormat
from plankiln.recipe import RTN_GROUPS

WeightChoice = Literal["fp32", "bf16", "keep", "int4_rtn", "int8_rtn"]
Activations = Literal["int8", "fp32"]
STORED: dict[str, Element] = {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "float32"}


@dataclass(frozen=True)
class Precision:
    """weights: fp32, bf16; keep (as the checkpoint stores them); int4_rtn, int8_rtn (rounded to nearest here).

    group, minimum: of the rounded formats. activations: what low-bit linears round their inputs to; fp32 rounds
    nothing, which makes the plan the reference for the fast one.
    """

    weights: WeightChoice
    group: int = 32
    minimum: bool = False
    activations: Activations = "int8"

    def of(self, checkpoint: WeightSource, tensor: str) -> Element | BlockFormat:
        """The format of one matrix.

        keep: GGUF's Q4_0, Q4_1 and Q8_0 blocks and float tensors as they are; other blocks are dequantized to bf16, and
        so are matrices that read the same input (q, k and v; gate and up) where the file stores them differently.
        int4_rtn: the embedding and the head are int8 in groups of 32, since they are the most sensitive.
        """
        if self.weights in get_args(Format):
            return ELEMENTS[self.weights]  # type: ignore[index]
        if self.weights == "keep":
            kept = {_as_stored(checkpoint, sibling) for sibling in _siblings(tensor)}
            return kept.pop() if len(kept) == 1 else "bfloat16"
        if self.weights == "int8_rtn":
            return BlockFormat(8, self.group)
        return BlockFormat(8, 32) if tensor in (EMBEDDING, LM_HEAD) else BlockFormat(4, self.group, self.minimum)

    def check(self, checkpoint: WeightSource, matrices: list[str]) -> None:
        """Raises ExportError naming the matrices whose columns are not whole groups, and the groups that fit all."""
        widths = {name: checkpoint.tensors[name].shape[1] for name in matrices}
        forms = {name: form for name in matrices if isinstance(form := self.of(checkpoint, name), BlockFormat)}
        legal = [group for group in RTN_GROUPS if not any(width % group for width in widths.values())]
        hint = f"`quantize.group_size` may be {' or '.join(map(str, legal))}" if legal else "use `bf16` for this model"
        problems = []
        for width, group in dict.fromkeys((widths[name], form.group) for name, form in forms.items()):
            names = [name for name, form in forms.items() if (widths[name], form.group) == (width, group)]
            if width % group:
                others = f" and {len(names) - 1} other matrices have" if len(names) > 1 else " has"
                what = f"`{names[0]}`{others} {width} columns, not whole groups of {group}"
                problems.append(Problem(what, f"`quantize.weights: {self.weights}`", hint))
        if problems:
            raise ExportError(problems)


_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _siblings(tensor: str) -> list[str]:
    """The matrices that passes join with this one, itself among them."""
    for names in _TOGETHER:
        for name in names:
            if f".{name}." in tensor:
                return [tensor.replace(f".{name}.", f".{other}.") for other in names]
    return [tensor]


def _as_stored(checkpoint: WeightSource, tensor: str) -> Element | BlockFormat:
    stored = checkpoint.tensors[tensor].dtype
    return GGUF_FORMATS.get(stored) or STORED.get(stored, "bfloat16")
