"""The demo model, built from its GGUF file, against transformers' own reading of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plans import Format, packed_step, plan
from tokenizers import Tokenizer

from plankiln.checkpoint import Checkpoint, open_checkpoint
from plankiln.compiler.precision import Precision
from plankiln.quantize.calibrate import calibration_ids
from plankiln.quantize.outliers import outlier_layers
from plankiln.quantize.statistics import decoder_linears, input_statistics
from plankiln.quantize.torch_model import torch_model
from plankiln.recipe import Text, load_recipe
from plankiln.runtime.cpu import CpuEngine

Floats = NDArray[np.float32]
ROOT = Path(__file__).parents[1]
PROMPT_TOKENS, PREFILLED, CHUNK, GENERATED = 210, 190, 64, 64


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    model = load_recipe(ROOT / "recipes/smollm2-135m.yaml").resolve()[0].model
    with open_checkpoint(model.source, base=ROOT, sha256=model.sha256) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Three prompts of PROMPT_TOKENS tokens of English: parts of the licence this project is under."""
    ids = Tokenizer.from_str(checkpoint.tokenizer_json.decode()).encode((ROOT / "LICENSE").read_text()).ids
    return [ids[start : start + PROMPT_TOKENS] for start in (100, 800, 1500)]


class Transformers:
    """transformers' model of the same GGUF file, read by transformers itself."""

    def __init__(self, file: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
        ).eval()

    def logits(self, ids: list[int]) -> Floats:
        """[len(ids), vocab], teacher-forced."""
        with self.torch.no_grad():
            logits: Floats = self.model(self.torch.tensor([ids])).logits[0].float().numpy()
        return logits

    def greedy(self, ids: list[int]) -> list[int]:
        with self.torch.no_grad():
            out = self.model.generate(
                self.torch.tensor([ids]), max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False
            )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Transformers:
    return Transformers(checkpoint.origin, "float32")


def plan_logits(engine: CpuEngine, ids: list[int]) -> Floats:
    """Teacher-forced logits through chunked prefill (rows 0 … PREFILLED) and then decode, one token a step."""
    engine.allocate_kv(20)
    table = [int(block) for block in np.random.default_rng().permutation(20)]
    rows, done = [], 0
    while done < len(ids):
        step = ids[done : min(done + CHUNK, PREFILLED)] if done < PREFILLED else ids[done : done + 1]
        rows.append(engine.execute(packed_step([step], [done], [table])).copy())
        done += len(step)
    return np.concatenate(rows)


def build(checkpoint: Checkpoint, out: Path, weights: Format | Precision, kv: Format) -> CpuEngine:
    _, engine = plan(checkpoint.origin, out, weights=weights, kv=kv, max_context=320, max_tokens=256)
    return engine


def test_fp32_plan_equals_transformers(
    checkpoint: Checkpoint, prompts: list[list[int]], reference: Transformers, tmp_path: Path
) -> None:
    engine = build(checkpoint, tmp_path, "fp32", "fp32")
    for prompt in prompts:
        assert np.abs(plan_logits(engine, prompt) - reference.logits(prompt)).max() <= 1e-3
    expected = reference.greedy(prompts[0])
    ids = list(prompts[0])
    engine.allocate_kv(20)
    table = list(range(20))
    logits = engine.execute(packed_step([ids], [0], [table], [len(ids) - 1]))
    for token in expected:
        assert int(logits[0].argmax()) == token
        logits = engine.execute(packed_step([[token]], [len(ids)], [table]))
        ids.append(token)


def kl(p_logits: Floats, q_logits: Floats) -> float:
    """Mean KL divergence of softmax(q) from softmax(p) over rows, in nats."""
    p, q = (x.astype(np.float64) for x in (p_logits, q_logits))
    p, q = (x - x.max(-1, keepdims=True) for x in (p, q))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_bf16_plan_is_as_close_to_fp32_as_transformers_bf16(
    checkpoint: Checkpoint, prompts: list[list[int]], reference: Transformers, tmp_path: Path
) -> None:
    engine = build(checkpoint, tmp_path, "bf16", "bf16")
    half = Transformers(checkpoint.origin, "bfloat16")
    exact = [reference.logits(prompt) for prompt in prompts]
    ours = np.mean([kl(e, plan_logits(engine, p)) for e, p in zip(exact, prompts, strict=True)])
    theirs = np.mean([kl(e, half.logits(p)) for e, p in zip(exact, prompts, strict=True)])
    print(f"KL to fp32: plan {ours:.2e}, transformers bf16 {theirs:.2e}")
    assert ours <= 1.2 * theirs


def perplexity(logits: list[Floats], prompts: list[list[int]]) -> float:
    """Of every token of the prompts but each one's first."""
    losses = []
    for rows, ids in zip(logits, prompts, strict=True):
        wide = rows[:-1].astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        losses.append(np.log(np.exp(wide).sum(-1)) - wide[np.arange(len(ids) - 1), ids[1:]])
    return float(np.exp(np.concatenate(losses).mean()))


def test_keep_is_the_files_own_quantization(
    checkpoint: Checkpoint, prompts: list[list[int]], reference: Transformers, tmp_path: Path
) -> None:
    """The reference variant is the dequantized model; the fast one, with int8 activations, is within 2 % of it."""
    exact = [reference.logits(prompt) for prompt in prompts]
    slow = build(checkpoint, tmp_path / "reference", Precision("keep", activations="declared"), "fp32")
    for want, prompt in zip(exact, prompts, strict=True):
        assert np.abs(plan_logits(slow, prompt) - want).max() <= 1e-3
    fast = build(checkpoint, tmp_path / "fast", Precision("keep"), "bf16")
    ours = perplexity([plan_logits(fast, prompt) for prompt in prompts], prompts)
    theirs = perplexity(exact, prompts)
    print(f"perplexity: keep {ours:.3f}, dequantized {theirs:.3f}")
    assert ours <= 1.02 * theirs
    stored = sum(info.nbytes for info in checkpoint.tensors.values() if len(info.shape) == 2)
    rope_and_norms = 2 * 320 * 32 * 4 + 61 * 576 * 4
    assert (tmp_path / "fast" / "weights.bin").stat().st_size - rope_and_norms <= 1.02 * stored


def test_the_layers_whose_inputs_int8_cannot_hold_are_found(checkpoint: Checkpoint) -> None:
    """Inputs of layers 11 and 28's down_proj reach thousands of times their mean."""
    _, ids = calibration_ids(checkpoint, Text(samples=8))
    model = torch_model(checkpoint)
    found = outlier_layers(decoder_linears(model), input_statistics(model, ids, lambda *_: None), 0.5)
    for layer in (11, 28):
        seen = found[f"model.layers.{layer}.mlp.down_proj"]
        assert seen["absmax"] > 1000
        assert seen["absmax_over_mean"] > 3000
    assert {name.rsplit(".", 1)[1] for name in found} == {"down_proj"}
    assert len(found) < 30
