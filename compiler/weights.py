"""Weights by reference: a graph's tensor says which rows of which checkpoint tensors it is, and reads them late."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from plankiln.checkpoint import Quantization, check_finite
from plankiln.compiler.formats import NUMPY, ONNX, Element
from plankiln.compiler.stored import quantization_of, stored_floats, stored_shape
from plankiln.errors import CheckpointError

Array = NDArray[Any]

_CHUNK_BYTES = 1 << 24


class TensorHeader(Protocol):
    """What a checkpoint says of a tensor before any of its bytes is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class WeightSource(Protocol):
    """The part of `plankiln.checkpoint.Checkpoint` that export needs."""

    @property
    def origin(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...
    @property
    def quantization(self) -> Quantization | None: ...
    def read(self, name: str) -> Array: ...
    def read_rows(self, name: str, start: int, stop: int) -> Array: ...
    def read_blocks(self, name: str) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Slice:
    """Rows start … stop-1 (axis 0) of the checkpoint tensor `tensor`."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class Reference:
    """A weight of the graph: the concatenated rows of `parts`, cast to `dtype`, transposed when it multiplies from the
    right ([N,K] in the checkpoint, [K,N] in the graph). Holds no data; every call reads the checkpoint again."""

    checkpoint: WeightSource
    parts: tuple[Slice, ...]
    dtype: Element
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the graph's orientation."""
        count = sum(part.stop - part.start for part in self.parts)
        checkpoint_shape = (count, *stored_dimensions(self.checkpoint, self.parts[0].tensor)[1:])
        return checkpoint_shape[::-1] if self.transposed else checkpoint_shape

    def rows(self) -> Array:
        """[N, K] (or [N] for a vector), the checkpoint's orientation, in `dtype`."""
        cast = [self._cast(part) for part in self.parts]
        return cast[0] if len(cast) == 1 else np.concatenate(cast)

    def array(self) -> Array:
        """The tensor as the graph sees it; a transposed one is a view of `rows()`."""
        return self.rows().T if self.transposed else self.rows()

    def chunks(self) -> Iterator[Array]:
        """The bytes of `array()` in C order, as contiguous arrays of some 16 MiB, so that no tensor is copied whole."""
        dtype = NUMPY[self.dtype]
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        step = max(1, _CHUNK_BYTES // max(1, row_bytes))
        parts = [self._read(part) for part in self.parts]
        if self.transposed:
            for start in range(0, self.shape[0], step):
                columns = np.concatenate([part[:, start : start + step] for part in parts])
                yield np.ascontiguousarray(columns.T.astype(dtype, copy=False))
            return
        for part in parts:
            for start in range(0, len(part), step):
                yield np.ascontiguousarray(part[start : start + step].astype(dtype, copy=False))

    def _cast(self, part: Slice) -> Array:
        rows = self._read(part)
        with np.errstate(over="ignore"):
            cast = rows.astype(NUMPY[self.dtype], copy=False)
        if cast.dtype != rows.dtype:
            try:
                check_finite(part.tensor, cast, str(self.checkpoint.origin))
            except CheckpointError:
                what = f"tensor `{part.tensor}` holds values beyond the range of {self.dtype}"
                hint = f"its largest is {np.abs(rows).max():.3g}: the file is damaged or training diverged"
                raise CheckpointError(what, str(self.checkpoint.origin), hint) from None
        return cast

    def _read(self, part: Slice) -> Array:
        if quantization_of(self.checkpoint, part.tensor) is not None:
            return stored_floats(self.checkpoint, part.tensor, part.start, part.stop)
        rows = self.checkpoint.read_rows(part.tensor, part.start, part.stop)
        check_finite(part.tensor, rows, str(self.checkpoint.origin))
        return rows


def whole(checkpoint: WeightSource, tensor: str, dtype: Element, *, transposed: bool = False) -> Reference:
    """A Reference to all rows of one checkpoint tensor."""
    return Reference(checkpoint, (Slice(tensor, 0, stored_dimensions(checkpoint, tensor)[0]),), dtype, transposed)


def stored_dimensions(checkpoint: WeightSource, tensor: str) -> tuple[int, ...]:
    """The shape of a weight, whatever it is stored in."""
    if quantization_of(checkpoint, tensor) is not None:
        return stored_shape(checkpoint, tensor)
    return checkpoint.tensors[tensor].shape


def concatenated(references: list[Reference]) -> Reference:
    """One Reference to the rows of all, in order; they must agree in dtype and orientation (ValueError otherwise)."""
    first = references[0]
    if any((r.dtype, r.transposed) != (first.dtype, first.transposed) for r in references):
        raise ValueError("references of different dtype or orientation cannot be concatenated")
    parts = tuple(part for reference in references for part in reference.parts)
    return Reference(first.checkpoint, parts, first.dtype, first.transposed)


class ReferenceTensor(ir.LazyTensor):
    """A Reference in the place of an onnx-ir initializer's tensor; read anew at every access, never cached."""

    def __init__(self, reference: Reference, name: str) -> None:
        super().__init__(self._tensor_now, ONNX[reference.dtype], ir.Shape(reference.shape), name=name)
        self.reference = reference

    def _tensor_now(self) -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(self.reference.array()), name=self.name)

    def numpy(self) -> Array:
        return self.reference.array()

    def tobytes(self) -> bytes:
        return b"".join(chunk.tobytes() for chunk in self.reference.chunks())

    def tofile(self, file: BinaryIO) -> None:
        for chunk in self.reference.chunks():
            file.write(chunk.view(np.uint8).data)


def reference_of(value: ir.Value) -> Reference | None:
    """The Reference behind an initializer, or None for any other value."""
    tensor = value.const_value
    return tensor.reference if isinstance(tensor, ReferenceTensor) else None
