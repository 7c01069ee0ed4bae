"""The one description of `plankiln::PagedAttention`; names and meanings follow `com.microsoft::PagedAttention`.

T packed rows, S sequences, H query heads, KV cache heads (H a multiple of KV), D head size, N blocks of `block_size`
tokens, B logical blocks a sequence, P positions of the RoPE table. Sequence s owns rows seq_starts[s] …
seq_starts[s+1]-1; its row r stands at cache position context_lens[s] + r - seq_starts[s]. Rows from seq_starts[S] on
are padding: they write nothing and their output is zero. Each row's key and value are rounded to the cache's type and
written to the cache first; attention then reads keys and values from the cache only.

How a number x lies in the cache ("storage"):
float  float32 or bfloat16: x, rounded to nearest.
fp8    float8e4m3fn: e4m3(x / k_scale), saturating at ±448, stands for that times k_scale; v_scale likewise.
int8   round-to-nearest-even(x * 127 / peak) with peak = max|x| of the token's head; it stands for that times
       peak / 127, which is in k_scale_cache. Where peak < 1e-30 the values are zero. v_scale_cache likewise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

OP_TYPE = "PagedAttention"
Storage = Literal["float", "fp8", "int8"]


@dataclass(frozen=True)
class Operand:
    """An input or output: symbolic shape, element type ("kv" is the cache's). only: the kind of node that has it."""

    name: str
    type: Literal["float32", "int32", "kv"]
    shape: tuple[str, ...]
    only: Literal["rotary", "fp8", "int8"] | None = None


INPUTS: tuple[Operand, ...] = (
    Operand("query", "float32", ("T", "H*D")),
    Operand("key", "float32", ("T", "KV*D")),
    Operand("value", "float32", ("T", "KV*D")),
    Operand("k_cache", "kv", ("N", "block_size", "KV", "D")),
    Operand("v_cache", "kv", ("N", "block_size", "KV", "D")),
    Operand("seq_starts", "int32", ("S+1",)),
    Operand("context_lens", "int32", ("S",)),
    Operand("block_table", "int32", ("S", "B")),
    Operand("k_scale", "float32", (), "fp8"),
    Operand("v_scale", "float32", (), "fp8"),
    Operand("k_scale_cache", "float32", ("N", "block_size", "KV"), "int8"),
    Operand("v_scale_cache", "float32", ("N", "block_size", "KV"), "int8"),
    Operand("cos_cache", "float32", ("P", "D/2"), "rotary"),
    Operand("sin_cache", "float32", ("P", "D/2"), "rotary"),
    Operand("positions", "int32", ("T",), "rotary"),
)
OUTPUTS: tuple[Operand, ...] = (
    Operand("attn", "float32", ("T", "H*D")),
    Operand("k_cache_out", "kv", ("N", "block_size", "KV", "D")),
    Operand("v_cache_out", "kv", ("N", "block_size", "KV", "D")),
    Operand("k_scale_cache_out", "float32", ("N", "block_size", "KV"), "int8"),
    Operand("v_scale_cache_out", "float32", ("N", "block_size", "KV"), "int8"),
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


def overload(*, do_rotary: bool, storage: Storage) -> str:
    """Which of the ONNX function bodies stands for such a node."""
    return "_".join((["rotary"] if do_rotary else []) + ([] if storage == "float" else [storage]))


def inputs(*, do_rotary: bool, storage: Storage) -> list[Operand]:
    """Such a node's inputs in order."""
    return [operand for operand in INPUTS if operand.only in (None, storage, "rotary" if do_rotary else None)]


def outputs(storage: Storage) -> list[Operand]:
    """Such a node's outputs in order."""
    return [operand for operand in OUTPUTS if operand.only in (None, storage)]
