"""Refusals before any work, and hints that lead to a build when they are followed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import write_tiny_hf
from plans import write_recipe

from plankiln.compiler import checks, pipeline
from plankiln.compiler.checks import check_model, choose_targets
from plankiln.console import QuietProgress
from plankiln.errors import BuildError, ExportError

MODEL = "name: tiny\nmodel: {source: model.gguf}\n"
SPEC: Any = SimpleNamespace(vocab_size=33, layers=2, kv_heads=3, head_dim=8)


def recipe(folder: Path, text: str) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(MODEL + text)
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("targets: [h100]", ()),
        ("targets: [h100, l40s]", ("h100",)),
        ("targets: [h100]\nquantize: {weights: fp8, kv_cache: fp8}", ()),
        ("targets: [h100]\nquantize: {weights: int4_awq, group_size: 128}\nengine: {tensor_parallel: 2}", ()),
        (
            "targets: [{sku: h100, quantize: {weights: bf16, group_size: null}}]\n"
            "quantize: {weights: int4_awq, group_size: 64}",
            (),
        ),
        ("targets: [cpu-generic]\nquantize: {kv_cache: fp16}\nengine: {tensor_parallel: 2}", ()),
        ("targets: [cpu-generic]\nquantize: {weights: nvfp4}", ("cpu-generic",)),
        ("targets: [cpu-generic]\nengine: {block_size: 8, max_context: 8}", ()),
        ("targets: [{sku: cpu-generic, engine: {tensor_parallel: 2}}, h100]", ()),
    ],
)
def test_following_the_hint_leads_to_a_build(tmp_path: Path, text: str, wanted: tuple[str, ...]) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(BuildError) as caught:
        choose_targets(path, (), wanted)
    hint = caught.value.problems[0].hint
    (command,) = re.findall(r"^try `([^`]*)`", hint)
    settings = [word for word in shlex.split(command) if word != "--set"]
    choose_targets(path, settings, () if "without `--target`" in hint else wanted)


def test_only_what_is_wrong_is_changed(tmp_path: Path) -> None:
    path = recipe(tmp_path, "targets: [cpu-generic]\nquantize: {weights: fp32, kv_cache: fp16}")
    with pytest.raises(BuildError, match=r"hint: try `--set quantize.kv_cache=bf16`$"):
        choose_targets(path, (), ())


def test_a_recipe_that_settings_cannot_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_obstacle", lambda target: checks._Obstacle("a reason", ("targets=[nothing]",)))
    with pytest.raises(BuildError, match=r"a reason\nhint: write a recipe with `targets: \[cpu-native\]`"):
        choose_targets(recipe(tmp_path, "targets: [cpu-generic]"), (), ())


def test_everything_wrong_with_a_model_at_once(tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(
        origin=tmp_path, eos_token_ids=(2, 33, -1), chat_template="{% if %}", special_tokens={}
    )
    path = recipe(tmp_path, "targets: [cpu-generic]\nengine: {kv_memory: 1000}\nquantize: {kv_cache: bf16}")
    with pytest.raises(BuildError) as caught:
        check_model(checkpoint, SPEC, choose_targets(path, (), ()))
    whats = [problem.what for problem in caught.value.problems]
    assert whats[:2] == [f"the end-of-sequence token {token} is not in the vocabulary of 33" for token in (33, -1)]
    assert whats[2].startswith("not a Jinja template (Expected an expression")
    assert whats[3] == "`engine.kv_memory` of 1000 bytes holds no block of the KV cache, which takes 3072"
    assert caught.value.problems[3].hint == "one context of 2048 tokens takes 393216 bytes"
    checkpoint.eos_token_ids, checkpoint.chat_template = (32,), "{{ messages }}"
    check_model(checkpoint, SPEC, choose_targets(path, ["engine.kv_memory=3072"], ()))


def test_a_real_model_is_refused_before_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(pipeline, "lower_cpu", fail)
    source = write_tiny_hf(tmp_path / "model", "llama", num_hidden_layers=1, eos_token_id=99)
    path = write_recipe(tmp_path / "tiny.yaml", source)

    def build() -> None:
        pipeline.build(path, out=tmp_path / "out", progress=QuietProgress())

    with pytest.raises(BuildError, match="the end-of-sequence token 99 is not in the vocabulary of 33"):
        build()
    config = source / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(ExportError) as caught:
        build()
    assert caught.value.problems[0].where == str(config)
    assert not (tmp_path / "out").exists()
