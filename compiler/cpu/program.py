"""What lowering produces: a straight list of kernel calls over named buffers, before memory and text are decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

Element = Literal["float32", "bfloat16"]
ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Buffer:
    """An activation: one row of `width` elements for each token of a step."""

    name: str
    width: int
    element: Element = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; bf16 rows are padded to pairs, as the linear kernel reads them."""
        width = self.width if self.element == "float32" else (self.width + 1) // 2 * 2
        return width * ELEMENT_BYTES[self.element]


@dataclass(frozen=True)
class Weight:
    """One packed tensor of weights.bin. `rows()` reads it as the checkpoint lies: [n, k], or [n] for a vector.

    parts: which rows of which checkpoint tensors it is. Two uses of the same rows (a tied embedding) compare equal and
    are stored once.
    """

    name: str
    layout: Literal["tiles", "vector"]
    element: Element
    n: int
    k: int
    rows: Callable[[], NDArray[Any]] = field(compare=False, repr=False)
    parts: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        """Packed size in bytes (see plugins/cpu/linear.h)."""
        if self.layout == "vector":
            return self.n * self.k * ELEMENT_BYTES[self.element]
        pair = 4 // ELEMENT_BYTES[self.element]
        return -(-self.n // 16) * 16 * -(-self.k // pair) * pair * ELEMENT_BYTES[self.element]


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
        weights = tuple((w.layout, w.element, w.n, w.k) for w in self.weights)
        params = tuple(name if name == "layer" else (name, value) for name, value in self.params)
        return self.kernel, self.write, self.read, weights, params


@dataclass(frozen=True)
class Program:
    """A whole model for one CPU target.

    kv_element, kv_heads, head_dim, layers: shape of the cache. vocab: width of the logits. max_context: rows of the
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
    kv_element: Element

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Distinct weights: those that several calls share, then the others in order of use, so layers lie evenly."""
        uses = Counter(weight for call in self.calls for weight in call.weights)
        return tuple(sorted(uses, key=lambda weight: uses[weight] == 1))

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value bytes one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_element]
