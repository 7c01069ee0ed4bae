"""Low-bit weights by reference: which rows of which checkpoint tensors, and the format their groups are stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from plankiln.checkpoint import check_finite
from plankiln.compiler.stored import stored_format, stored_rows, stored_shape
from plankiln.compiler.weights import Slice, WeightSource, whole
from plankiln.errors import CheckpointError
from plankiln.quantize.clip import quantize_clipped
from plankiln.quantize.formats import (
    GGUF_FORMATS,
    BlockFormat,
    Blocks,
    Fp8Format,
    Fp8Weight,
    from_gguf,
    quantize,
)

QuantizedFormat = BlockFormat | Fp8Format
Component = Literal["q", "scale", "minimum"]
_Q_TYPES: dict[tuple[int, bool], tuple[ir.DataType, Any]] = {
    (4, False): (ir.DataType.INT4, ml_dtypes.int4),
    (4, True): (ir.DataType.UINT4, ml_dtypes.uint4),
    (8, False): (ir.DataType.INT8, np.int8),
    (8, True): (ir.DataType.UINT8, np.uint8),
}


@dataclass(frozen=True)
class BlockReference:
    """A quantized matrix of the graph: the concatenated rows of `parts` in `format`. Holds no data.

    A tensor that lies in this very format, in a GGUF file's blocks or in a quantized checkpoint, is taken bit for bit;
    any other is rounded from its floats, to nearest or, with `clip`, with scales searched for the least error.
    """

    checkpoint: WeightSource
    parts: tuple[Slice, ...]
    format: QuantizedFormat
    transposed: bool = False
    clip: bool = False

    @property
    def rows_columns(self) -> tuple[int, int]:
        """[N, K] of the checkpoint's orientation."""
        count = sum(part.stop - part.start for part in self.parts)
        return count, stored_shape(self.checkpoint, self.parts[0].tensor)[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape in the graph's orientation."""
        n, k = self.rows_columns
        return (k, n) if self.transposed else (n, k)

    def blocks(self) -> Blocks | Fp8Weight:
        """The quantized rows, [N, K]. Raises CheckpointError for non-finite weights or scales float16 cannot hold."""
        read = [self._read(part) for part in self.parts]
        q, scale = np.concatenate([part.q for part in read]), np.concatenate([part.scale for part in read])
        if isinstance(self.format, Fp8Format):
            return Fp8Weight(q, scale)
        minima = [part.minimum for part in read if isinstance(part, Blocks) and part.minimum is not None]
        minimum: Any = np.concatenate(minima) if minima else None
        return Blocks(self.format, q, scale, minimum)

    def _read(self, part: Slice) -> Blocks | Fp8Weight:
        if stored_format(self.checkpoint, part.tensor) == self.format:
            return stored_rows(self.checkpoint, part.tensor, part.start, part.stop, self.format)
        assert isinstance(self.format, BlockFormat)
        if GGUF_FORMATS.get(self.checkpoint.tensors[part.tensor].dtype) == self.format:
            raw = self.checkpoint.read_blocks(part.tensor)[part.start : part.stop]
            kept = from_gguf(raw, self.checkpoint.tensors[part.tensor].dtype)
            for halves in (kept.scale, kept.minimum):
                if halves is not None:
                    check_finite(part.tensor, halves, str(self.checkpoint.origin))
            return kept
        rows = whole(self.checkpoint, part.tensor, "float32").rows()[part.start : part.stop]
        try:
            if self.clip:
                return quantize_clipped(rows, self.format, None)
            return quantize(rows, self.format)
        except OverflowError as error:
            where = str(self.checkpoint.origin)
            hint = "keep this model in `bf16`, or check the file: weights are rarely above 1"
            raise CheckpointError(f"tensor `{part.tensor}`: {error}", where, hint) from None

    def component(self, which: Component) -> NDArray[Any]:
        """One of the graph's tensors, in the graph's orientation: q, or a scale or minimum for each group (for each
        row where a row has one: [N])."""
        blocks = self.blocks()
        array: NDArray[Any] | None = blocks.q if which == "q" else getattr(blocks, which)
        assert array is not None
        if which == "q" and isinstance(self.format, BlockFormat):
            array = array.astype(_Q_TYPES[self.format.bits, self.format.minimum][1])
        if which != "q" and self.per_channel:
            return array.reshape(-1)
        return np.ascontiguousarray(array.T) if self.transposed else array

    @property
    def per_channel(self) -> bool:
        """Whether a row of K columns has one scale."""
        return isinstance(self.format, Fp8Format) or self.format.group == self.rows_columns[1]

    def dtype(self, which: Component) -> ir.DataType:
        """ONNX type of a component."""
        if isinstance(self.format, Fp8Format):
            return ir.DataType.FLOAT8E4M3FN if which == "q" else ir.DataType.FLOAT
        if which == "q":
            return _Q_TYPES[self.format.bits, self.format.minimum][0]
        return ir.DataType.FLOAT16 if self.format.scales == "float16" else ir.DataType.FLOAT


class BlockTensor(ir.LazyTensor):
    """A component of a BlockReference in the place of an initializer's tensor."""

    def __init__(self, reference: BlockReference, which: Component, name: str) -> None:
        n, k = reference.rows_columns
        shape: tuple[int, ...]
        if which != "q" and reference.per_channel:
            shape = (n,)
        else:
            columns = k if isinstance(reference.format, Fp8Format) or which == "q" else k // reference.format.group
            shape = (columns, n) if reference.transposed else (n, columns)
        dtype = reference.dtype(which)

        def make() -> ir.TensorProtocol:
            return ir.tensor(reference.component(which), dtype=dtype, name=name)

        super().__init__(make, dtype=dtype, shape=ir.Shape(shape), name=name)
        self.reference = reference


def concatenated_blocks(references: list[BlockReference]) -> BlockReference:
    """One reference to the rows of all, in order; ValueError when they differ in format or orientation."""
    first = references[0]
    if any((r.format, r.transposed, r.clip) != (first.format, first.transposed, first.clip) for r in references):
        raise ValueError("references of different format or orientation cannot be concatenated")
    parts = tuple(part for reference in references for part in reference.parts)
    return BlockReference(first.checkpoint, parts, first.format, first.transposed, first.clip)
