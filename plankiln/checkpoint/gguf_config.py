"""What a GGUF file's metadata says, in the words of an HF config.json; and its tensors' HF names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from plankiln.checkpoint.base import EMBEDDING, LM_HEAD
from plankiln.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
GGUF_EMBEDDING = "token_embd.weight"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {
    GGUF_EMBEDDING: EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": LM_HEAD,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor, None when it has none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def row_order(name: str, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """For a GGUF q or k projection of an architecture that rotates neighbouring pairs: the file's row that holds
    each HF row. HF rotates element j of a head with j + D/2, llama.cpp's `llama` architecture 2j with 2j + 1."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if match is None or config["model_type"] not in ("llama", "mistral"):
        return None
    heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    half = config["head_dim"] // 2
    order = np.arange(heads * half * 2).reshape(heads, half, 2).swapaxes(1, 2)
    return order.reshape(-1)


class MetadataReader:
    """Turns the metadata into a config; every key of the architecture's own is consumed or an error."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        self.architecture = self._architecture()
        prefix = f"{self.architecture}."
        self._left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def read(
        self, tensor_names: frozenset[str], vocab_size: int, rope_factors: NDArray[np.float32] | None
    ) -> dict[str, Any]:
        """The HF config. vocab_size: rows of the embedding; rope_factors: content of `rope_freqs.weight`."""
        hidden = self._count("embedding_length")
        heads = self._count("attention.head_count")
        kv_heads = self._count("attention.head_count_kv", heads)
        head_dim = self._count("attention.key_length", hidden // heads)
        for key, want in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
            if self._count(key, want) != want:
                self._fail(f"`{self.architecture}.{key}` differs from the head size {head_dim}")
        if head_dim % 2 or heads % kv_heads:
            self._fail(f"impossible attention: {heads} heads, {kv_heads} KV heads, head size {head_dim}")
        context = self._count("context_length")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "vocab_size": vocab_size,
            "tie_word_embeddings": "output.weight" not in tensor_names,
            "rope_parameters": self._rope(head_dim, context, rope_factors),
        }
        if self.architecture == "llama":
            self._add_llama(config, tensor_names)
        if self.architecture == "qwen3":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        self._check_left(vocab_size)
        return config

    def _add_llama(self, config: dict[str, Any], tensor_names: frozenset[str]) -> None:
        window = self._left.pop("attention.sliding_window", None)
        if window:
            if type(window) is not int or window < 0:
                self._fail(f"`llama.attention.sliding_window` is not a count: `{window}`")
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
            return
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensor_names

    def _rope(self, head_dim: int, context: int, factors: NDArray[np.float32] | None) -> dict[str, Any]:
        theta = self._real("rope.freq_base", 10000.0)
        legacy = self._real("rope.scale_linear", 1.0)
        kind = self._left.pop("rope.scaling.type", "linear" if legacy != 1.0 else "none")
        factor = self._real("rope.scaling.factor", legacy)
        original = self._count("rope.scaling.original_context_length", context)
        self._left.pop("rope.scaling.finetuned", None)
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
            if self._real(key, 1.0) != 1.0:
                self._fail(f"`{self.architecture}.{key}` other than 1 is not supported")
        fast, slow = self._real("rope.scaling.yarn_beta_fast", 32.0), self._real("rope.scaling.yarn_beta_slow", 1.0)
        if factors is not None:
            if kind != "none":
                self._fail(f"both `{ROPE_FACTORS}` and RoPE scaling `{kind}`")
            return self._llama3(theta, head_dim, factors)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "yarn":
            self._fail(f"RoPE scaling `{kind}` is not supported", "supported: none, linear, yarn, Llama 3")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
        }

    def _llama3(self, theta: float, head_dim: int, factors: NDArray[np.float32]) -> dict[str, Any]:
        """Llama 3's scaling, of which a file keeps only the resulting divisor of each frequency. All published
        models use low 1 and high 4; the original context is found by trying, and checked against every divisor."""
        if factors.shape != (head_dim // 2,):
            self._fail(f"`{ROPE_FACTORS}` has shape {list(factors.shape)} where [{head_dim // 2}] is expected")
        if not np.all((factors > 0) & (factors < np.inf)):
            self._fail(f"`{ROPE_FACTORS}` holds values that are no divisors")
        if np.all(factors == 1.0):
            return {"rope_type": "default", "rope_theta": theta}
        scaling = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for exponent in range(6, 21):
            if np.allclose(llama3_divisors(theta, head_dim, scaling["factor"], 1 << exponent), factors, rtol=1e-5):
                scaling["original_max_position_embeddings"] = 1 << exponent
                return {"rope_type": "llama3", "rope_theta": theta, **scaling}
        self._fail(f"`{ROPE_FACTORS}` is not Llama 3's RoPE scaling", "build from the model's HF directory instead")

    def _architecture(self) -> str:
        name = self._metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            self._fail(f"GGUF architecture `{name}` is not supported", f"supported: {', '.join(ARCHITECTURES)}")
        kind = self._metadata.get("general.type", "model")
        if kind != "model":
            self._fail(f"the file is no model but a `{kind}`")
        if self._metadata.get("split.count", 0) not in (0, 1):
            self._fail("the model is split over several files", "merge them with `llama-gguf-split --merge`")
        return name

    def _check_left(self, vocab_size: int) -> None:
        if self._count("vocab_size", vocab_size) != vocab_size:
            self._fail(f"`{self.architecture}.vocab_size` differs from the embedding's {vocab_size} rows")
        if self._left.pop("expert_count", 0) or self._left.pop("expert_used_count", 0):
            self._fail("mixture-of-experts models are not supported")
        if self._left.pop("attention.causal", True) is not True:
            self._fail("the model is not causal")
        self._left.pop("tensor_data_layout", None)
        self._left.pop("expert_used_count", None)
        if self._left:
            names = ", ".join(f"`{self.architecture}.{key}`" for key in sorted(self._left))
            self._fail(f"metadata not understood: {names}", "build from the model's HF directory instead")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._left.pop(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            self._fail_key(key, value, "a positive count")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._left.pop(key, default)
        if type(value) is not float or not 0 < value < float("inf"):
            self._fail_key(key, value, "a positive number")
        return float(str(np.float32(value)))

    def _fail_key(self, key: str, value: object, want: str) -> NoReturn:
        full = f"{self.architecture}.{key}"
        self._fail(f"metadata `{full}` is missing" if value is None else f"metadata `{full}` is not {want}: `{value}`")

    def _fail(self, what: str, hint: str = "") -> NoReturn:
        raise CheckpointError(what, str(self._path), hint)


def llama3_divisors(theta: float, head_dim: int, factor: float, original: int) -> NDArray[np.float64]:
    """By what Llama 3's RoPE scaling (low 1, high 4) divides each of the head_dim/2 frequencies.

    Wavelengths over `original` are divided by `factor`, those under a quarter of it stay, in between 1/divisor is
    interpolated linearly in original / wavelength.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors
