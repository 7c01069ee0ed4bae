"""The one description of `plankiln::PagedAttention`; names and meanings follow `com.microsoft::PagedAttention`.

T packed rows, S sequences, H query heads, KV cache heads (H a multiple of KV), D head size, N blocks of `block_size`
tokens, B logical blocks a sequence, P positions of the RoPE table. Sequence s owns rows seq_starts[s] …
seq_starts[s+1]-1; its row r stands at cache position context_lens[s] + r - seq_starts[s]. Rows from seq_starts[S] on
are padding: they write nothing and their output is zero. Each row's key and value are rounded to the cache's type and
written to the cache first; attention then reads keys and values from the cache only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

OP_TYPE = "PagedAttention"
ROTARY_OVERLOAD = "rotary"


@dataclass(frozen=True)
class Operand:
    """An input or output: symbolic shape, element type ("kv" is the cache's: float32 or bfloat16)."""

    name: str
    type: Literal["float32", "int32", "kv"]
    shape: tuple[str, ...]
    rotary_only: bool = False


INPUTS: tuple[Operand, ...] = (
    Operand("query", "float32", ("T", "H*D")),
    Operand("key", "float32", ("T", "KV*D")),
    Operand("value", "float32", ("T", "KV*D")),
    Operand("k_cache", "kv", ("N", "block_size", "KV", "D")),
    Operand("v_cache", "kv", ("N", "block_size", "KV", "D")),
    Operand("seq_starts", "int32", ("S+1",)),
    Operand("context_lens", "int32", ("S",)),
    Operand("block_table", "int32", ("S", "B")),
    Operand("cos_cache", "float32", ("P", "D/2"), rotary_only=True),
    Operand("sin_cache", "float32", ("P", "D/2"), rotary_only=True),
    Operand("positions", "int32", ("T",), rotary_only=True),
)
OUTPUTS: tuple[Operand, ...] = (
    Operand("attn", "float32", ("T", "H*D")),
    Operand("k_cache_out", "kv", ("N", "block_size", "KV", "D")),
    Operand("v_cache_out", "kv", ("N", "block_size", "KV", "D")),
)


@dataclass(frozen=True)
class Attributes:
    """The node's attributes.

    local_window_size: w > 0 lets position p see p-w+1 … p; -1 lets it see 0 … p.
    softcap: c > 0 turns a score x into c * tanh(x / c), before the mask; 0 leaves it.
    do_rotary: 1 rotates query and key by cos/sin rows `positions` (halves, not interleaved) before anything else.
    """

    num_heads: int
    kv_num_heads: int
    scale: float
    local_window_size: int = -1
    softcap: float = 0.0
    do_rotary: int = 0
    rotary_interleaved: int = 0

    def __post_init__(self) -> None:
        if self.kv_num_heads < 1 or self.num_heads < 1 or self.num_heads % self.kv_num_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.kv_num_heads} key/value heads")
        if self.local_window_size == 0 or self.local_window_size < -1:
            raise ValueError(f"local_window_size must be positive or -1, not {self.local_window_size}")
        if self.softcap < 0 or self.do_rotary not in (0, 1) or self.rotary_interleaved != 0:
            raise ValueError(f"unsupported attributes: {self}")

    def as_dict(self) -> dict[str, int | float]:
        """Attribute name → value, as an ONNX node carries them."""
        return asdict(self)

    @property
    def overload(self) -> str:
        """Which of the two ONNX function bodies stands for a node with these attributes."""
        return ROTARY_OVERLOAD if self.do_rotary else ""


def input_names(*, do_rotary: bool) -> list[str]:
    """The node's inputs in order."""
    return [operand.name for operand in INPUTS if do_rotary or not operand.rotary_only]
