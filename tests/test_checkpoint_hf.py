"""HF directories: what is read is what transformers wrote, and every kind of damage is one clear error."""

from __future__ import annotations

import json
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_tiny_hf

from plankiln.checkpoint import check_finite, open_checkpoint
from plankiln.checkpoint.hf import HfCheckpoint
from plankiln.checkpoint.shards import Shard
from plankiln.errors import CheckpointError


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("sharded"), "qwen2", dtype="bfloat16", shard_bytes=20_000)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("single"), "llama", tie_word_embeddings=True, vocab_size=300)


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def opened(path: Path, cache: Path | None = None) -> HfCheckpoint:
    checkpoint = open_checkpoint(str(path), base=Path("/"), cache=cache or path.parent / "cache")
    assert isinstance(checkpoint, HfCheckpoint)
    return checkpoint


def shapes(checkpoint: HfCheckpoint) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in checkpoint.tensors.items()}


def write_safetensors(path: Path, header: dict[str, object] | bytes, data: bytes) -> None:
    text = header
    if isinstance(text, dict):
        text = json.dumps(text).encode()
        text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("which", ["sharded", "single"])
def test_every_tensor_equals_what_safetensors_reads(which: str, request: pytest.FixtureRequest) -> None:
    from safetensors import safe_open

    path: Path = request.getfixturevalue(which)
    seen = 0
    with opened(path) as checkpoint:
        for shard in path.glob("*.safetensors"):
            with safe_open(shard, "np") as reader:
                for name in reader.keys():  # noqa: SIM118 (no mapping)
                    want = reader.get_tensor(name)
                    got = checkpoint.read(name)
                    assert got.dtype == want.dtype
                    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
                    assert not got.flags.writeable
                    rows = checkpoint.read_rows(name, 1, 3)
                    np.testing.assert_array_equal(rows.view(np.uint8), want[1:3].view(np.uint8))
                    seen += 1
        assert seen == len(checkpoint.tensors)
        checkpoint.validate(shapes(checkpoint))


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I8", "U8", "F8_E4M3", "F8_E5M2"])
def test_dtypes_and_misaligned_data(dtype: str, tmp_path: Path) -> None:
    from plankiln.checkpoint.shards import ITEM_BYTES, Shard, numpy_dtype

    size = ITEM_BYTES[dtype]
    raw = np.arange(6 * size, dtype=np.uint8).tobytes()
    header = {"t": {"dtype": dtype, "shape": [3, 2], "data_offsets": [0, 6 * size]}}
    for padding in range(3):
        write_safetensors(tmp_path / "x.safetensors", json.dumps(header).encode() + b" " * padding, raw)
        shard = Shard(tmp_path / "x.safetensors")
        got = shard.whole("t")
        assert (got.dtype, got.shape, got.flags.aligned) == (numpy_dtype(dtype), (3, 2), True)
        assert got.tobytes() == raw
        assert shard.rows("t", 1, 2).tobytes() == raw[2 * size : 4 * size]
        shard.close()


def test_arrays_outlive_the_checkpoint(single: Path) -> None:
    with opened(single) as checkpoint:
        array = checkpoint.read("model.norm.weight")
    assert np.isfinite(array).all()


def test_row_bounds_and_unknown_names(single: Path) -> None:
    with opened(single) as checkpoint:
        with pytest.raises(CheckpointError, match="rows `0:301` outside tensor"):
            checkpoint.read_rows("model.embed_tokens.weight", 0, 301)
        with pytest.raises(CheckpointError, match=r"did you mean `model\.norm\.weight`"):
            checkpoint.read("model.nrom.weight")
        with pytest.raises(CheckpointError, match="not stored in blocks"):
            checkpoint.read_blocks("model.norm.weight")


def test_validate_reports_every_fault_at_once(single: Path) -> None:
    with opened(single) as checkpoint:
        expected = shapes(checkpoint)
        expected["model.norm.weight"] = (47,)
        expected["model.layers.0.mlp.up_projection.weight"] = expected.pop("model.layers.0.mlp.up_proj.weight")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.validate(expected)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "tensor `model.norm.weight` has shape [48] where [47] is expected" in text
    assert "missing tensor `model.layers.0.mlp.up_projection.weight`" in text
    assert "did you mean `model.layers.0.mlp.up_proj.weight`?" in text
    assert "unexpected tensor `model.layers.0.mlp.up_proj.weight`" in text


def rewrite(path: Path, **changed: np.ndarray) -> None:
    from safetensors.numpy import load_file, save_file

    names = {key.replace("__", "."): value for key, value in changed.items()}
    save_file(load_file(path / "model.safetensors") | names, path / "model.safetensors")


def test_wrong_dtype_and_ignored_extras(single: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(single, tmp_path / "model"))
    with opened(single) as checkpoint:
        expected = shapes(checkpoint)
        embedding = checkpoint.read("model.embed_tokens.weight").copy()
    rewrite(path, lm_head__weight=embedding, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    with opened(path) as checkpoint:
        checkpoint.validate(expected)
    embedding[5, 5] += 1
    rewrite(path, lm_head__weight=embedding)
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match=r"`lm_head\.weight` differs from"):
        checkpoint.validate(expected)
    rewrite(path, model__norm__weight=np.ones(48, np.int32))
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match="has dtype `I32` where floating point"):
        checkpoint.validate(expected)


def test_a_shard_s_tensors_are_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    shard = Shard(path)
    assert shard.tensors is shard.tensors
    shard.close()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"])
def test_check_finite_names_count_and_first(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)
    array = np.ones((3, 700_001), kind)
    check_finite("w", array, "m.gguf")
    array[1, 600_000] = np.nan
    array[2, 5] = np.nan
    with pytest.raises(
        CheckpointError, match=r"2 non-finite values in tensor `w`, the first is nan at \[1, 600000\]: m.gguf"
    ):
        check_finite("w", array, "m.gguf")
    if dtype != "float8_e4m3fn":
        array[0, 9] = -np.inf
        with pytest.raises(CheckpointError, match=r"3 non-finite values in tensor `w`, the first is -inf at \[0, 9\]"):
            check_finite("w", array, "m.gguf")
    check_finite("indices", np.arange(4), "m.gguf")
    check_finite("scalar", np.float32(1).reshape(()), "m.gguf")
    check_finite("empty", np.empty((0, 4), kind), "m.gguf")


def test_truncated_shard(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"truncated: tensor `model\..*` ends at byte .*" + shard.name):
        opened(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-*.safetensors"])
def test_a_pointer_of_git_lfs_is_called_that(copy: Path, name: str) -> None:
    (path,) = copy.glob(name)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n")
    with pytest.raises(CheckpointError, match=r"not the file but Git LFS's pointer to it: .*\nhint: .*`git lfs pull`"):
        _ = opened(copy).tokenizer_json


def test_missing_shards_are_all_named(copy: Path) -> None:
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    first.unlink()
    second.unlink()
    with pytest.raises(CheckpointError) as caught:
        opened(copy)
    assert [p.what.split("`")[1] for p in caught.value.problems] == [first.name, second.name]
    assert "tensors, the first is `" in str(caught.value)


def test_tensor_missing_from_its_shard(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor `model\.layers\.7\.mlp\.up_proj\.weight` is missing from the"):
        opened(copy)


def test_tensor_in_two_shards(copy: Path) -> None:
    shards = sorted(copy.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    with pytest.raises(CheckpointError, match=f"is in two shards, `{shards[0].name}` and `{shards[1].name}`"):
        opened(copy)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", 7, "a/b.safetensors", "x\0.safetensors", "x"])
def test_index_may_not_leave_the_directory(copy: Path, name: object) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"tensor `a` is in `.*`, not a \.safetensors file beside it"):
        opened(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_damaged_index(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        opened(copy)


def test_directories_that_are_no_checkpoint(tmp_path: Path, single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        opened(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled weights are never loaded"):
        opened(tmp_path)
    shutil.copy(single / "model.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"found `weights\.safetensors`"):
        opened(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"not valid JSON .*config\.json"):
        opened(tmp_path)


def test_tokenizer_template_and_special_tokens(single: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = Path(shutil.copytree(single, tmp_path / "model"))
    with opened(path) as checkpoint:
        assert Tokenizer.from_buffer(checkpoint.tokenizer_json).encode("ab</s>").ids[-1] == 2
        assert checkpoint.tokenizer_json == (path / "tokenizer.json").read_bytes()
        assert checkpoint.chat_template is None
        special = checkpoint.special_tokens
        assert (special["bos_token"], special["bos_token_id"], special["add_bos_token"]) == ("<s>", 1, False)
        assert (special["eos_token_id"], special["pad_token"], special["pad_token_id"]) == (2, None, None)
        assert checkpoint.eos_token_ids == (2,)

    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    settings["bos_token"] = {"content": "<s>", "special": True}
    settings["add_bos_token"] = True
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    with opened(path) as checkpoint:
        assert checkpoint.chat_template == "D"
        assert checkpoint.eos_token_ids == (2, 7, 9)
        assert checkpoint.special_tokens["add_bos_token"] is True

    settings["chat_template"] = [{"name": "tool", "template": "T"}]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match="no chat template is named `default`"):
        _ = checkpoint.chat_template
    (path / "chat_template.jinja").write_text("J")
    with opened(path) as checkpoint:
        assert checkpoint.chat_template == "J"
    (path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match="neither an id nor a list of ids"):
        _ = checkpoint.eos_token_ids


def test_bos_added_by_the_post_processor_is_seen(single: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = Path(shutil.copytree(single, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with opened(path) as checkpoint:
        assert checkpoint.special_tokens["add_bos_token"] is True


def test_turn_end_written_by_the_template_ends_a_generation(single: Path, tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    path = Path(shutil.copytree(single, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|eot_id|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    with opened(path) as checkpoint:
        assert checkpoint.eos_token_ids == (2, tokenizer.token_to_id("<|im_end|>"))


def test_missing_or_damaged_tokenizer(single: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(single, tmp_path / "model"))
    (path / "tokenizer.json").write_text('{"model": 3}')
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match="tokenizer not understood"):
        _ = checkpoint.tokenizer_json
    (path / "tokenizer.json").unlink()
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        _ = checkpoint.tokenizer_json
    (path / "tokenizer.model").write_bytes(b"")
    with opened(path) as checkpoint, pytest.raises(CheckpointError, match=r"only tokenizer\.model[^$]*save_pretrained"):
        _ = checkpoint.tokenizer_json


def test_digest_follows_content_and_not_the_place(single: Path, tmp_path: Path) -> None:
    first = opened(single, tmp_path / "cache").digest
    path = Path(shutil.copytree(single, tmp_path / "elsewhere"))
    (path / "README.md").write_text("not part of the model")
    assert opened(path, tmp_path / "cache").digest == first
    for name in ("config.json", "tokenizer.json"):
        other = Path(shutil.copytree(single, tmp_path / name))
        (other / name).write_text((other / name).read_text() + " ")
        assert opened(other, tmp_path / "cache").digest != first
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(bytes(weights))
    assert opened(path, tmp_path / "cache").digest != first


def test_sparse_70b_opens_without_reading_it(tmp_path: Path) -> None:
    """140 GB of holes: headers only at open, and one row costs one row."""
    hidden, inner, vocab, layers = 8192, 28672, 128256, 80
    sizes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        sizes |= {f"{prefix}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        sizes |= {f"{prefix}self_attn.{n}_proj.weight": (1024, hidden) for n in "kv"}
        sizes |= {f"{prefix}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        sizes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    weight_map = {}
    names = list(sizes)
    for number in range(30):
        header, at = {}, 0
        for name in names[number::30]:
            nbytes = 2 * sizes[name][0] * sizes[name][1]
            header[name] = {"dtype": "BF16", "shape": list(sizes[name]), "data_offsets": [at, at + nbytes]}
            at += nbytes
            weight_map[name] = f"model-{number}.safetensors"
        path = tmp_path / f"model-{number}.safetensors"
        write_safetensors(path, header, b"")
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + at)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    begun = time.perf_counter()
    with opened(tmp_path) as checkpoint:
        checkpoint.validate(sizes)
        before = resident_bytes()
        assert checkpoint.read("model.layers.41.mlp.down_proj.weight").shape == (hidden, inner)
        row = checkpoint.read_rows("lm_head.weight", 100_000, 100_001)
        assert row.shape == (1, hidden)
        assert float(row.astype(np.float32).sum()) == 0.0
        assert resident_bytes() - before < 64 << 20
    assert time.perf_counter() - begun < 10, "opening must not read the weights"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
