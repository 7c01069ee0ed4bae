"""An HF model directory: config.json, safetensors shards, tokenizer.json."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plankiln.checkpoint.base import Array, Checkpoint, Progress, TensorInfo
from plankiln.checkpoint.files import file_sha256, read_json
from plankiln.checkpoint.quantization import Quantization, read_quantization
from plankiln.checkpoint.shards import Shard
from plankiln.checkpoint.tokenizer_files import TokenizerFiles, end_of_turn_ids, eos_ids
from plankiln.errors import CheckpointError, Problem

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION = "hf_quant_config.json"
_DECLARATIONS = (
    "config.json",
    "generation_config.json",
    QUANTIZATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class HfCheckpoint(Checkpoint):
    """See Checkpoint. Opening reads the headers of the shards and nothing of their data."""

    def __init__(self, directory: Path, *, cache: Path, progress: Progress | None = None) -> None:
        self.origin = directory
        self._cache = cache
        self._progress = progress
        self.config = _read_config(directory)
        generation = directory / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._tokenizer = TokenizerFiles(directory)
        self._shards: list[Shard] = []
        self._owner: dict[str, Shard] = {}
        try:
            self._open_shards()
        except BaseException:
            self.close()
            raise
        self.tensors = {name: shard.tensors[name] for name, shard in sorted(self._owner.items())}
        try:
            self.quantization = self._read_quantization()
        except BaseException:
            self.close()
            raise

    @cached_property
    def digest(self) -> str:
        paths = [self.origin / name for name in _DECLARATIONS] + [shard.path for shard in self._shards]
        lines = [
            f"{path.name}\0{file_sha256(path, cache=self._cache, progress=self._progress)}\n"
            for path in sorted(paths)
            if path.is_file()
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def tokenizer_json(self) -> bytes:
        _ = self._tokenizer.tokenizer
        return self._tokenizer.json

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @cached_property
    def special_tokens(self) -> dict[str, Any]:
        return self._tokenizer.special_tokens(self.config)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = eos_ids(self.config.get("eos_token_id"), str(self.origin / "config.json"))
        ids |= eos_ids(self.generation_config.get("eos_token_id"), str(self.origin / "generation_config.json"))
        ids |= end_of_turn_ids(self.chat_template, self._tokenizer.tokenizer)
        return tuple(sorted(ids))

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        dtype = self._info(name).dtype
        raise CheckpointError(f"tensor `{name}` of dtype `{dtype}` is not stored in blocks", str(self.origin))

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _rows(self, info: TensorInfo, start: int, stop: int) -> Array:
        return self._owner[info.name].rows(info.name, start, stop)

    def _whole(self, info: TensorInfo) -> Array:
        return self._owner[info.name].whole(info.name)

    def _read_quantization(self) -> Quantization | None:
        path = self.origin / QUANTIZATION
        declared = read_json(path).get("quantization") if path.is_file() else self.config.get("quantization_config")
        if declared is None:
            return None
        where = str(path if path.is_file() else self.origin / "config.json")
        if not isinstance(declared, dict):
            raise CheckpointError("the quantization is not an object", where, "export the checkpoint again")
        return read_quantization(declared, self.tensors, self.read, where)

    def _open_shards(self) -> None:
        index: dict[str, str] = {}
        if (self.origin / SINGLE).is_file():
            names = [SINGLE]
        elif (self.origin / INDEX).is_file():
            index = _read_index(self.origin / INDEX)
            names = sorted(set(index.values()))
            self._check_present(index)
        else:
            raise _no_weights(self.origin)
        for name in names:
            shard = Shard(self.origin / name)
            self._shards.append(shard)
            for tensor in shard.tensors:
                if tensor in self._owner:
                    what = f"tensor `{tensor}` is in two shards, `{self._owner[tensor].path.name}` and `{name}`"
                    raise CheckpointError(what, str(self.origin), "download the checkpoint again")
                self._owner[tensor] = shard
        self._check_index(index)

    def _check_present(self, index: dict[str, str]) -> None:
        problems = []
        for shard in sorted(set(index.values())):
            if not os.path.isfile(self.origin / shard):
                tensors = [tensor for tensor, owner in index.items() if owner == shard]
                what = f"missing shard `{shard}` with {len(tensors)} tensors, the first is `{tensors[0]}`"
                problems.append(Problem(what, str(self.origin), "download the checkpoint again"))
        if problems:
            raise CheckpointError(problems)

    def _check_index(self, index: dict[str, str]) -> None:
        problems = []
        for tensor, shard in index.items():
            owner = self._owner.get(tensor)
            if owner is None or owner.path.name != shard:
                where = str(self.origin / shard)
                problems.append(Problem(f"tensor `{tensor}` is missing from the shard the index names", where))
        if problems:
            raise CheckpointError(problems)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        hint = "a checkpoint is a directory with config.json, *.safetensors and tokenizer.json"
        raise CheckpointError("no config.json", str(directory), hint)
    return read_json(path)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("index has no `weight_map`", str(path), "download the file again")
    for tensor, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard
        if not plain or "\0" in shard:
            raise CheckpointError(f"tensor `{tensor}` is in `{shard}`, not a .safetensors file beside it", str(path))
    return weight_map


def _no_weights(directory: Path) -> CheckpointError:
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    if others:
        hint = f"found `{others[0]}`: rename a single file to {SINGLE}, or write {INDEX} for several"
    elif any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        hint = "pickled weights are never loaded: save the model again with safetensors"
    else:
        hint = f"expected {SINGLE}, or {INDEX} with its shards"
    return CheckpointError("no safetensors weights", str(directory), hint)
