"""Quantized checkpoints as nvidia-modelopt exports them, outside our code, and the logits its arithmetic gives them."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import BASE_CONFIG, write_tiny_tokenizer
from numpy.typing import NDArray

ALGORITHMS = ("fp8", "fp8_per_token", "int8_smoothquant", "int4_awq", "w4a8_awq", "nvfp4", "mixed")
_PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_per_token": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8_smoothquant": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "mixed": "FP8_DEFAULT_CFG",
}
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
}


def write_quantized_hf(
    path: Path, algorithm: str, *, group: int = 32, kv_fp8: bool = False, seed: int = 0, **config: Any
) -> Path:
    """A random tiny llama, calibrated on random tokens and exported by modelopt, with a tokenizer.

    mixed: FP8, and int4 in groups for the MLPs.
    """
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(**{**BASE_CONFIG, **SIZES, **config}, architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(shape).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    ids = torch.randint(0, shape.vocab_size, (4, 48))
    preset = copy.deepcopy(getattr(mtq, _PRESETS[algorithm]))
    blocks = {"num_bits": 4, "block_sizes": {-1: group, "type": "static"}}
    for entry in preset["quant_cfg"]:
        cfg = entry.get("cfg")
        for part in cfg if isinstance(cfg, list) else [cfg or {}]:
            if algorithm != "nvfp4" and "block_sizes" in part and part.get("type") != "dynamic":
                part["block_sizes"] = {-1: group, "type": "static"}
    if algorithm == "mixed":
        preset["quant_cfg"] += [
            {"quantizer_name": "*mlp*weight_quantizer", "cfg": blocks},
            {"quantizer_name": "*mlp*input_quantizer", "enable": False},
        ]
    if kv_fp8:
        preset["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}})
    model = mtq.quantize(model, preset, lambda model: model(ids))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=path)
    write_tiny_tokenizer(path, shape.vocab_size)
    return path


def fake_quant_logits(path: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits [B, T, vocabulary] of the exported checkpoint in modelopt's arithmetic: `transformers` over the exported
    weights, dequantized, with modelopt's quantizers in front of the linears (and behind k and v, for an FP8 cache)."""
    import torch
    from modelopt.torch.quantization.nn import TensorQuantizer
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    tensors = load_file(path / "model.safetensors")
    quantization = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    config = LlamaConfig.from_pretrained(path)
    del config.quantization_config
    model = LlamaForCausalLM(config).float().eval()
    state, hooks = {}, {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith((".weight", ".bias")):
            state[name] = _dequantized(module, tensors) if f"{name}_scale" in tensors else tensor.float()
    model.load_state_dict(state, strict=False)

    def quantizer(amax: Any) -> Any:
        made = TensorQuantizer()
        made.num_bits, made.axis = (4, 3), None
        made.amax = torch.as_tensor(amax).float()
        return made.eval()

    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            hooks[name] = module.register_forward_pre_hook(_input_hook(name, tensors, quantization, quantizer))
        if (scale := tensors.get(f"{name}.v_scale")) is not None:
            rounding = quantizer(scale * 448)
            module.register_forward_hook(lambda _m, _i, out, q=rounding: q(out))
    keys = [quantizer(tensors[name] * 448) for name in sorted(tensors, key=_layer) if name.endswith(".k_scale")]
    with torch.inference_mode(), _rotated_keys(keys):
        logits: NDArray[np.float32] = model(torch.from_numpy(ids)).logits.numpy()
    return logits


def _layer(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


@contextlib.contextmanager
def _rotated_keys(quantizers: list[Any]) -> Iterator[None]:
    """Each layer's keys go through its quantizer after their rotation, as modelopt's own attention has it."""
    from transformers.models.llama import modeling_llama

    rotate, left = modeling_llama.apply_rotary_pos_emb, iter(quantizers)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        q, k = rotate(*args, **kwargs)
        return q, next(left)(k)

    modeling_llama.apply_rotary_pos_emb = rotated if quantizers else rotate
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate


def _dequantized(module: str, tensors: dict[str, Any]) -> Any:
    import torch

    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float()
    second = tensors.get(f"{module}.weight_scale_2")
    if weight.dtype != torch.uint8:
        return weight.float() * (scale.reshape(-1, 1) if scale.ndim else scale)
    nibbles = torch.stack([weight & 15, weight >> 4], 1).reshape(-1, weight.shape[1]).to(torch.int8)
    values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    values = values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
    if second is not None:
        values = (values / second).clamp(-448, 448).to(torch.float8_e4m3fn).float() * second
    return values


def _input_hook(name: str, tensors: dict[str, Any], quantization: dict[str, Any], quantizer: Any) -> Any:
    import torch

    prescale, scale = tensors.get(f"{name}.pre_quant_scale"), tensors.get(f"{name}.input_scale")
    integers = tensors[f"{name}.weight"].dtype == torch.int8
    static = quantizer(scale * 448) if scale is not None and not integers else None

    def hook(_module: Any, inputs: tuple[Any, ...]) -> Any:
        (x,) = inputs
        if prescale is not None:
            x = x * prescale
        if static is not None:
            x = static(x)
        elif scale is not None:
            x = torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -128, 127)
        elif quantization["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN":
            own = x.abs().amax(-1, keepdim=True) / 448
            x = (x / own).to(torch.float8_e4m3fn).float() * own
        return (x,)

    return hook
