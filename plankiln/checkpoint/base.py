"""The one interface to a model's files: named tensors in HF layout, configuration, tokenizer, identity."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from plankiln.checkpoint.quantization import LinearQuantization, Quantization, owned_tensors, stored_shape
from plankiln.errors import CheckpointError, Problem

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); the total is 0 when unknown."""

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
BLOCK_DTYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as stored. `dtype` is safetensors' name (`BF16`) or GGUF's kind (`Q4_1`); `nbytes` is on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint(ABC):
    """An opened model. Tensors have HF names and layout whatever the files are; a context manager."""

    origin: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    quantization: Quantization | None = None

    @property
    @abstractmethod
    def digest(self) -> str:
        """sha256 (hex) of the files that matter; computed on first use, remembered in the cache directory."""

    @property
    @abstractmethod
    def tokenizer_json(self) -> bytes:
        """A `tokenizers` tokenizer.json. Raises CheckpointError when there is none or it is not understood."""

    @property
    @abstractmethod
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template."""

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, Any]:
        """`bos_token`, `eos_token`, `unk_token`, `pad_token` (str or None), each with `…_id` (int or None), and
        `add_bos_token` (bool): whether a prompt that no chat template wrote starts with BOS."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a generation, ascending."""

    @abstractmethod
    def _rows(self, info: TensorInfo, start: int, stop: int) -> Array:
        """Rows start … stop of axis 0, bounds already checked."""

    @abstractmethod
    def _whole(self, info: TensorInfo) -> Array: ...

    @abstractmethod
    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """The raw quantised blocks of a GGUF tensor: uint8 [rows, bytes per row], rows in HF order.

        Raises CheckpointError when the tensor is not stored in blocks.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""

    def read(self, name: str) -> Array:
        """The whole tensor in its native dtype (ml_dtypes for BF16 and F8), a view of the mapped file where
        possible; GGUF's quantised kinds are dequantised to float32. Read-only."""
        return self._whole(self._info(name))

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Like `read`, only rows start … stop of axis 0; the bytes of other rows are not touched."""
        info = self._info(name)
        rows = info.shape[0] if info.shape else 0
        if not 0 <= start <= stop <= rows:
            raise CheckpointError(f"rows `{start}:{stop}` outside tensor `{name}` of {rows} rows", str(self.origin))
        return self._rows(info, start, stop)

    def validate(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the tensors with the names and shapes an architecture needs.

        Raises one CheckpointError with every missing or extra tensor, wrong shape and unusable dtype. Rotary
        `inv_freq` buffers are ignored, as is a stored copy of a tied `lm_head` (which must equal the embedding).
        """
        problems: list[Problem] = []
        extras = [name for name in self.tensors if name not in expected and not self._is_ignorable(name)]
        for name, shape in expected.items():
            info = self.tensors.get(name)
            if info is None:
                problems.append(self._missing(name, extras))
            elif info.shape != self._stored_shape(name, shape):
                what = f"tensor `{name}` has shape {list(info.shape)} where {list(shape)} is expected"
                problems.append(Problem(what, str(self.origin), "config.json and the weights disagree"))
            elif info.dtype not in FLOAT_DTYPES | BLOCK_DTYPES and self._linear(name) is None:
                what = f"tensor `{name}` has dtype `{info.dtype}` where floating point is expected"
                problems.append(Problem(what, str(self.origin), f"supported: {', '.join(sorted(FLOAT_DTYPES))}"))
        for name in extras:
            near = difflib.get_close_matches(name, [n for n in expected if n not in self.tensors], n=1)
            hint = f"did you mean `{near[0]}`?" if near else "config.json describes no such tensor"
            problems.append(Problem(f"unexpected tensor `{name}`", str(self.origin), hint))
        if problems:
            raise CheckpointError(problems)
        if LM_HEAD in self.tensors and LM_HEAD not in expected and EMBEDDING in self.tensors:
            self._check_tied_head()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError([self._missing(name, list(self.tensors))])
        return info

    def _missing(self, name: str, candidates: list[str]) -> Problem:
        near = difflib.get_close_matches(name, candidates, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "download the checkpoint again, or check its config.json"
        return Problem(f"missing tensor `{name}`", str(self.origin), hint)

    def _linear(self, name: str) -> LinearQuantization | None:
        return self.quantization.linear(name.removesuffix(".weight")) if self.quantization else None

    def _stored_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        linear = self._linear(name)
        return shape if linear is None else stored_shape(linear, *shape)[1]

    def _is_ignorable(self, name: str) -> bool:
        if self.quantization and owned_tensors(self.quantization, name):
            return True
        tied_head = name == LM_HEAD and bool(self.config.get("tie_word_embeddings"))
        return tied_head or name.endswith("rotary_emb.inv_freq")

    def _check_tied_head(self) -> None:
        head, embedding = self.tensors[LM_HEAD], self.tensors[EMBEDDING]
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        step = 4096
        for start in range(0, head.shape[0] if same else 0, step):
            stop = min(start + step, head.shape[0])
            same = same and self._rows(head, start, stop).tobytes() == self._rows(embedding, start, stop).tobytes()
        if not same:
            raise CheckpointError(
                f"`tie_word_embeddings` is set, but `{LM_HEAD}` differs from `{EMBEDDING}`",
                str(self.origin),
                "set `tie_word_embeddings` to false in config.json, or remove the tensor",
            )


def check_finite(name: str, array: Array, where: str) -> None:
    """Raise CheckpointError when a float array holds NaN or infinities, with their count and the first index.

    where: the file or directory it came from.     Works in chunks of a million elements; arrays of integers pass.
    """
    if array.dtype.kind in "iub":
        return
    flat = array.reshape(-1)
    step = 1 << 20
    count, first = 0, -1
    for start in range(0, flat.size, step):
        finite = _finite(flat[start : start + step])
        if not finite.all():
            bad = np.flatnonzero(~finite)
            first = first if count else start + int(bad[0])
            count += bad.size
    if count:
        index = [int(i) for i in np.unravel_index(first, array.shape)]
        value = str(flat[first])
        raise CheckpointError(
            f"{count} non-finite values in tensor `{name}`, the first is {value} at {index}",
            where,
            "the file is damaged or training diverged; download it again or use another revision",
        )


def _finite(values: Array) -> NDArray[np.bool_]:
    if values.dtype.itemsize == 2:
        exponent = np.uint16(0x7C00 if values.dtype == np.float16 else 0x7F80)
        finite: NDArray[np.bool_] = (values.view(np.uint16) & exponent) != exponent
        return finite
    return np.isfinite(values)
