"""quality.py: what each format costs SmolLM2 in quality, and what it gains in bytes and speed.

Builds a bundle for each row of the table (stages come from the store, so that a second run resumes), measures it
against the unquantized model on the two built-in held-out texts, and all of them side by side for speed. Lines of JSON
go to bench/results/DATE-CPU-quality.jsonl, the table between the marks in docs/quantization.md. `--table FILE` writes
the table of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare import results_file

from plankiln.bundle import open_bundle
from plankiln.compiler import pipeline
from plankiln.compiler.gate import GateResult, joined, tokenizer_of
from plankiln.compiler.regate import compare
from plankiln.console import say, show_error, show_progress
from plankiln.errors import PlankilnError
from plankiln.manifest import REPORT
from plankiln.quantize.datasets import Texts, texts, token_ids
from plankiln.recipe import Text
from plankiln.runtime.bench.bundle_worker import measured
from plankiln.runtime.bench.driver import Bench
from plankiln.runtime.bench.machine import commit, hardware
from plankiln.runtime.bench.workload import select

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "smollm2-135m.yaml"
PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- bench/quality.py: begin -->", "<!-- bench/quality.py: end -->"
WINDOWS, TOKENS = 6, 512  # of each of the two texts
SPEEDS = (("decode-1", "decode_per_cpu_s"), ("prefill-512", "prefill_per_cpu_s"))
Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A line of the table: its name, and `--set quantize.KEY=VALUE` for its recipe."""

    name: str
    settings: tuple[str, ...]


FORMATS = (
    Format("fp32, dequantized", ("weights=fp32", "kv_cache=fp32")),
    Format("bf16", ("weights=bf16",)),
    Format("keep", ("weights=keep",)),
    Format("fp8, KV fp8", ("weights=fp8", "kv_cache=fp8")),
    Format("int8 SmoothQuant", ("weights=int8_smoothquant",)),
    Format("int8 weight-only", ("weights=int8_rtn",)),
    Format("int4 RTN 32", ("weights=int4_rtn", "group_size=32")),
    Format("int4 RTN 32, clip", ("weights=int4_rtn", "group_size=32", "clip=true")),
    Format("int4 AWQ-lite 32", ("weights=int4_awq", "group_size=32", "clip=false")),
    Format("int4 AWQ 64", ("weights=int4_awq", "group_size=64")),
    Format("int4 AWQ 32", ("weights=int4_awq", "group_size=32")),
    Format("auto, 5.5 bits", ("weights=auto", "bits=5.5")),
)
BASE = "bf16"


def build(form: Format, out: Path) -> tuple[Path, float | None]:
    """The bundle, whatever the gate would say of it, and the CPU seconds that calibration took, from the report."""
    overrides = [f"quantize.{setting}" for setting in form.settings]
    with show_progress(quiet=False) as progress:
        (result,) = pipeline.build(RECIPE, overrides=overrides, out=out, progress=progress, gate=False)
    seconds = json.loads((result.path / REPORT).read_text()).get("calibration_cpu_seconds")
    return result.path, sum(seconds.values()) if seconds else None


def quality(bundle: Path) -> Row:
    """Perplexity on each of the two texts, and the rest on both, against the unquantized model."""
    opened = open_bundle(bundle)
    tokenizer = tokenizer_of(opened)
    both = texts(Text(), "held_out")
    encode, encode_chat = tokenizer.encode, tokenizer.encode_chat
    ids = [
        token_ids(Texts((sample,), both.source, both.digest, True), encode, encode_chat, WINDOWS, TOKENS)
        for sample in both.samples
    ]
    with show_progress(quiet=False) as progress:
        losses, reference = compare(opened, ids, None, progress)
    each = [GateResult.of(found) for found in losses]
    whole = GateResult.of(joined(losses))
    return {
        "perplexity_a": each[0].perplexity,
        "perplexity_b": each[1].perplexity,
        "perplexity": whole.perplexity,
        "reference_perplexity": whole.reference_perplexity,
        "kl_mean": whole.kl_mean,
        "kl_p99": whole.kl_p99,
        "top1_agreement": whole.top1_agreement,
        "tokens": whole.tokens,
        "non_finite": whole.non_finite,
        "text": both.digest,
        "reference": reference,
    }


def speeds(bundles: dict[str, Path], repetitions: int) -> dict[str, dict[str, float]]:
    """Tokens per CPU-second of each workload, one thread, all bundles in one interleaved run."""
    found: dict[str, dict[str, float]] = {name: {} for name in bundles}
    subjects = {name: measured(path) for name, path in bundles.items()}
    contenders = [replace(subject.contender, name=name) for name, subject in subjects.items()]
    first = next(iter(subjects.values()))
    bench = Bench(vocab=first.vocab, text=first.text, repetitions=repetitions, say=say, strict=False)
    for row in bench.run(contenders, select([name for name, _ in SPEEDS]), [1]):
        key = dict(SPEEDS)[row["bench"]]
        if "median" in row:
            found[row["engine"]][row["bench"]] = row["median"][key]
    return found


def run(options: argparse.Namespace) -> list[Row]:
    """Every row, with why where it could not be had."""
    chosen = [form for form in FORMATS if not options.row or form.name in options.row]
    common = {"bench": "quality", "machine": hardware(), "commit": commit()}
    rows: list[Row] = []
    bundles: dict[str, Path] = {}
    for form in chosen:
        say(f"{form.name}: {' '.join(form.settings)}")
        row: Row = {"row": form.name, "settings": form.settings}
        try:
            path, calibration = build(form, options.out)
            manifest = open_bundle(path).manifest
            sizes = {
                "weight_bytes": sum(manifest.bytes_per_format.values()),
                "bytes_per_format": manifest.bytes_per_format,
            }
            row |= {"bundle": manifest.digest, "calibration_s": calibration, **sizes, **quality(path)}
            bundles[form.name] = path
        except PlankilnError as error:
            show_error(error)
            row["failed"] = error.problems[0].what
        rows.append(row)
    if bundles and options.repetitions:
        for name, found in speeds(bundles, options.repetitions).items():
            next(row for row in rows if row["row"] == name)["speeds"] = found
    file = results_file().with_name(results_file().stem + "-quality.jsonl")
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        for row in rows:
            print(json.dumps({**common, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **row}), file=out)
    say(f"rows: {file}")
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown. Speeds are ratios to bf16's, above 1 being faster."""
    base = next((row.get("speeds", {}) for row in rows if row["row"] == BASE), {})
    exact = next((row.get("perplexity") for row in rows if row["row"] == FORMATS[0].name), None)
    heads = ["", "perplexity a", "b", "both, against fp32", "KL mean", "KL p99", "top-1", "weights, MB"]
    lines = [[*heads, "decode", "prefill", "calibration, CPU s"], ["---"] + ["---:"] * 10]
    for row in rows:
        if "failed" in row:
            lines.append([row["row"], row["failed"], *[""] * 9])
            continue
        increase = f"{row['perplexity'] / exact - 1:+.1%}" if exact and row["perplexity"] else "–"
        ratios = [
            f"{row['speeds'][name] / base[name]:.2f}" if name in base and name in row.get("speeds", {}) else "–"
            for name, _ in SPEEDS
        ]
        agreement = row["top1_agreement"]
        lines.append(
            [
                row["row"],
                *(_text(row[key], 4) for key in ("perplexity_a", "perplexity_b")),
                increase,
                *(_text(row[key], 2) for key in ("kl_mean", "kl_p99")),
                "–" if agreement is None else f"{agreement:.1%}",
                f"{row['weight_bytes'] / 1e6:.1f}",
                *ratios,
                _text(row["calibration_s"], 3),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rewrite(page: Path, content: str) -> None:
    """Put the table between the page's marks."""
    old = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n{content}\n{END}", old))


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    names = ", ".join(f"`{form.name}`" for form in FORMATS)
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help=f"one of {names}; repeatable")
    parser.add_argument("--out", type=Path, default=Path("artifacts"))
    parser.add_argument("--repetitions", type=int, default=3, help="of the speed measurements; 0 leaves them out")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing, write the table of these rows")
    options = parser.parse_args()
    try:
        rows = [json.loads(line) for line in options.table.read_text().splitlines()] if options.table else run(options)
    except PlankilnError as error:
        show_error(error)
        return error.exit_code
    shown = table(rows)
    if not options.row:
        rewrite(PAGE, shown)
    print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
