"""`plankiln gate BUNDLE` and `plankiln quantize-report BUNDLE`: what quantization cost a bundle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plankiln.console import needs_build_extra, show_progress
from plankiln.errors import PlankilnError, UsageError
from plankiln.host import readable_size

if TYPE_CHECKING:
    from rich.table import Table

    from plankiln.compiler.regate import Regated
    from plankiln.quantize.report import Report

_PATH = click.Path(path_type=Path, readable=False)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command(short_help="Measure a bundle's quality again.")
@click.argument("bundle", type=_PATH)
@click.option("--source", metavar="MODEL", help="The model it was built from, where it is not where the recipe says.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@_JSON
def gate(bundle: Path, source: str | None, quiet: bool, as_json: bool) -> None:
    """Measure BUNDLE against the unquantized model by its recipe's `gate`; exit with 1 when it is over a limit.

    Relative paths of its recipe start at the current directory. A provisional bundle that passes is so no more.
    """
    with needs_build_extra():
        from plankiln.compiler.regate import regate
    with show_progress(quiet=quiet) as progress:
        found = regate(bundle, source, progress)
    if as_json:
        problems = [problem.what for problem in found.problems]
        record = found.record.model_dump(mode="json") if found.record else None
        click.echo(json.dumps({"path": str(found.path), "gate": record, "problems": problems}))
    elif found.record:
        from rich.console import Console

        Console().print(_gate_table(found))
    if found.problems:
        raise PlankilnError(found.problems)


@click.command("quantize-report", short_help="Show each matrix's format and error.")
@click.argument("bundle", type=_PATH)
@click.option("--plot", type=_PATH, metavar="FILE.svg", help="Draw the errors instead.")
@_JSON
def quantize_report(bundle: Path, plot: Path | None, as_json: bool) -> None:
    """Show the format, the bytes and the error of each matrix of BUNDLE, and what calibration found."""
    from plankiln.quantize.report import read_report

    if plot and plot.suffix != ".svg":
        raise UsageError(f"cannot draw `{plot}`: plots are SVG", hint="name it FILE.svg; a browser shows it")
    report = read_report(bundle)
    if plot:
        from plankiln.quantize.plot import svg

        try:
            plot.write_text(svg(report.rows, f"{report.manifest.name}, {report.manifest.formats.weights}"))
        except OSError as error:
            raise PlankilnError(f"cannot write the plot ({error.strerror})", f"`{plot}`") from None
        click.echo(str(plot))
    elif as_json:
        click.echo(json.dumps(_as_json(report)))
    else:
        _show(report)


def _gate_table(found: Regated) -> Table:
    from rich.table import Table

    record, old, limits = found.record, found.manifest.gate, found.manifest.recipe.get("gate")
    assert record is not None
    allowed: dict[str, Any] = limits if isinstance(limits, dict) else {}
    table = Table(
        "", "now", "at build", "limit", title=f"{record.tokens} tokens against {record.reference or 'nothing'}"
    )
    for name in ("perplexity", "reference_perplexity", "kl_mean", "kl_p99", "top1_agreement"):
        limit = allowed.get({"top1_agreement": "min_top1_agreement"}.get(name, f"max_{name}"))
        if name == "perplexity" and record.reference_perplexity and (most := allowed.get("max_perplexity_increase")):
            limit = record.reference_perplexity * (1 + most)
        values = (getattr(record, name), getattr(old, name) if old else None, limit)
        table.add_row(name.replace("_", " "), *("–" if value is None else f"{value:.5g}" for value in values))
    return table


def _as_json(report: Report) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "path": str(report.path),
        "matrices": [row.model_dump() for row in report.rows],
        "totals": [vars(total) for total in report.totals()],
        "quantization": manifest.quantization.model_dump(mode="json") if manifest.quantization else None,
        "gate": manifest.gate.model_dump(mode="json") if manifest.gate else None,
    }


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from plankiln.quantize.report import layers_and_kinds

    console = Console()
    layers, kinds = layers_and_kinds(report.rows)
    cells = {(row.layer, row.kind): row for row in report.rows}
    usual = {
        kind: Counter(row.format for row in report.rows if row.kind == kind).most_common(1)[0][0] for kind in kinds
    }
    table = Table("layer", title="relative error of the stored weights, %")
    for kind in kinds:
        table.add_column(f"{kind}\n{usual[kind]}", justify="right")
    for layer in layers:
        found = [cells.get((layer, kind)) for kind in kinds]
        texts = [
            f"{100 * row.error:.2f}" + (f" {row.format}" if row.format != usual[row.kind] else "") if row else "–"
            for row in found
        ]
        table.add_row(str(layer), *texts)
    console.print(table)
    for row in report.rows:
        if row.layer is None:
            console.print(f"{row.name}: {row.format}, error {row.error:.2%}", highlight=False)
    totals = Table("format", "matrices", "bytes", "share")
    everything = sum(total.bytes for total in report.totals()) or 1
    for total in report.totals():
        share = f"{total.bytes / everything:.1%}"
        totals.add_row(total.format, str(total.matrices), readable_size(total.bytes), share)
    console.print(totals)
    if facts := report.manifest.quantization:
        text = f"{facts.algorithm}, {facts.samples} samples of {facts.tokens} tokens in all" if facts.samples else ""
        click.echo(text or facts.algorithm)
        for module, ratio in facts.outlier_layers.items():
            click.echo(f"outlier layer, kept weight-only: {module}, largest input {ratio:.0f} times the mean")
        for module in facts.prescale_multiplies:
            click.echo(f"explicit pre-scale multiply: {module}")
