"""A checkpoint as the torch model that transformers makes of its configuration."""

from __future__ import annotations

from typing import Any

import numpy as np

from plankiln.checkpoint import BLOCK_DTYPES, FLOAT_DTYPES, LM_HEAD, Checkpoint, check_finite
from plankiln.errors import CheckpointError


def torch_model(checkpoint: Checkpoint) -> Any:
    """The whole model on the CPU in float32, in eval mode, with the checkpoint's weights, its RoPE and its tied head.

    GGUF's blocks are dequantized; stored tensors the model has no place for are dropped. Takes 4 bytes a parameter.
    Raises CheckpointError for a missing tensor, a wrong shape, numbers that are not finite, and for a source whose
    matrices are quantized already.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with init_empty_weights(include_buffers=False):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
    tied = bool(config.tie_word_embeddings)
    state = {
        name: torch.from_numpy(_floats(checkpoint, name, tuple(parameter.shape)))
        for name, parameter in model.state_dict().items()
        if not (tied and name == LM_HEAD)
    }
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _floats(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
    array = checkpoint.read(name)
    info, where = checkpoint.tensors[name], str(checkpoint.origin)
    if info.dtype not in FLOAT_DTYPES | BLOCK_DTYPES:
        hint = "use `weights: keep`, which keeps the source's quantization, or an unquantized source"
        raise CheckpointError(f"tensor `{name}` is quantized already, to `{info.dtype}`", where, hint)
    if info.shape != shape:
        what = f"tensor `{name}` has shape {list(info.shape)} where {list(shape)} is expected"
        raise CheckpointError(what, where, "config.json and the weights disagree")
    check_finite(name, array, where)
    return np.array(array, np.float32)
