"""checkpoint.py RECIPE [DIR]: prints the GGUF file of a recipe; with DIR, writes it as a Hugging Face directory too.

The weights there are float32, dequantised: the peers' converters read no GGUF, so they start from the very values that
the file stands for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.recipe import load_recipe

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def write_directory(checkpoint: Checkpoint, directory: Path) -> None:
    """config.json, model.safetensors, tokenizer.json and what `transformers` needs to find them."""
    directory.mkdir(parents=True)
    tensors = {name: np.asarray(checkpoint.read(name), np.float32) for name in checkpoint.tensors}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    special, eos = checkpoint.special_tokens, list(checkpoint.eos_token_ids)
    names = {key: special[key] for key in _NAMES if key in special}
    ids: dict[str, Any] = {"bos_token_id": special.get("bos_token_id"), "eos_token_id": eos if eos[1:] else eos[0]}
    files = {
        "config.json": {**checkpoint.config, **ids, "architectures": ["LlamaForCausalLM"], "dtype": "float32"},
        "generation_config.json": {**ids, "do_sample": False},
        "tokenizer_config.json": {**names, "tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    (directory / "tokenizer.json").write_bytes(checkpoint.tokenizer_json)


def main() -> None:
    recipe = Path(sys.argv[1])
    model = load_recipe(recipe).resolve()[0].model
    with open_checkpoint(model.source, base=recipe.parent, sha256=model.sha256) as checkpoint:
        if len(sys.argv) > 2:
            write_directory(checkpoint, Path(sys.argv[2]))
        print(checkpoint.origin)


if __name__ == "__main__":
    main()
