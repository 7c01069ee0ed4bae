"""Low-bit formats: round trips, saturation, zero groups, tiny and huge scales, for any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import write_quantized_hf

from plankiln.quantize.clip import quantize_clipped
from plankiln.quantize.formats import (
    LARGEST_E4M3,
    BlockFormat,
    fake_quantize_e4m3,
    quantize,
    quantize_activations,
    quantize_static,
    round_e4m3,
)
from plankiln.quantize.nvfp4 import E2M1, quantize_nvfp4

BLOCKS = [BlockFormat(bits, group, minimum) for bits in (4, 8) for group in (32, 64) for minimum in (False, True)]
CHANNEL = BlockFormat(8, 64, scales="float32")
E4M3_CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@st.composite
def weights(draw: Any, smallest: int = -6, largest: int = 2) -> Any:
    """[N, 64] of magnitudes that differ from group to group; some groups are zero, some have one large number."""
    seed, rows = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 5))
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.uniform(smallest, largest, (rows, 4, 1))
    values = random.standard_normal((rows, 4, 16)) * scale * random.choice([0, 1, 1, 1], (rows, 4, 1))
    spikes = random.random((rows, 4, 16)) < 0.02
    return np.where(spikes, values * 30, values).astype(np.float32).reshape(rows, 64)


@pytest.mark.parametrize("form", [*BLOCKS, CHANNEL], ids=str)
@given(weight=weights())
@settings(max_examples=30, deadline=None)
def test_a_block_is_off_by_half_a_step_at_most(form: BlockFormat, weight: Any) -> None:
    """Half a step, and what float16 scales and minima lack: 2^-11 of the extremes, 2^-25 where they are subnormal."""
    made = quantize(weight, form)
    groups = np.abs(weight).reshape(len(weight), -1, form.group)
    span = groups.max(-1, keepdims=True)
    steps = (1 << form.bits) - 1 if form.minimum else (1 << (form.bits - 1))
    width = 2 * span if form.minimum else span
    half = form.scales == "float16"
    lost = (2**-10 * span + 2**-24 * (1 << form.bits)) if half else 2**-22 * span
    top = 0 if form.minimum else span / steps / 2  # the shorter side ends one step early
    error = np.abs(made.dequantize() - weight).reshape(groups.shape)
    assert (error <= width / steps / 2 + lost + top).all()
    zero = span[..., 0] == 0
    assert (made.dequantize().reshape(groups.shape)[zero] == 0).all()


@pytest.mark.parametrize("form", [*BLOCKS, CHANNEL], ids=str)
@given(weight=weights())
@settings(max_examples=30, deadline=None)
def test_what_is_stored_stays(form: BlockFormat, weight: Any) -> None:
    """Values on the lattice that span its whole range are found again, but for the scales' last bits."""
    made = quantize(weight, form).dequantize()
    again = quantize(made, form).dequantize()
    peak = np.abs(made).reshape(len(made), -1, form.group).max(-1, keepdims=True)
    # A minimum that float16 rounds moves the other end by as much.
    slack = 2**-9 * peak + 2**-24 * (1 << form.bits) if form.scales == "float16" else 2**-20 * peak
    assert (np.abs(again - made).reshape(len(made), -1, form.group) <= slack).all()


@pytest.mark.parametrize("form", BLOCKS, ids=str)
@given(weight=weights())
@settings(max_examples=20, deadline=None)
def test_a_searched_scale_is_never_worse(form: BlockFormat, weight: Any) -> None:
    importance = np.random.default_rng(1).random(64).astype(np.float32)

    def error(made: Any) -> Any:
        squares = np.square(made.dequantize().astype(np.float64) - weight) * importance
        return squares.reshape(len(weight), -1, form.group).sum(-1)

    plain, searched = error(quantize(weight, form)), error(quantize_clipped(weight, form, importance))
    assert (searched <= plain * (1 + 1e-4) + 1e-30).all()


def test_scales_beyond_float16_are_refused_and_float32_takes_them() -> None:
    weight = np.full((1, 64), 3e38, np.float32)
    with pytest.raises(OverflowError, match="does not fit float16"):
        quantize(weight, BlockFormat(4, 32))
    assert np.isfinite(quantize(weight, CHANNEL).dequantize()).all()
    assert (quantize(np.full((1, 64), 1e-40, np.float32), CHANNEL).dequantize() >= 0).all()  # a subnormal scale


@given(x=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_e4m3_is_the_nearest_code(x: list[float]) -> None:
    values = np.array(x, np.float32)
    rounded = round_e4m3(values)
    codes = E4M3_CODES[np.isfinite(E4M3_CODES)].astype(np.float64)
    clipped = np.clip(values.astype(np.float64), -LARGEST_E4M3, LARGEST_E4M3)
    nearest = np.abs(codes[None] - clipped[:, None]).min(1)
    assert np.isin(rounded, codes).all()
    np.testing.assert_array_equal(np.abs(rounded - clipped), nearest)
    np.testing.assert_array_equal(round_e4m3(rounded), rounded)


@given(weight=weights(-3, 3))
@settings(max_examples=50, deadline=None)
def test_fp8_activations_lose_a_sixteenth_at_most(weight: Any) -> None:
    """Normal numbers lose 1/16 of themselves; those below 2^-6 of the scale half of the subnormals' unit, 2^-10."""
    for scale in (None, float(np.abs(weight).max() / 448) or 1.0):
        rounded = fake_quantize_e4m3(weight, scale)
        unit = np.abs(weight).max(-1, keepdims=True) / 448 if scale is None else scale
        assert (np.abs(rounded - weight) <= np.maximum(np.abs(weight) / 15.9, unit * 2**-9.9)).all()


@given(weight=weights(-3, 3))
@settings(max_examples=50, deadline=None)
def test_int8_activations(weight: Any) -> None:
    q, scale = quantize_activations(weight, 32)
    back = (q.reshape(len(q), 2, 32) * scale[..., None]).reshape(q.shape)
    assert (np.abs(back - weight).reshape(len(q), 2, 32) <= scale[..., None] * 0.501).all()
    step = float(np.abs(weight).max() / 200) or 1.0
    static = quantize_static(weight, step)
    clipped = np.clip(weight, -128 * step, 127 * step)
    assert (np.abs(static * np.float32(step) - clipped) <= step * 0.501).all()


class TestNvfp4:
    @given(weight=weights())
    @settings(max_examples=50, deadline=None)
    def test_error(self, weight: Any) -> None:
        """A value lies within the step around it: 1/6 of its group's largest, at most 1/5 of itself; the group's scale
        is off by 1/16, or by half of e4m3's smallest where it is subnormal."""
        made = quantize_nvfp4(weight)
        peak = np.repeat(np.abs(weight).reshape(len(weight), -1, 16).max(-1), 16, axis=1)
        smallest = made.scale * 2**-10 * 6
        assert (np.abs(made.dequantize() - weight) <= peak * (1 / 6 + 1 / 16) + smallest * 1.01).all()
        zero = peak == 0
        assert (made.dequantize()[zero] == 0).all()

    def test_every_code(self) -> None:
        """Codes survive, ties go to the even code, larger numbers saturate."""
        values = np.concatenate([E2M1, -E2M1])[None]
        made = quantize_nvfp4(values * 448)
        np.testing.assert_array_equal(made.dequantize(), values * 448)
        ties = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *[0.0] * 8]], np.float32)
        np.testing.assert_array_equal(quantize_nvfp4(ties).dequantize()[0, :8], [0, 1, 1, 2, 2, 4, 4, 6])

    def test_modelopt_writes_the_same(self, tmp_path: Path) -> None:
        """The bytes of its checkpoint, read back, and made again from the weights."""
        import torch
        from safetensors.torch import load_file
        from transformers import LlamaConfig, LlamaForCausalLM

        path = write_quantized_hf(tmp_path / "nvfp4", "nvfp4")
        tensors = load_file(path / "model.safetensors")
        torch.manual_seed(0)
        config = LlamaConfig.from_pretrained(path)
        del config.quantization_config
        source = LlamaForCausalLM(config).float()
        name = "model.layers.0.mlp.down_proj.weight"
        made = quantize_nvfp4(source.get_parameter(name).detach().numpy())
        assert made.scale == pytest.approx(float(tensors[f"{name}_scale_2"]), rel=1e-6)
        same = made.group_scale.view(np.uint8) == tensors[f"{name}_scale"].view(torch.uint8).numpy()
        assert same.mean() > 0.99  # a scale at a tie of e4m3 may fall to either side
        assert (made.packed == tensors[name].numpy())[np.repeat(same, 8, axis=1)].mean() > 0.999
