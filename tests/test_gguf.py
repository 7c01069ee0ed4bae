"""GGUF files: configuration, names, row order and values, against HF directories, the `gguf` package, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SMOLLM2, SMOLLM2_SHA256, write_tiny_gguf, write_tiny_hf

from plankiln.checkpoint import BLOCK_DTYPES, Checkpoint, open_checkpoint
from plankiln.checkpoint.gguf_config import llama3_divisors
from plankiln.errors import CheckpointError

SIZES: dict[str, Any] = {
    **{"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"head_dim": 32, "vocab_size": 40},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {
        "llama": write_tiny_hf(root / "llama", "llama", attention_bias=True, mlp_bias=True, **SIZES),
        "mistral": write_tiny_hf(root / "mistral", "mistral", sliding_window=7, **SIZES),
        "qwen2": write_tiny_hf(root / "qwen2", "qwen2", tie_word_embeddings=True, **SIZES),
        "qwen3": write_tiny_hf(root / "qwen3", "qwen3", **SIZES),
    }


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(SMOLLM2, base=Path(), sha256=SMOLLM2_SHA256)


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(str(path), base=Path("/"), cache=path.parent / "cache")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_names_layout_and_config_match_the_hf_directory(
    family: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    extra = {"llama.attention.sliding_window": 7} if family == "mistral" else {}
    path = write_tiny_gguf(tmp_path / "x.gguf", directories[family], metadata=extra)
    with opened(path) as ours, opened(directories[family]) as theirs:
        ours.validate({name: info.shape for name, info in theirs.tensors.items()})
        for name, info in theirs.tensors.items():
            np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)
            np.testing.assert_array_equal(ours.read_rows(name, 3, 20), theirs.read_rows(name, 3, 20), err_msg=name)
            assert ours.tensors[name] == info
        for key, value in ours.config.items():
            assert value == theirs.config.get(key), key
        for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
            assert key in ours.config
        if family == "mistral":
            assert ours.config["sliding_window"] == 7


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_kinds(kind: str, directories: dict[str, Path], tmp_path: Path) -> None:
    """Quantising whole rows commutes with permuting them, so the HF tensor quantised is the oracle."""
    from gguf import GGMLQuantizationType, quants

    path = write_tiny_gguf(tmp_path / "x.gguf", directories["llama"], kind=kind)
    quantization = GGMLQuantizationType[kind]
    with opened(path) as ours, opened(directories["llama"]) as theirs:
        for name, info in theirs.tensors.items():
            if len(info.shape) < 2:
                assert ours.tensors[name].dtype == "F32"
                continue
            blocks = quants.quantize(theirs.read(name), quantization)
            want = quants.dequantize(blocks, quantization)
            got = ours.read(name)
            assert ours.tensors[name].dtype == kind
            assert got.dtype.name == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
            np.testing.assert_array_equal(got.astype(np.float32), want, err_msg=name)
            np.testing.assert_array_equal(ours.read_rows(name, 5, 9).astype(np.float32), want[5:9], err_msg=name)
            if kind in BLOCK_DTYPES:
                np.testing.assert_array_equal(ours.read_blocks(name), blocks, err_msg=name)
            else:
                with pytest.raises(CheckpointError, match="not stored in blocks"):
                    ours.read_blocks(name)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_equal_transformers_dequantisation(kind: str, tmp_path: Path) -> None:
    """The package cannot write K-quants: any bytes are blocks, and two implementations must agree on them."""
    import gguf
    import torch
    from transformers.integrations.gguf import dequant

    quantization = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    directory = write_tiny_hf(tmp_path / "hf", "qwen2", hidden_size=256, intermediate_size=256, vocab_size=40)
    path = write_tiny_gguf(tmp_path / "base.gguf", directory)
    raw = np.random.default_rng(7).integers(0, 256, (40, 256 // block * block_bytes), dtype=np.uint8)
    rewritten = replace_tensor(path, tmp_path / "k.gguf", "token_embd.weight", raw, quantization)
    with opened(rewritten) as checkpoint:
        got = checkpoint.read("model.embed_tokens.weight")
        assert (got.shape, got.dtype) == ((40, 256), np.float32)
        np.testing.assert_array_equal(checkpoint.read_blocks("model.embed_tokens.weight"), raw)
    want = dequant.dequantize(torch.from_numpy(raw), int(quantization)).reshape(40, 256).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def replace_tensor(source: Path, target: Path, name: str, data: np.ndarray, kind: Any) -> Path:
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen2")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_header_equals_the_packages_reader(directories: dict[str, Path], tmp_path: Path) -> None:
    from gguf import GGUFReader

    from plankiln.checkpoint.gguf_file import GgufFile

    more = {"x.floats": [1.5, -2.0], "x.flags": [True, False], "x.text": "é\n", "x.texts": ["", "ü"]}
    path = write_tiny_gguf(tmp_path / "x.gguf", directories["llama"], kind="Q4_1", metadata=more)
    file = GgufFile(path)
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == fields
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.kind, ours.begin, ours.nbytes) == (theirs.tensor_type.name, theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(theirs.shape.tolist()[::-1])


def assert_equal_to_transformers(checkpoint: Checkpoint) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = checkpoint.origin
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state = model.state_dict()
    if checkpoint.config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    checkpoint.validate({name: tuple(tensor.shape) for name, tensor in state.items()})
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_tensors_equal_transformers_own_conversion(family: str, tmp_path: Path) -> None:
    """Head size 128: transformers does not read another from a qwen file."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    directory = write_tiny_hf(tmp_path / "hf", family, **sizes, intermediate_size=64)
    with opened(write_tiny_gguf(tmp_path / "x.gguf", directory, kind="Q8_0")) as checkpoint:
        assert_equal_to_transformers(checkpoint)


@pytest.mark.slow
def test_smollm2_equals_transformers_own_conversion(smollm2: Checkpoint) -> None:
    from transformers import AutoConfig

    assert_equal_to_transformers(smollm2)
    theirs = AutoConfig.from_pretrained(smollm2.origin.parent, gguf_file=smollm2.origin.name).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "eos_token_id"):
        assert smollm2.config[key] == theirs[key], key


def test_smollm2_config(smollm2: Checkpoint) -> None:
    assert smollm2.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_smollm2_declares_its_format(smollm2: Checkpoint) -> None:
    kinds = {info.dtype for info in smollm2.tensors.values()}
    assert kinds == {"F32", "Q4_1", "Q8_0"}
    assert smollm2.digest == SMOLLM2_SHA256
    assert smollm2.read_blocks("model.layers.0.self_attn.q_proj.weight").shape == (576, 360)


@pytest.mark.parametrize(
    ("added", "want"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"scaling.type": "none"}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0, "freq_base": 1e6},
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
            {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
                **{"beta_fast": 32.0, "beta_slow": 1.0},
            },
        ),
    ],
)
def test_rope_scaling(
    added: dict[str, Any], want: dict[str, Any], directories: dict[str, Path], tmp_path: Path
) -> None:
    metadata = {f"qwen2.rope.{key}": value for key, value in added.items()}
    path = write_tiny_gguf(tmp_path / "x.gguf", directories["qwen2"], metadata=metadata)
    with opened(path) as checkpoint:
        assert checkpoint.config["rope_parameters"] == want


def add_rope_factors(directory: Path, target: Path, factors: np.ndarray) -> Path:
    """A copy of the directory whose weights carry llama.cpp's extra tensor, to be written as GGUF."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors") | {"rope_freqs.weight": factors.astype(np.float32)}
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(("factor", "original", "theta"), [(8.0, 8192, 500000.0), (32.0, 8192, 500000.0)])
def test_llama3_rope_is_recovered_exactly(factor: float, original: int, theta: float, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        **{"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": original},
    }
    directory = write_tiny_hf(
        tmp_path / "hf", "llama", head_dim=64, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**json.loads((directory / "config.json").read_text())), "cpu")
    plain = 1.0 / theta ** (np.arange(0, 64, 2) / 64)
    factors = plain / scaled.numpy()
    np.testing.assert_allclose(llama3_divisors(theta, 64, factor, original), factors, rtol=3e-6)

    source = add_rope_factors(directory, tmp_path / "with", factors)
    with opened(write_tiny_gguf(tmp_path / "x.gguf", source)) as checkpoint:
        assert checkpoint.config["rope_parameters"] == rope
        assert not [name for name in checkpoint.tensors if "rope" in name]


def test_rope_factors_that_are_not_llama3(directories: dict[str, Path], tmp_path: Path) -> None:
    ones = add_rope_factors(directories["llama"], tmp_path / "ones", np.ones(16))
    with opened(write_tiny_gguf(tmp_path / "ones.gguf", ones)) as checkpoint:
        assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    for name, factors in {"odd": np.linspace(1, 9, 16), "nan": np.full(16, np.nan), "short": np.ones(8)}.items():
        source = add_rope_factors(directories["llama"], tmp_path / name, factors)
        with pytest.raises(CheckpointError, match=r"`rope_freqs\.weight`"):
            opened(write_tiny_gguf(tmp_path / f"{name}.gguf", source))


@pytest.mark.parametrize(
    ("added", "dropped", "match"),
    [
        ({"general.type": "adapter"}, "", "no model but a `adapter`"),
        ({"general.type": ["model"]}, "", "no model but a"),
        ({"split.count": 3}, "", "split over several files"),
        ({"llama.expert_count": 8}, "", "mixture-of-experts"),
        ({"llama.logit_scale": 0.5}, "", "metadata not understood: `llama.logit_scale`"),
        ({"llama.rope.dimension_count": 16}, "", r"`llama.rope.dimension_count` differs from the head size 32"),
        ({"llama.attention.value_length": 16}, "", "differs from the head size"),
        ({"llama.attention.head_count": [6, 6]}, "", "is not a positive count"),
        ({"llama.attention.head_count_kv": 4}, "", "impossible attention"),
        ({"llama.attention.head_count": 4}, "", "has 192 rows where 128 are expected"),
        ({"llama.vocab_size": 41}, "", "differs from the embedding's 40 rows"),
        ({"llama.rope.scaling.type": "longrope"}, "", "RoPE scaling `longrope` is not supported"),
        ({"llama.rope.freq_base": float("nan")}, "", "is not a positive number"),
        ({}, "llama.context_length", "metadata `llama.context_length` is missing"),
        ({}, "tokenizer.ggml.tokens", "metadata `tokenizer.ggml.tokens` is missing"),
        ({"tokenizer.ggml.bos_token_id": 40}, "", "is not the id of a token: `40`"),
    ],
)
def test_metadata_that_is_not_understood(
    added: dict[str, Any], dropped: str, match: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", directories["llama"], metadata=added, drop=(dropped,))
    with pytest.raises(CheckpointError, match=match):
        opened(path)


def test_unknown_architecture_tensor_and_kind(directories: dict[str, Path], tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "x.gguf"
    whole = write_tiny_gguf(path, directories["llama"]).read_bytes()
    cases = {
        b"llama": (b"gemma", "GGUF architecture `gemma` is not supported"),
        b"blk.1.ffn_up.weight": (b"blk.1.ffn_xx.weight", "unexpected tensor `blk.1.ffn_xx.weight`"),
        b"token_embd.weight": (b"token_xxxx.weight", "missing tensor `token_embd.weight`"),
        b"GGUF\3": (b"GGUF\1", "GGUF version 1 is not supported"),
        b"GGUF\3\0\0\0": (b"GGUF\0\0\0\3", "big-endian"),
        b"GGUF": (b"GGML", "wrong magic"),
    }
    for old, (new, match) in cases.items():
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(CheckpointError, match=match):
            opened(path)
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(whole[:at] + int(gguf.GGMLQuantizationType.IQ2_XXS).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(CheckpointError, match=r"tensor `output_norm\.weight` is stored as `IQ2_XXS`"):
        opened(path)
