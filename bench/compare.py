"""compare.py BUNDLE --peers DIR: the bundle and its peers on one workload, in one interleaved run.

DIR is what `bench/peers/setup.sh` made; `make bench-peers` does both. Rows go to bench/results/DATE-CPU.jsonl as they
come, then a table to stdout. `--table FILE` prints the table of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plankiln.bundle import find_bundle
from plankiln.console import say, show_error
from plankiln.errors import PlankilnError
from plankiln.host import this_host
from plankiln.manifest import REPORT
from plankiln.runtime.bench import worker
from plankiln.runtime.bench.bundle_worker import measured
from plankiln.runtime.bench.driver import Bench, Contender, Row
from plankiln.runtime.bench.workload import WORKLOADS, select

HERE = Path(__file__).parent
OURS = "plankiln"
# name, environment, worker, model, its format
PEERS = (
    ("llama.cpp Q4_0", "llama", "llama_cpp_worker.py", "llama-q4_0.gguf", "Q4_0 weights, fp16 cache"),
    ("llama.cpp Q4_1", "llama", "llama_cpp_worker.py", "llama-q4_1.gguf", "Q4_1 weights, fp16 cache"),
    ("OpenVINO int4", "openvino", "openvino_worker.py", "openvino-int4", "int4 symmetric, group 64, all layers"),
    ("ORT-GenAI int4", "ort", "ort_genai_worker.py", "ort-int4", "int4, block 32, accuracy level 4"),
)


def peers(directory: Path) -> list[Contender]:
    """The peers that are there; of the others it says so."""
    found = []
    for name, environment, script, model, formats in PEERS:
        python, path = directory / environment / "bin" / "python", directory / "models" / model
        if not python.exists() or not path.exists():
            say(f"{name}: not in {directory}, left out")
            continue
        paths = [str(Path(worker.__file__).parent), str(directory / "llama.cpp")]
        settings = {"PYTHONPATH": ":".join(paths), "LLAMA_CPP_LIB_PATH": str(directory / "llama.cpp/build/bin")}
        about: dict[str, Any] = {"formats": formats}
        timed = path.with_name(model + ".seconds")
        if timed.exists():
            about["build_s"] = float(timed.read_text())
        found.append(Contender(name, [str(python), str(HERE / "peers" / script), str(path)], about, settings))
    return found


def results_file() -> Path:
    cpu = re.sub(r"[^a-z0-9]+", "-", this_host().cpu.lower()).strip("-")
    return HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{cpu}.jsonl"


# What the table shows of a workload: number of threads, heading, key of the median, and whether more is better.
_COLUMNS = (
    ("load", 1, "load to first token, CPU ms", "load_to_first_token_cpu_s", False),
    ("load", 1, "load to first token, ms", "load_to_first_token_s", False),
    ("decode-1", 1, "peak RSS of one stream, MiB", "peak_rss_mib", False),
    *(
        (name, threads, f"{name}, {unit}", f"{what}_per_{key}", True)
        for threads, unit, key in ((1, "tokens per CPU-second", "cpu_s"), (2, "tokens/s on 2 threads", "s"))
        for name, what in (
            *((f"decode-{n}", "decode") for n in (1, 4, 16, 32)),
            ("prefill-512", "prefill"),
            *((f"loop-{n}", "output") for n in (1, 4, 16, 32)),
        )
    ),
    ("loop-16", 2, "loop-16, time to first token p50, ms", "ttft_p50_ms", False),
    ("loop-16", 2, "loop-16, time to first token p99, ms", "ttft_p99_ms", False),
    ("loop-16", 2, "loop-16, between tokens p50, ms", "gap_p50_ms", False),
    ("loop-16", 2, "loop-16, between tokens p99, ms", "gap_p99_ms", False),
)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each measure, a column for each engine, ours against the best peer (above 1: we lead)."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    others = [engine for engine in engines if engine != OURS]
    found = {(row["engine"], row["bench"], row["threads"]): row for row in rows}
    lines = [["", *engines, "ours / best peer", "others' CPU"]]
    lines.append(["perplexity", *(_text(_any(rows, engine).get("perplexity")) for engine in engines), "", ""])
    lines.append(["build or conversion, s", *(_text(_any(rows, engine).get("build_s")) for engine in engines), "", ""])
    for bench, threads, heading, key, more in _COLUMNS:
        values = {e: found.get((e, bench, threads), {}).get("median", {}).get(key) for e in engines}
        if not any(value is not None for value in values.values()):
            continue
        shown = {
            e: v * 1000 if v is not None and heading.endswith("ms") and key.endswith("_s") else v
            for e, v in values.items()
        }
        theirs = [values[e] for e in others if values[e] is not None]
        ratio = ""
        if values.get(OURS) is not None and theirs:
            best = max(theirs) if more else min(theirs)
            ratio = f"{values[OURS] / best if more else best / values[OURS]:.2f}"
        busy = max(
            r["median"]["others"] for (_, b, t), r in found.items() if (b, t) == (bench, threads) and "median" in r
        )
        lines.append([heading, *(_text(shown[e]) for e in engines), ratio, f"{busy:.0%}"])
    lines.insert(1, ["---"] + ["---:"] * (len(engines) + 2))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _any(rows: Sequence[Row], engine: str) -> Row:
    return next(row for row in rows if row["engine"] == engine)


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def run(options: argparse.Namespace) -> list[Row]:
    """Measure everyone; each row is in the results file before the next is begun."""
    workloads = select(options.workload)
    ours = measured(options.bundle)
    report = json.loads((find_bundle(options.bundle) / REPORT).read_text())
    about = {**ours.contender.about, "build_s": sum(report["seconds"].values())}
    contenders = [replace(ours.contender, about=about), *peers(options.peers)]
    file = results_file()
    file.parent.mkdir(exist_ok=True)
    bench = Bench(vocab=ours.vocab, text=ours.text, repetitions=options.repetitions, say=say, strict=False)
    rows = []
    with file.open("a") as out:
        for row in bench.run(contenders, workloads, options.threads):
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
    say(f"rows: {file}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/plankiln/peers").expanduser())
    parser.add_argument(
        "-w", "--workload", action="append", default=[], help=f"one of {', '.join(WORKLOADS)}; repeatable"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing, print the table of these rows")
    options = parser.parse_args()
    if (options.bundle is None) == (options.table is None):
        parser.error("give a bundle, or --table FILE")
    try:
        rows = [json.loads(line) for line in options.table.read_text().splitlines()] if options.table else run(options)
    except PlankilnError as error:
        show_error(error)
        return error.exit_code
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
