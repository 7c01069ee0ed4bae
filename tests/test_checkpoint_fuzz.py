"""Mutated headers: whatever the bytes say, the answer is a checkpoint or a CheckpointError."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tiny_gguf, write_tiny_hf

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.checkpoint.shards import Shard
from plankiln.errors import CheckpointError

SMALL: dict[str, Any] = {
    **{"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
VALUES: list[Any] = [
    *(-1, 0, 1, 3, 1.5, 1 << 31, 1 << 62, 1 << 63, 1 << 70, 10**400, float("nan"), True, None),
    *("", "F32", "F99", "\ud800", "x" * 5000, [], [0], [1 << 62, 1 << 62], [0, 1 << 62, 1 << 62]),
    *([-1, 2], [2, 1], [0, 96], ["a"], [[1]], [1] * 40, {}, {"dtype": "F32"}),
]


def valid_header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [96, 128]},
        "c": {"dtype": "U8", "shape": [0, 3], "data_offsets": [128, 128]},
    }


def mutate_json(header: dict[str, Any], rng: random.Random) -> None:
    key = rng.choice(list(header))
    action = rng.randrange(6)
    if action == 0:
        del header[key]
    elif action == 1:
        header[key] = rng.choice(VALUES)
    elif action == 2:
        header[rng.choice(["d", "", "\udfff", "é" * 99, "__metadata__"])] = header[key]
    elif isinstance(header[key], dict) and header[key]:
        field = rng.choice(list(header[key]))
        old = header[key][field]
        if action == 3 and isinstance(old, list) and old:
            old = list(old)
            old[rng.randrange(len(old))] = rng.choice(VALUES)
            header[key][field] = old
        elif action == 4:
            header[key][rng.choice(["extra", field])] = rng.choice(VALUES)
        else:
            header[key][field] = rng.choice(VALUES)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    mutable = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(mutable))
        action = rng.randrange(6)
        if action == 0:
            mutable[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            mutable[at] = rng.choice([0, 0x7F, 0x80, 0xFF, ord("["), ord('"'), ord("9")])
        elif action == 2:
            del mutable[at : at + rng.randrange(1, 9)]
        elif action == 3:
            mutable[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif action == 4:
            mutable[at : at + 8] = struct.pack("<Q", rng.choice([1 << 63, (1 << 64) - 1, 1 << 32, 1 << 40, 255]))
        else:
            del mutable[at + 1 :]
    return bytes(mutable)


def read_shard(path: Path) -> None:
    shard = Shard(path)
    for name, info in shard.tensors.items():
        assert shard.whole(name).shape == info.shape
    shard.close()


def test_mutated_safetensors_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    refused = 0
    for seed in range(1000):
        rng = random.Random(seed)
        header = valid_header()
        if seed % 3:
            for _ in range(rng.randrange(1, 4)):
                mutate_json(header, rng)
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + bytes(128)
        path.write_bytes(data if seed % 3 else mutate_bytes(data, rng))
        message = ""
        try:
            read_shard(path)
        except CheckpointError as error:
            message = str(error)
        refused += bool(message)
        assert not message or str(path) in message.encode("utf-8").decode()
    assert refused > 600


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"", "cannot hold a safetensors header"),
        (struct.pack("<Q", 1 << 40) + b"{}", "over the format's limit"),
        (struct.pack("<Q", 90_000_000) + b"{}", "the header needs 90000008 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 4) + b"nope", "not valid JSON"),
        (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "not valid JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "nested too deeply"),
        (struct.pack("<Q", 17) + b'{"a": {}, "a": 1}', "name `a` occurs twice"),
        (struct.pack("<Q", 2) + b"{}xx", "2 unaccounted bytes at the end"),
    ],
)
def test_safetensors_faults_by_name(tmp_path: Path, header: bytes, match: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header)
    with pytest.raises(CheckpointError, match=match):
        Shard(path)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("b", {"data_offsets": [64, 96]}, "tensor `b` overlaps tensor `a`"),
        ("b", {"data_offsets": [100, 132]}, "4 unaccounted bytes before tensor `b`"),
        ("c", {"data_offsets": [256, 256]}, "unaccounted bytes before tensor `c`"),
        ("b", {"shape": [1 << 40], "data_offsets": [96, 96 + (1 << 41)]}, "truncated: tensor `b` ends at byte"),
        ("a", {"shape": [4, 7]}, "needs 112 bytes, its data_offsets span 96"),
        ("a", {"shape": [-4, 6]}, "invalid shape"),
        ("a", {"dtype": "F33"}, "tensor `a` has unknown dtype 'F33'"),
    ],
)
def test_safetensors_tensor_faults(tmp_path: Path, name: str, changes: dict[str, Any], match: str) -> None:
    header = valid_header()
    header[name] |= changes
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(128))
    with pytest.raises(CheckpointError, match=match):
        Shard(path)


def use_all(checkpoint: Checkpoint) -> None:
    for name, info in checkpoint.tensors.items():
        assert checkpoint.read(name).shape == info.shape
    _ = (checkpoint.tokenizer_json, checkpoint.chat_template, checkpoint.special_tokens, checkpoint.eos_token_ids)


def test_mutated_gguf_headers(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "hf", "llama", **SMALL)
    whole = write_tiny_gguf(tmp_path / "x.gguf", directory, kind="Q8_0").read_bytes()
    header_end = whole.rindex(b"weight") + 64
    path = tmp_path / "mutated.gguf"
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        path.write_bytes(mutate_bytes(whole[:header_end], rng) + whole[header_end:])
        try:
            with open_checkpoint(str(path), base=tmp_path) as checkpoint:
                use_all(checkpoint)
        except CheckpointError as error:
            refused += 1
            str(error).encode("utf-8")
    assert refused > 250


def test_gguf_truncated_anywhere(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "hf", "qwen3", **SMALL)
    whole = write_tiny_gguf(tmp_path / "x.gguf", directory).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 37), len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"truncated|magic"):
            open_checkpoint(str(path), base=tmp_path)
