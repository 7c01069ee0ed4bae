"""Safetensors headers, parsed with every offset checked before a byte of data is used.

Format: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data; the
offsets count from the end of the header and tile the data without gap or overlap.
"""

from __future__ import annotations

import json
import math
import mmap
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from plankiln.checkpoint.base import Array, TensorInfo
from plankiln.checkpoint.files import REDOWNLOAD, map_file, unmap
from plankiln.errors import CheckpointError

MAX_HEADER = 100_000_000
MAX_RANK = 8
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_NUMPY_NAMES = {
    "BOOL": "bool",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    **{kind + str(8 * size): f"<{kind.lower()}{size}" for kind in "UI" for size in (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    begin: int


class Shard:
    """One mapped .safetensors file. Raises CheckpointError, naming file and tensor, for any flaw in its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | bytes = map_file(path)
        try:
            self._entries = self._parse()
            self.tensors = {name: entry.info for name, entry in self._entries.items()}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        unmap(self._map)

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows start … stop of axis 0: a read-only view of the map, a copy only where the file is misaligned."""
        entry = self._entries[name]
        row_shape = entry.info.shape[1:]
        row_bytes = math.prod(row_shape) * ITEM_BYTES[entry.info.dtype]
        return self._view(entry, entry.begin + start * row_bytes, (stop - start, *row_shape))

    def whole(self, name: str) -> Array:
        entry = self._entries[name]
        return self._view(entry, entry.begin, entry.info.shape)

    def _view(self, entry: _Entry, begin: int, shape: tuple[int, ...]) -> Array:
        dtype = numpy_dtype(entry.info.dtype)
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        array: Array = np.frombuffer(self._map, dtype, math.prod(shape), begin).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def _parse(self) -> dict[str, _Entry]:
        size = len(self._map)
        if size < 8:
            self._fail(f"truncated: {size} bytes cannot hold a safetensors header")
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER:
            self._fail(f"header length {length} is over the format's limit of {MAX_HEADER}")
        if 8 + length > size:
            self._fail(f"truncated: the header needs {8 + length} bytes, the file has {size}")
        header = self._decode(self._map[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            self._fail("`__metadata__` is not an object")
        entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        self._check_tiling(entries, 8 + length, size)
        return entries

    def _decode(self, text: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            result: dict[str, Any] = {}
            for key, value in pairs:
                if key in result:
                    self._fail(f"name `{key}` occurs twice in the header")
                result[key] = value
            return result

        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
            if isinstance(header, dict):
                "".join(header).encode("utf-8")
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            self._fail(f"header is not valid JSON ({reason})")
        if not isinstance(header, dict):
            self._fail("header is not a JSON object")
        return header

    def _entry(self, name: str, value: object, data_start: int) -> _Entry:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"tensor `{name}` needs exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self._fail(f"tensor `{name}` has unknown dtype {reprlib.repr(dtype)}", f"known: {', '.join(ITEM_BYTES)}")
        if not _is_counts(shape) or len(shape) > MAX_RANK or math.prod(max(n, 1) for n in shape) >= 1 << 59:
            self._fail(f"tensor `{name}` has an invalid shape {reprlib.repr(shape)}")
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(f"tensor `{name}` has invalid data_offsets {reprlib.repr(offsets)}")
        need = math.prod(shape) * ITEM_BYTES[dtype]
        if offsets[1] - offsets[0] != need:
            have = offsets[1] - offsets[0]
            self._fail(f"tensor `{name}` of {dtype} {shape} needs {need} bytes, its data_offsets span {have}")
        return _Entry(TensorInfo(name, dtype, tuple(shape), need), data_start + offsets[0])

    def _check_tiling(self, entries: dict[str, _Entry], data_start: int, size: int) -> None:
        end, previous = data_start, ""
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].info.nbytes)):
            if entry.begin < end:
                self._fail(f"tensor `{name}` overlaps tensor `{previous}`")
            if entry.begin > end:
                self._fail(f"{entry.begin - end} unaccounted bytes before tensor `{name}`")
            end, previous = entry.begin + entry.info.nbytes, name
            if end > size:
                self._fail(f"truncated: tensor `{name}` ends at byte {end}, the file has {size}")
        if end < size:
            self._fail(f"{size - end} unaccounted bytes at the end of the file")

    def _fail(self, what: str, hint: str = REDOWNLOAD) -> NoReturn:
        raise CheckpointError(what.encode("utf-8", "backslashreplace").decode(), str(self.path), hint)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a safetensors dtype name."""
    if name in _NUMPY_NAMES:
        return np.dtype(_NUMPY_NAMES[name])
    import ml_dtypes

    extended = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
    dtype: np.dtype[Any] = np.dtype(extended[name])
    return dtype


def _is_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)
