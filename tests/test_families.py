"""Every config key is honoured or refused; spellings old and new mean the same; junk gives clean errors."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plankiln.compiler.families import DecoderSpec, decoder_spec
from plankiln.compiler.rope import Rope
from plankiln.errors import ExportError

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"SmolLM2": SMOLLM2, "Llama 3.1": LLAMA31, "Mistral": MISTRAL, "Qwen2": QWEN2, "Qwen3": QWEN3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def problems(config: Any) -> list[str]:
    with pytest.raises(ExportError) as caught:
        decoder_spec(config)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str) -> None:
    spec = decoder_spec(PUBLISHED[name])
    assert spec.layers == PUBLISHED[name]["num_hidden_layers"]
    assert spec.rope.theta == PUBLISHED[name]["rope_theta"]
    assert spec.tied_embedding == PUBLISHED[name].get("tie_word_embeddings", False)


def test_each_family_has_its_own_layers() -> None:
    assert decoder_spec(SMOLLM2).head_dim == 64
    assert decoder_spec(MISTRAL).windows == (4096,) * 32
    assert decoder_spec(QWEN2).qkv_bias
    assert not decoder_spec(QWEN2).o_bias
    assert decoder_spec(QWEN3).qk_norm
    biased = decoder_spec(SMOLLM2 | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_own_defaults_are_understood(family: str) -> None:
    """What save_pretrained writes for a default model, and the same keys left out, mean the same."""
    from transformers import CONFIG_MAPPING

    written = CONFIG_MAPPING[family]().to_dict()
    spec = decoder_spec(written)
    required = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    assert decoder_spec({key: written[key] for key in ["model_type", *required]}) == spec
    assert spec.head_dim == (written.get("head_dim") or written["hidden_size"] // written["num_attention_heads"])
    assert spec.kv_heads == written["num_key_value_heads"]
    assert spec.max_position == written["max_position_embeddings"]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_expected_tensors_are_the_models_parameters(family: str, tied: bool) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family](  # type: ignore[call-arg]
        vocab_size=33, hidden_size=24, intermediate_size=21, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert decoder_spec(config.to_dict()).expected_tensors() == parameters


def test_qwen_windows_follow_the_layer_types_or_the_first_window_layer() -> None:
    windows = QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 3}
    assert decoder_spec(windows | {"max_window_layers": 1}).windows == (None, 64, 64)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert decoder_spec(windows | {"layer_types": kinds}).windows == (64, None, 64)
    assert decoder_spec(windows | {"sliding_window": None}).windows == (None, None, None)
    assert decoder_spec(QWEN2 | {"sliding_window": 64}).windows == (None,) * 24


def test_null_sizes_are_derived_and_absent_ones_take_the_familys_default() -> None:
    nulls = {"num_key_value_heads": None, "head_dim": None}
    assert (decoder_spec(QWEN3 | nulls).kv_heads, decoder_spec(QWEN3 | nulls).head_dim) == (16, 64)
    assert decoder_spec(MISTRAL | nulls).kv_heads == 32
    absent = {key: value for key, value in QWEN3.items() if key not in nulls} | {"num_attention_heads": 64}
    assert (decoder_spec(absent).kv_heads, decoder_spec(absent).head_dim) == (32, 128)


def test_mistral_window_is_off_when_null_and_default_when_absent() -> None:
    assert set(decoder_spec(MISTRAL | {"sliding_window": None}).windows) == {None}
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert set(decoder_spec(absent).windows) == {4096}


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA31["rope_scaling"],
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.2},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_old_and_new_rope_spellings_mean_the_same(scaling: dict[str, Any]) -> None:
    old = SMOLLM2 | {"rope_scaling": dict(scaling)}
    legacy = SMOLLM2 | {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}}
    new = {k: v for k, v in SMOLLM2.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = scaling | {"rope_theta": 100000}
    assert decoder_spec(old) == decoder_spec(legacy) == decoder_spec(new)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (64, 100000.0), (128, 500000.0), (96, 10000.0)])
def test_rope_tables_are_those_of_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    """Far past every boundary (users-met 32). `pow` may differ in a last bit of float32, which shows at long range."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": theta},
    )  # fmt: skip
    theirs = LlamaRotaryEmbedding(config)
    rope = decoder_spec(config.to_dict()).rope
    np.testing.assert_allclose(rope.frequencies(head_dim), theirs.inv_freq.numpy(), rtol=3e-7)
    cos, sin = theirs(torch.zeros(1), torch.arange(40000)[None])
    for mine, other in zip(rope.tables(head_dim, 40000), (cos, sin), strict=True):
        assert mine.dtype == np.float32
        difference = np.abs(mine - other[0, :, : head_dim // 2].numpy()).max(axis=1)
        assert difference[:2000].max() < 2e-4
        assert difference.max() < 3e-3


def test_common_rope_tables_are_those_of_transformers_bit_by_bit() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for head_dim, theta in ((64, 10000.0), (64, 100000.0), (128, 10000.0), (128, 500000.0)):
        config = LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, rope_parameters={"rope_theta": theta, "rope_type": "default"}
        )
        np.testing.assert_array_equal(
            Rope("default", theta).frequencies(head_dim), LlamaRotaryEmbedding(config).inv_freq
        )


def test_scaling_lengthens_the_reach() -> None:
    assert decoder_spec(LLAMA31).max_position == 131072
    assert decoder_spec(QWEN2 | {"rope_scaling": YARN}).max_position == 131072
    assert decoder_spec(SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 2.0}}).max_position == 16384


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "`dynamic` is not supported"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "`longrope` is not supported"),
    ({"rope_scaling": {"type": "yran", "factor": 2.0}}, "did you mean `yarn`?"),
    ({"rope_scaling": {"type": "linear"}}, "`factor` is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "`factor` must lie between 1"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "unknown key `beta_fast`"),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "disagree"),
    ({"rope_scaling": YARN | {"bata_fast": 3}}, "did you mean `beta_fast`?"),
    ({"rope_scaling": "yarn"}, "`rope_scaling` must be an object"),
    ({"rope_scaling": YARN, "rope_parameters": YARN}, "both `rope_scaling` and `rope_parameters`"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "two different `rope_theta`"),
    ({"rope_scaling": LLAMA31["rope_scaling"] | {"low_freq_factor": 4.0}}, "`low_freq_factor` < `high_freq_factor`"),
    ({"rope_theta": 1.0}, "`rope_theta` must be greater than 1"),
    ({"rope_theta": math.nan}, "`rope_theta` must be finite"),
    ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` `0.5` is not supported"),
    ({"rope_interleaved": True}, "`rope_interleaved` `true` is not supported"),
    ({"hidden_act": "gelu"}, "`hidden_act` `gelu` is not supported"),
    ({"auto_map": {"AutoModel": "modeling.py"}}, "`auto_map`"),
    ({"pretraining_tp": 2}, "`pretraining_tp` `2` is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "`architectures` must be `LlamaForCausalLM`"),
    ({"num_key_value_heads": 4}, "9 attention heads cannot share 4"),
    ({"num_attention_heads": 15}, "not a multiple of 15"),
    ({"head_dim": 63}, "must be even"),
    ({"hidden_size": 576.0}, "`hidden_size` must be a whole number, not `576.0`"),
    ({"hidden_size": True}, "`hidden_size` must be a whole number, not `true`"),
    ({"hidden_size": None}, "`hidden_size` is missing"),
    ({"num_hidden_layers": 10**9}, "`num_hidden_layers` must lie between 1 and 1024"),
    ({"vocab_size": -1}, "`vocab_size` must lie between 1"),
    ({"rms_norm_eps": math.inf}, "`rms_norm_eps` must be finite"),
    ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be true or false"),
    ({"num_hiden_layers": 3}, "unknown key `num_hiden_layers`"),
    ({"sliding_window": 128}, "unknown key `sliding_window`"),
    ({"logit_scale": 0.5}, "unknown key `logit_scale`"),
    ({"model_type": "lama"}, "did you mean `llama`?"),
    ({"model_type": "gpt2"}, "supported: llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "`model_type` is missing"),
    ({"model_type": 3}, "unsupported `model_type` `3`"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    found = problems(SMOLLM2 | change)
    assert len(found) == 1, found
    assert message in found[0]
    assert "config.json" in found[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 24}, "no window is in force"),
        ({"layer_types": ["chunked_attention"] * 24}, "must list"),
        ({"layer_types": [[]] * 24}, "must list"),
        ({"layer_types": "full_attention"}, "must list"),
        ({"use_sliding_window": True, "sliding_window": 0}, "`sliding_window` must lie between"),
    ],
)
def test_contradicting_windows_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in "\n".join(problems(QWEN2 | change))


def test_all_problems_come_at_once() -> None:
    found = problems({"model_type": "llama", "vocab_sise": 3, "hidden_act": "relu", "rope_scaling": {"type": "su"}})
    text = "\n".join(found)
    for expected in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "`vocab_size` is missing",
    ):
        assert expected in text
    assert "did you mean `vocab_size`?" in text
    assert "relu" in text
    assert "`su`" in text


def test_a_config_must_be_an_object() -> None:
    assert "must be an object" in problems([1])[0]
    assert "must be an object" in problems({1: 2})[0]


def test_the_file_is_named() -> None:
    with pytest.raises(ExportError, match=r"models/x/config\.json"):
        decoder_spec({"model_type": "gpt2"}, where="models/x/config.json")


def test_shipped_configs_are_understood() -> None:
    import json

    for path in sorted(Path(__file__).parents[1].glob("recipes/configs/*.json")):
        assert decoder_spec(json.loads(path.read_text()), str(path)).layers > 0


JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 10**6, 10**30, 10**5000, 0.5, -2.0, 1e308, math.nan, math.inf),
    *("", "x", "llama", "silu", "é" * 1000, [], [1], [[[]]], ["full_attention"] * 3),
    *({}, {"a": 1}, {"": {}}, {"type": "yarn"}, {"rope_type": "linear", "factor": math.nan}, {"rope_type": ["x"]}),
]


def mutate(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to four changes: a key gone, mistyped, new, or its value turned into junk, sometimes one level down."""
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 4)):
        place = config
        nested = [value for value in config.values() if isinstance(value, dict) and value]
        if nested and rng.random() < 0.4:
            place = rng.choice(nested)
        key = rng.choice(list(place))
        action = rng.randrange(5)
        if action == 0 and len(place) > 1:
            del place[key]
        elif action == 1:
            at = rng.randrange(len(key) + 1)
            place[key[:at] + rng.choice("xyz_0 ") + key[at + 1 :]] = place[key]
        else:
            place[key] = rng.choice(JUNK)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_mutated_configs_give_a_spec_or_a_clean_error(name: str) -> None:
    rng = random.Random(name)
    base = PUBLISHED[name] | {"rope_scaling": rng.choice([YARN, LLAMA31["rope_scaling"]])}
    refused = sum(is_refused_cleanly(mutate(base, rng)) for _ in range(300))
    assert refused > 150


def is_refused_cleanly(config: dict[str, Any]) -> bool:
    """Whether it is refused; any exception but ExportError, an unreadable message or an unusable spec fails."""
    try:
        spec = decoder_spec(config)
    except ExportError as refusal:
        found = refusal.problems
    else:
        check_usable(spec)
        return False
    assert all(problem.what and not problem.what.endswith(".") for problem in found)
    assert sum(len(str(problem)) for problem in found) < 20_000
    return True


def check_usable(spec: DecoderSpec) -> None:
    assert len(spec.windows) == spec.layers
    assert spec.heads % spec.kv_heads == 0
    assert spec.head_dim % 2 == 0
    assert all(size > 0 for shape in spec.expected_tensors().values() for size in shape)
    assert np.isfinite(spec.rope.frequencies(spec.head_dim)).all()
    assert all(np.isfinite(table).all() for table in spec.rope.tables(spec.head_dim, 4))
