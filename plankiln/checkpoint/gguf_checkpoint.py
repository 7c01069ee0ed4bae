"""A .gguf file as a checkpoint with HF names and layout."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from plankiln.checkpoint.base import BLOCK_DTYPES, Array, Checkpoint, Progress, TensorInfo
from plankiln.checkpoint.files import file_sha256
from plankiln.checkpoint.gguf_config import GGUF_EMBEDDING, ROPE_FACTORS, MetadataReader, hf_name, row_order
from plankiln.checkpoint.gguf_file import GgufFile, GgufTensor
from plankiln.checkpoint.gguf_tokenizer import GgufTokenizer
from plankiln.checkpoint.shards import numpy_dtype
from plankiln.checkpoint.tokenizer_files import end_of_turn_ids, load_tokenizer
from plankiln.errors import CheckpointError, Problem


class GgufCheckpoint(Checkpoint):
    """See Checkpoint. Quantised tensors are dequantised when read, one at a time; `read_blocks` gives them raw."""

    def __init__(self, path: Path, *, cache: Path, progress: Progress | None = None) -> None:
        self.origin = path
        self._cache = cache
        self._progress = progress
        self.generation_config = {}
        self._file = GgufFile(path)
        try:
            self._vocabulary = GgufTokenizer(self._file.metadata, path)
            self.config = self._read_config()
            self._sources = self._name_tensors()
        except BaseException:
            self.close()
            raise
        self.tensors = {
            name: TensorInfo(name, source.kind, source.shape, source.nbytes) for name, source in self._sources.items()
        }

    @cached_property
    def digest(self) -> str:
        return file_sha256(self.origin, cache=self._cache, progress=self._progress)

    @cached_property
    def tokenizer_json(self) -> bytes:
        size = len(self._vocabulary.tokens)
        if size != self.config["vocab_size"]:
            what = f"the tokenizer has {size} tokens, the embedding {self.config['vocab_size']} rows"
            raise CheckpointError(what, str(self.origin))
        return self._vocabulary.build().to_str().encode()

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    @property
    def special_tokens(self) -> dict[str, Any]:
        return self._vocabulary.special_tokens()

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        turn_ends = end_of_turn_ids(self.chat_template, self._tokenizer)
        return tuple(sorted(self._vocabulary.declared_ends() | turn_ends))

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        info = self._info(name)
        if info.dtype not in BLOCK_DTYPES:
            raise CheckpointError(f"tensor `{name}` of dtype `{info.dtype}` is not stored in blocks", str(self.origin))
        return self._stored(self._sources[name], 0, info.shape[0])

    def close(self) -> None:
        self._file.close()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_json, str(self.origin))

    def _whole(self, info: TensorInfo) -> Array:
        return self._rows(info, 0, info.shape[0])

    def _rows(self, info: TensorInfo, start: int, stop: int) -> Array:
        source = self._sources[info.name]
        stored = self._stored(source, start, stop)
        shape = (stop - start, *source.shape[1:])
        if source.kind in BLOCK_DTYPES:
            from gguf import quants
            from gguf.constants import GGMLQuantizationType

            if stored.size == 0:
                return np.empty(shape, np.float32)
            with np.errstate(all="ignore"):  # a non-finite scale is for check_finite to name
                values: Array = quants.dequantize(stored, GGMLQuantizationType[source.kind])
            return values.reshape(shape)
        array: Array = stored.view(numpy_dtype(source.kind)).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def _stored(self, source: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
        data = self._file.data(source)
        order = row_order(source.name, self.config)
        if order is None:
            return data[start:stop]
        gathered: NDArray[np.uint8] = data[order[start:stop]]
        return gathered

    def _read_config(self) -> dict[str, Any]:
        reader = MetadataReader(self._file.metadata, self.origin)
        embedding = self._file.tensors.get(GGUF_EMBEDDING)
        if embedding is None:
            raise CheckpointError(
                f"missing tensor `{GGUF_EMBEDDING}`", str(self.origin), "the file holds no whole model"
            )
        factors = self._file.tensors.get(ROPE_FACTORS)
        values = None
        if factors is not None:
            if factors.kind != "F32":
                raise CheckpointError(f"tensor `{ROPE_FACTORS}` is stored as `{factors.kind}`", str(self.origin))
            values = self._file.data(factors).view(np.float32).reshape(-1)
        config = reader.read(frozenset(self._file.tensors), embedding.rows, values)
        special = self._vocabulary.special_tokens()
        return config | {key: special[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def _name_tensors(self) -> dict[str, GgufTensor]:
        sources: dict[str, GgufTensor] = {}
        problems = []
        for name, tensor in self._file.tensors.items():
            if name == ROPE_FACTORS:
                continue
            target = hf_name(name)
            if target is None or target in sources:
                problems.append(Problem(f"unexpected tensor `{name}`", str(self.origin)))
                continue
            order = row_order(name, self.config)
            if order is not None and tensor.rows != order.size:
                what = f"tensor `{name}` has {tensor.rows} rows where {order.size} are expected"
                problems.append(Problem(what, str(self.origin)))
            sources[target] = tensor
        if problems:
            raise CheckpointError(problems)
        return dict(sorted(sources.items()))
