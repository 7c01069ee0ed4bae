"""GGUF headers, parsed with every length checked against the file before it is believed.

The `gguf` package's own reader trusts the counts in a header (a huge array length past the end of the file keeps it
looping), so the header is read here; block sizes and dequantisation are the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from plankiln.checkpoint.base import BLOCK_DTYPES
from plankiln.checkpoint.files import REDOWNLOAD, map_file, unmap
from plankiln.errors import CheckpointError

MAX_RANK = 4
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the file has it: its GGUF name, numpy-ordered shape, kind, and rows of `row_bytes` bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GgufFile:
    """A mapped .gguf file: `metadata` (Python values) and `tensors` by GGUF name. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | bytes = map_file(path)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        unmap(self._map)

    def data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [rows, row_bytes], a read-only view of the map."""
        if tensor.nbytes == 0:
            return np.empty((tensor.rows, tensor.row_bytes), np.uint8)
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.begin)
        return flat.reshape(tensor.rows, tensor.row_bytes)

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            self._fail("not a GGUF file: wrong magic")
        self._at = 4
        version = self._scalar("<I", "version")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            what = "big-endian GGUF files are not supported" if swapped else f"GGUF version {version} is not supported"
            self._fail(what, "convert the model again with a current llama.cpp")
        tensor_count = self._scalar("<Q", "tensor count")
        pair_count = self._scalar("<Q", "metadata count")
        for _ in range(pair_count):
            key = self._string("metadata key")
            if key in self.metadata:
                self._fail(f"metadata key `{key}` occurs twice")
            self.metadata[key] = self._value(self._scalar("<I", key), key)
        declared = [self._tensor_header() for _ in range(self._bounded(tensor_count, 32, "tensor list"))]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self._fail(f"`general.alignment` is not a power of two: `{alignment}`")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in declared:
            self._add(name, shape, kind, data_start + offset)
        self._check_extents()

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("tensor name")
        rank = self._scalar("<I", name)
        if not 1 <= rank <= MAX_RANK:
            self._fail(f"tensor `{name}` has {rank} dimensions")
        shape = tuple(self._scalar("<Q", name) for _ in range(rank))[::-1]
        return name, shape, self._scalar("<I", name), self._scalar("<Q", name)

    def _add(self, name: str, shape: tuple[int, ...], kind_id: int, begin: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if name in self.tensors:
            self._fail(f"tensor `{name}` occurs twice")
        known = {member.value: member.name for member in GGMLQuantizationType}
        kind = known.get(kind_id, str(kind_id))
        if kind not in BLOCK_DTYPES and kind not in _FLOATS:
            supported = ", ".join([*_FLOATS, *sorted(BLOCK_DTYPES)])
            self._fail(f"tensor `{name}` is stored as `{kind}`", f"supported: {supported}; quantize the model as one")
        if math.prod(max(n, 1) for n in shape) >= 1 << 59:
            self._fail(f"tensor `{name}` has an invalid shape {list(shape)}")
        if kind in _FLOATS:
            block, block_bytes = 1, _FLOATS[kind]
        else:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind_id)]
        if kind in BLOCK_DTYPES and (len(shape) < 2 or shape[-1] % block):
            self._fail(f"tensor `{name}` of shape {list(shape)} cannot be stored as `{kind}` in blocks of {block}")
        row_bytes = math.prod(shape[1:]) // block * block_bytes
        self.tensors[name] = GgufTensor(name, kind, shape, begin, row_bytes)

    def _check_extents(self) -> None:
        end, previous = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.begin, t.nbytes)):
            if tensor.begin < end:
                self._fail(f"tensor `{tensor.name}` overlaps tensor `{previous}`")
            end, previous = tensor.begin + tensor.nbytes, tensor.name
            if end > len(self._map):
                self._fail(f"truncated: tensor `{tensor.name}` ends at byte {end}, the file has {len(self._map)}")

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        if self._at + size > len(self._map):
            self._fail(f"truncated inside `{what}`")
        value = struct.unpack_from(code, self._map, self._at)[0]
        self._at += size
        return value

    def _bounded(self, count: int, each: int, what: str) -> int:
        """`count`, once that many items of at least `each` bytes can still follow."""
        if count * each > len(self._map) - self._at:
            self._fail(f"truncated: `{what}` has {count} items, more than the file can hold")
        return count

    def _string(self, what: str) -> str:
        length = self._bounded(self._scalar("<Q", what), 1, what)
        text = self._map[self._at : self._at + length]
        self._at += length
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"`{what}` is not UTF-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            self._fail(f"metadata `{key}` has unknown type {kind}")
        element = self._scalar("<I", key)
        count = self._scalar("<Q", key)
        if element == _STRING:
            return [self._string(key) for _ in range(self._bounded(count, 8, key))]
        if element not in _SCALARS:
            self._fail(f"metadata `{key}` is an array of unknown type {element}")
        size = struct.calcsize(_SCALARS[element])
        self._bounded(count, size, key)
        values = np.frombuffer(self._map, np.dtype(_SCALARS[element]), count, self._at).tolist()
        self._at += count * size
        return values

    def _fail(self, what: str, hint: str = REDOWNLOAD) -> NoReturn:
        raise CheckpointError(what, str(self.path), hint)
