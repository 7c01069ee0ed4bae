"""`weights: auto`: the search, the divergence it is fed with, and the formats that come out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import quick_compiler

from plankiln.bundle import open_bundle
from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.pipeline import build
from plankiln.console import QuietProgress
from plankiln.errors import RecipeError
from plankiln.quantize.divergence import Divergence
from plankiln.quantize.search import Option, cheapest_bytes, choose
from plankiln.quantize.sensitivity import choose_formats, measure_losses, model_units
from plankiln.quantize.torch_model import torch_model
from plankiln.recipe import Quantize, Text

SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 288},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
FEW = Text(samples=2, max_tokens=24)
IDS = [[5, 7, 30, 200, 11, 5], [9, 9, 100]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("models") / "model", "qwen2", **SHAPE)


OPTION = st.builds(Option, st.just("x"), st.integers(1, 9), st.integers(0, 50).map(float))


@given(units=st.lists(st.lists(OPTION, min_size=1, max_size=3), min_size=1, max_size=5), extra=st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_choice_fits_and_is_a_step_from_the_best(units: list[list[Option]], extra: int) -> None:
    budget = cheapest_bytes(units) + extra
    chosen = choose(units, budget)
    assert all(option in options for option, options in zip(chosen, units, strict=True))
    assert sum(option.nbytes for option in chosen) <= budget
    fitting = (c for c in itertools.product(*units) if sum(option.nbytes for option in c) <= budget)
    best = min(sum(option.cost for option in c) for c in fitting)
    largest = max(max(o.cost for o in options) - min(o.cost for o in options) for options in units)
    assert sum(option.cost for option in chosen) <= best + largest * len(units)
    assert choose(units, budget) == chosen
    with pytest.raises(ValueError, match="too few"):
        choose(units, cheapest_bytes(units) - 1)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("size", [1e-4, 0.3])
def test_divergence_is_the_whole_models(source: Path, name: str, size: float) -> None:
    """Only the layers from the changed one on are run again; the numbers are those of two whole forwards in float64."""
    import torch

    with open_checkpoint(str(source), base=Path()) as checkpoint:
        model = torch_model(checkpoint)
        divergence = Divergence(model, IDS)
        own = model.get_parameter(name).detach().clone()
        changed = own + torch.randn(own.shape, generator=torch.Generator().manual_seed(1)) * size * own.std()
        got = divergence.of({name: changed.numpy()})
        assert torch.equal(model.get_parameter(name), own)
        exact = torch_model(checkpoint).double()
    total = 0.0
    with torch.no_grad():
        for ids in IDS:
            logits = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
            exact.get_parameter(name).copy_(changed)
            other = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
            exact.get_parameter(name).copy_(own)
            total += float((logits.exp() * (logits - other)).sum())
    assert got == pytest.approx(total / sum(map(len, IDS)), rel=2e-2)


class TestFormats:
    def run(self, source: Path, bits: float, **more: Any) -> dict[str, Any]:
        quantize = Quantize.model_validate({"weights": "auto", "bits": bits, "calibration": FEW, **more})
        with open_checkpoint(str(source), base=Path()) as checkpoint:
            return choose_formats(checkpoint, quantize, QuietProgress())

    @pytest.mark.parametrize("bits", [6.0, 8.0, 12.0])
    def test_the_budget_is_kept_and_used(self, source: Path, bits: float) -> None:
        found = self.run(source, bits)
        assert bits * 0.8 <= found["bits"] <= bits
        formats = found["formats"]
        for layer in range(2):
            for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
                assert len({formats[f"model.layers.{layer}.{name}_proj.weight"] for name in names}) == 1
        assert {formats[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head")} <= {"int8 g32", "bf16"}

    def test_more_bits_lose_less(self, source: Path) -> None:
        losses = [self.run(source, bits)["predicted_kl"] for bits in (6.0, 8.0, 12.0, 16.0)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 10

    def test_excluded_modules_are_bf16(self, source: Path) -> None:
        formats = self.run(source, 12.0, exclude=("*.1.mlp.*",))["formats"]
        assert {formats[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")} == {"bf16"}
        with pytest.raises(RecipeError, match=r"`\*\.7\.mlp\.\*` matches no module"):
            self.run(source, 12.0, exclude=("*.7.mlp.*",))

    def test_too_few_bits(self, source: Path) -> None:
        with pytest.raises(RecipeError) as caught:
            self.run(source, 4.0)
        (problem,) = caught.value.problems
        assert "`bits: 4` is less than" in problem.what
        least = float(problem.hint.split("`bits: ")[1].split("`")[0])
        assert self.run(source, least)["bits"] <= least

    def test_losses_are_measured_and_ordered(self, source: Path) -> None:
        with open_checkpoint(str(source), base=Path()) as checkpoint:
            units = model_units(checkpoint, ())
            losses = measure_losses(checkpoint, units, IDS, True, QuietProgress())
        assert list(losses) == [unit.name for unit in units]
        for unit in units:
            found = losses[unit.name]
            assert found["bf16"] < found["int8 g32"] < found[unit.formats[0]] or unit.formats[0] == "int8 g32"


def test_a_bundle_of_chosen_formats(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """users-met 27: what the report says of each matrix adds up to what weights.bin holds."""
    quick_compiler(tmp_path, monkeypatch)
    recipe = tmp_path / "auto.yaml"
    recipe.write_text(
        f"name: auto\nmodel: {{source: {source}}}\n"
        "quantize: {weights: auto, bits: 7, calibration: {samples: 2, max_tokens: 24}}\n"
        "gate: {max_perplexity_increase: 1000, text: {samples: 2, max_tokens: 24}}\n"
        "engine: {max_context: 64}\ntargets: [cpu-native]\n"
    )
    (result,) = build(recipe, out=tmp_path / "out", progress=QuietProgress())
    report = json.loads((result.path / "report.json").read_text())
    manifest = open_bundle(result.path).manifest
    assert {row["format"] for row in report["matrices"]} >= {"int8 g32"}
    assert report["formats"].keys() == {row["name"] for row in report["matrices"]}
    assert {row["name"]: row["format"] for row in report["matrices"]} == report["formats"]
    matrices = sum(row["bytes"] for row in report["matrices"])
    weights = sum(manifest.bytes_per_format.values())
    vectors = 2 * 4 * 64 + 2 * 4 * 64 + 4 * 64
    assert matrices <= weights <= matrices + 40 * vectors
    assert manifest.quantization is not None
    assert manifest.quantization.algorithm == "auto"
    assert manifest.gate is not None
    assert manifest.gate.passed
    assert np.isfinite(manifest.gate.kl_mean or np.nan)
