"""HF config → DecoderSpec: what each family's decoder is made of. Every config key is consumed or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plankiln.checkpoint import EMBEDDING, LM_HEAD
from plankiln.compiler.config_reader import ConfigReader, did_you_mean, shown
from plankiln.compiler.rope import MAX_POSITIONS, Rope, read_rope
from plankiln.errors import ExportError, Problem

_MAX_WIDTH = 1 << 20
_MAX_VOCABULARY = 1 << 24
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024

# Bookkeeping: training, generation defaults (read elsewhere), class plumbing of `transformers`. None changes the graph.
_BOOKKEEPING = frozenset(
    (
        "_name_or_path",
        "name_or_path",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "use_flash_attn",
        "torchscript",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "quantization_config",  # the checkpoint's reader understood it, or would not have opened it
        "prefix",
        "task_specific_params",
        "finetuning_task",
        "tokenizer_class",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "num_return_sequences",
        "transformers.js_config",
        "is_llama_config",
        "unsloth_version",
        "unsloth_fixed",
        "tf_legacy_loss",
        "use_bfloat16",
    )
)
# Keys that may be present but must not ask for anything: key → (the value that changes nothing, hint).
_FIXED: dict[str, tuple[object, str]] = {
    "is_encoder_decoder": (False, "only decoder-only models are supported"),
    "is_decoder": (False, "cross-attending decoders are not supported"),
    "add_cross_attention": (False, "cross-attention is not supported"),
    "cross_attention_hidden_size": (None, "cross-attention is not supported"),
    "tie_encoder_decoder": (False, "only decoder-only models are supported"),
    "pretraining_tp": (1, "only the order of summation differed in training; set it to 1 to accept that"),
    "rope_interleaved": (False, "only the half-split rotation is supported"),
    "use_mrope": (False, "multimodal RoPE is not supported"),
    "pruned_heads": ({}, "save the model with its pruned heads removed"),
    "auto_map": (None, "a model with code of its own cannot be exported; remove the key if the family's own code fits"),
    "compression_config": (None, "use the unquantized checkpoint, or a GGUF file"),
}

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class DecoderSpec:
    """All that the graph of one decoder-only model needs to know. Sizes in elements; rope and windows in tokens.

    windows: per layer, how many positions a token sees (itself included), or None for all before it.
    max_position: the longest context the model's RoPE stands for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_epsilon: float
    windows: Windows
    max_position: int
    tied_embedding: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return float(self.head_dim**-0.5)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must have, in file orientation ([out, in])."""
        tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.layers):
            tensors |= self._layer_tensors(f"model.layers.{layer}.")
        tensors["model.norm.weight"] = (self.hidden_size,)
        if not self.tied_embedding:
            tensors[LM_HEAD] = (self.vocab_size, self.hidden_size)
        return tensors

    def _layer_tensors(self, prefix: str) -> dict[str, tuple[int, ...]]:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (query, self.hidden_size, self.qkv_bias),
            "self_attn.k_proj": (key_value, self.hidden_size, self.qkv_bias),
            "self_attn.v_proj": (key_value, self.hidden_size, self.qkv_bias),
            "self_attn.o_proj": (self.hidden_size, query, self.o_bias),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size, self.mlp_bias),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size, self.mlp_bias),
        }
        tensors: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, bias) in linears.items():
            tensors[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                tensors[f"{prefix}{name}.bias"] = (rows,)
        norms = {"input_layernorm": self.hidden_size, "post_attention_layernorm": self.hidden_size}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return tensors | {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}


def decoder_spec(config: Mapping[str, Any], where: str = "config.json") -> DecoderSpec:
    """The spec of a HF `config.json`'s content. Raises ExportError with every problem found; `where` names the file."""
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise ExportError("the model's config must be an object", where)
    name = config.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        supported = "supported: " + ", ".join(sorted(_FAMILIES))
        hint = did_you_mean(name, _FAMILIES, supported) if isinstance(name, str) else supported
        what = "`model_type` is missing" if name is None else f"unsupported `model_type` {shown(name)}"
        raise ExportError(what, where, hint)
    problems: list[Problem] = []
    reader = ConfigReader(config, where, problems)
    spec = _read(reader, family)
    if problems:
        raise ExportError(problems)
    return spec


@dataclass(frozen=True)
class _Family:
    """How one family's config is read: the defaults that `transformers` fills in, and what its layers have.

    Zero kv_heads or head_dim: derived from the other sizes, as an explicit null always is.
    """

    class_name: str
    max_position: int
    windows: Callable[[ConfigReader, int], Windows]
    kv_heads: int = 0
    head_dim: int = 0
    attention_bias_key: bool = False
    qkv_bias: bool = False
    mlp_bias_key: bool = False
    qk_norm: bool = False


def _read(reader: ConfigReader, family: _Family) -> DecoderSpec:
    hidden = reader.required("hidden_size", high=_MAX_WIDTH)
    layers = reader.required("num_hidden_layers", high=_MAX_LAYERS)
    heads = reader.required("num_attention_heads", high=_MAX_HEADS)
    default_kv_heads = heads if reader.present("num_key_value_heads") else family.kv_heads or heads
    kv_heads = reader.integer("num_key_value_heads", default_kv_heads, high=_MAX_HEADS)
    default_head_dim = 0 if reader.present("head_dim") else family.head_dim
    given_head_dim = reader.integer("head_dim", default_head_dim, high=_MAX_HEAD_DIM)
    head_dim = given_head_dim or hidden // heads
    if not reader.problems:
        _check_heads(reader, hidden, heads, kv_heads, given_head_dim)
    max_position = reader.integer("max_position_embeddings", family.max_position, high=MAX_POSITIONS)
    attention_bias = family.attention_bias_key and reader.flag("attention_bias", False)
    rope = read_rope(reader, max_position)
    _check_activation(reader)
    spec = DecoderSpec(
        architecture=reader.text("model_type", ""),
        vocab_size=reader.required("vocab_size", high=_MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=reader.required("intermediate_size", high=_MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        norm_epsilon=reader.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        windows=family.windows(reader, layers),
        max_position=max(max_position, rope.reach(max_position)),
        tied_embedding=reader.flag("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and reader.flag("mlp_bias", False),
    )
    _check_architectures(reader, family.class_name)
    reader.ignore(_BOOKKEEPING)
    for key, (allowed, hint) in _FIXED.items():
        reader.fixed(key, allowed, hint)
    reader.finish()
    return spec


def _check_heads(reader: ConfigReader, hidden: int, heads: int, kv_heads: int, given_head_dim: int) -> None:
    if heads % kv_heads:
        reader.complain(f"{heads} attention heads cannot share {kv_heads} key/value heads", "one must divide the other")
    if not given_head_dim and hidden % heads:
        reader.complain(f"`hidden_size` {hidden} is not a multiple of {heads} attention heads", "set `head_dim`")
    head_dim = given_head_dim or hidden // heads
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        reader.complain(f"the head size must be even and at most {_MAX_HEAD_DIM}, not {head_dim}")


def _check_activation(reader: ConfigReader) -> None:
    activation = reader.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        reader.complain(f"`hidden_act` {shown(activation)} is not supported", "supported: silu")


def _check_architectures(reader: ConfigReader, class_name: str) -> None:
    names = reader.raw("architectures")
    if names is not None and names != [class_name]:
        reader.complain(f"`architectures` must be `{class_name}`, not {shown(names)}", "only causal LMs are supported")


def _no_windows(reader: ConfigReader, layers: int) -> Windows:
    return (None,) * layers


def _mistral_windows(reader: ConfigReader, layers: int) -> Windows:
    default = None if reader.present("sliding_window") else 4096
    return (reader.optional_integer("sliding_window", default, high=MAX_POSITIONS),) * layers


def _qwen_windows(reader: ConfigReader, layers: int) -> Windows:
    enabled = reader.flag("use_sliding_window", False)
    default = None if reader.present("sliding_window") else 4096
    window = reader.optional_integer("sliding_window", default, high=MAX_POSITIONS) if enabled else None
    reader.ignore(["sliding_window"])
    full_layers = reader.integer("max_window_layers", 28, low=0, high=_MAX_LAYERS)
    kinds = reader.raw("layer_types")
    if kinds is None:
        return tuple(window if layer >= full_layers else None for layer in range(layers))
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        reader.complain(f"`layer_types` must list `full_attention` or `sliding_attention`, not {shown(kinds)}")
        return (None,) * layers
    if len(kinds) != layers:
        reader.complain(f"`layer_types` names {len(kinds)} layers, `num_hidden_layers` is {layers}")
    if "sliding_attention" in kinds and window is None:
        reader.complain(
            "`layer_types` has `sliding_attention` layers, but no window is in force",
            "set `use_sliding_window: true` and `sliding_window`, or make all layers `full_attention`",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", 2048, _no_windows, attention_bias_key=True, mlp_bias_key=True),
    "mistral": _Family("MistralForCausalLM", 131072, _mistral_windows, kv_heads=8),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, _qwen_windows, kv_heads=32, qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", 32768, _qwen_windows, kv_heads=32, head_dim=128, attention_bias_key=True, qk_norm=True
    ),
}
