"""What lowering produces: a straight list of kernel calls over named buffers, before memory and text are decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from plankiln.compiler.formats import NUMPY, Element, KvFormat, kv_row_bytes
from plankiln.quantize.formats import BlockFormat, Blocks, Fp8Format, Fp8Weight


@dataclass(frozen=True)
class Int8:
    """Activations as int8 with a float scale for every `group` columns (plugins/cpu/int8_rows.h)."""

    group: int


@dataclass(frozen=True)
class Buffer:
    """An activation: one row of `width` elements for each token of a step."""

    name: str
    width: int
    element: Element | Int8 = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as the linear kernels read it: bf16 padded to pairs, int8 with its scales and sums."""
        if isinstance(self.element, Int8):
            return _aligned(self.width + self.width // self.element.group * 8)
        width = self.width if self.element == "float32" else _aligned(self.width, 2)
        return width * NUMPY[self.element].itemsize


@dataclass(frozen=True)
class Weight:
    """One packed tensor of weights.bin. `read()` gives it as the checkpoint lies: [n, k], or [n] for a vector.

    searched: whether its scales were searched for the least error. parts: which rows of which checkpoint tensors it is.
    Two uses of the same rows (a tied embedding) compare equal and are stored once.
    """

    name: str
    layout: Literal["tiles", "vector"]
    format: Element | BlockFormat | Fp8Format
    n: int
    k: int
    read: Callable[[], NDArray[Any] | Blocks | Fp8Weight] = field(compare=False, repr=False)
    parts: tuple[object, ...] = ()
    searched: bool = False

    @property
    def nbytes(self) -> int:
        """Packed size in bytes, in tiles of 16 rows (plugins/cpu/linear.h) or, for blocks, 32 (quantized.h)."""
        if isinstance(self.format, Fp8Format):
            return self.format.nbytes(_aligned(self.n, 16), self.k)
        if isinstance(self.format, BlockFormat):
            return self.format.nbytes(_aligned(self.n, 32), self.k)
        size = NUMPY[self.format].itemsize
        if self.layout == "vector":
            return self.n * self.k * size
        return _aligned(self.n, 16) * _aligned(self.k, 4 // size) * size


@dataclass(frozen=True)
class Call:
    """One kernel on whole activations. `write` may also be read (in-place kernels name it in `read` too).

    params: the kernel's numbers by name; `layer` is the KV cache it addresses.
    """

    kernel: str
    write: tuple[Buffer, ...]
    read: tuple[Buffer, ...]
    weights: tuple[Weight, ...] = ()
    params: tuple[tuple[str, int | float], ...] = ()

    @property
    def shape(self) -> tuple[object, ...]:
        """What must agree for two calls to be one line of a loop over layers."""
        weights = tuple((w.layout, w.format, w.n, w.k) for w in self.weights)
        params = tuple(name if name == "layer" else (name, value) for name, value in self.params)
        return self.kernel, self.write, self.read, weights, params


@dataclass(frozen=True)
class Program:
    """A whole model for one CPU target.

    kv_format, kv_heads, head_dim, layers: shape of the cache. vocab: width of the logits. max_context: rows of the
    RoPE tables.
    """

    name: str
    calls: tuple[Call, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    kv_format: KvFormat

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Distinct weights: those that several layers share, then the others in order of use, so layers lie evenly.

        Attention reads again what its own layer's cache was written with.
        """
        uses = Counter(weight for call in self.calls if call.kernel != "attention" for weight in call.weights)
        return tuple(sorted(uses, key=lambda weight: uses[weight] == 1))

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value bytes one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * kv_row_bytes(self.kv_format, self.head_dim)


def _aligned(size: int, unit: int = 64) -> int:
    return -(-size // unit) * unit
