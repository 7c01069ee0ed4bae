"""`plankiln quantize-report`: the rows a build writes, and the table, JSON and plot made of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import make_bundle

from plankiln import cli
from plankiln.manifest import QuantizationRecord
from plankiln.quantize.formats import BlockFormat, quantize
from plankiln.quantize.report import relative_error

FACTS = QuantizationRecord(
    algorithm="int8_smoothquant",
    text="cd" * 32,
    samples=16,
    tokens=8192,
    outlier_layers={"model.layers.1.mlp.down_proj": 30870.0},
    prescale_multiplies=("model.layers.0.self_attn.o_proj",),
)


def rows() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"name": "model.embed_tokens.weight", "format": "bf16", "bytes": 1000, "error": 0.001}
    ]
    for layer in range(2):
        for kind, error in (("self_attn.q_proj", 0.05), ("mlp.down_proj", 0.1)):
            other = layer == 1 and "down" in kind
            name = f"model.layers.{layer}.{kind}.weight"
            made.append({"name": name, "format": "int8 g32" if other else "int4 g32", "bytes": 100, "error": error})
    return made


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    report = json.dumps({"seconds": {}, "matrices": rows()}).encode()
    return make_bundle(tmp_path / "out", report=report, quantization=FACTS).path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["quantize-report", *map(str, arguments)])
        return (int(caught.value.code or 0), *capsys.readouterr())

    return run


def test_the_error_is_what_rounding_does() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    stored = quantize(weight, BlockFormat(4, 32)).dequantize()
    expected = np.sqrt(((stored - weight) ** 2).sum() / (weight**2).sum())
    assert relative_error(weight, stored) == pytest.approx(expected, rel=1e-3)
    assert relative_error(weight, weight) == 0
    zeros = np.zeros((2, 2), np.float32)
    assert relative_error(zeros, zeros) == 0


def test_table(bundle: Path, call: Any) -> None:
    code, out, _ = call(bundle)
    assert code == 0
    lines = [line for line in out.splitlines() if line]
    assert any("q_proj" in line and "down_proj" in line for line in lines)
    assert any("0" in line and "5.00" in line and "10.00" in line for line in lines)
    assert any("10.00 int8 g32" in line for line in lines)  # not its column's usual format
    assert "model.embed_tokens.weight: bf16, error 0.10%" in out
    assert any("int4 g32" in line and "300 B" in line and "21.4%" in line for line in lines)
    assert "int8_smoothquant, 16 samples of 8192 tokens in all" in out
    assert "model.layers.1.mlp.down_proj, largest input 30870 times the mean" in out
    assert "explicit pre-scale multiply: model.layers.0.self_attn.o_proj" in out


def test_json(bundle: Path, call: Any) -> None:
    code, out, _ = call(bundle, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["matrices"] == rows()
    assert {total["format"]: total["bytes"] for total in found["totals"]} == {
        "bf16": 1000,
        "int4 g32": 300,
        "int8 g32": 100,
    }
    assert found["quantization"]["samples"] == 16
    assert found["gate"] is None


def test_plot(bundle: Path, call: Any, tmp_path: Path) -> None:
    plot = tmp_path / "errors.svg"
    assert call(bundle, "--plot", plot)[:2] == (0, f"{plot}\n")
    root = ElementTree.fromstring(plot.read_text())
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(rows())
    assert "model.layers.1.mlp.down_proj.weight: int8 g32, 100 bytes, error 10.00%" in titles


def test_plots_are_svg(bundle: Path, call: Any, tmp_path: Path) -> None:
    code, _, err = call(bundle, "--plot", tmp_path / "errors.png")
    assert code == 2
    assert "plots are SVG" in err
    code, _, err = call(bundle, "--plot", tmp_path / "none" / "errors.svg")
    assert (code, "cannot write the plot" in err) == (1, True)


def test_a_report_without_matrices(tmp_path: Path, call: Any) -> None:
    for number, report in enumerate((b"{}", b"no json", b'{"matrices": [{"name": "w"}]}')):
        bundle = make_bundle(tmp_path / str(number), report=report).path
        code, _, err = call(bundle)
        assert code == 1
        assert "does not list matrices" in err
    (bundle / "report.json").write_bytes(b'{"matrices": []}')
    assert "SHA-256" in call(bundle)[2]
