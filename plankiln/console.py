"""What the command line shows: errors, the progress of a build, a manifest in words. All but results goes to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from plankiln.errors import BuildError, PlankilnError
from plankiln.host import readable_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from plankiln.manifest import Manifest


_MOST_SHOWN = 20


def say(text: str = "", *, end: str = "\n") -> None:
    """One line of log, to stderr."""
    click.echo(text + end, err=True, nl=False, color=_color())


def show_error(error: PlankilnError) -> None:
    """Each problem as `error: what: where`, then `hint: what to do`; a hint that several in a row share comes once."""
    problems = error.problems[:_MOST_SHOWN]
    for problem, following in zip(problems, [*problems[1:], None], strict=True):
        line = f"{problem.what}: {problem.where}" if problem.where else problem.what
        show_problem(line, "" if following and following.hint == problem.hint else problem.hint)
    if more := len(error.problems) - len(problems):
        say(f"… and {more} more")


def show_problem(line: str, hint: str = "") -> None:
    """One problem and its hint, to stderr."""
    say(f"{click.style('error:', fg='red', bold=True)} {line}")
    if hint:
        say(f"{click.style('hint:', fg='cyan', bold=True)} {hint}")


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


@contextmanager
def needs_build_extra() -> Iterator[None]:
    """Around imports of the compiler: turns a package that is not installed into a BuildError."""
    try:
        yield
    except ModuleNotFoundError as e:
        if not e.name or e.name.partition(".")[0] == "plankiln":
            raise
        hint = "pip install 'plankiln[build]'"
        raise BuildError(f"building needs the Python package `{e.name}`, which is not installed", hint=hint) from None


class QuietProgress:
    """Shows nothing, or only notes."""

    def __init__(self, notes: bool = False) -> None:
        self._notes = notes

    def stage(self, name: str, target: str) -> None: ...

    def note(self, text: str) -> None:
        if self._notes:
            say(text)

    def __call__(self, what: str, done: int, total: int) -> None: ...


class LineProgress:
    """One line for each stage when it is over: for logs."""

    def __init__(self) -> None:
        self._name = ""
        self._start = 0.0

    def stage(self, name: str, target: str) -> None:
        self.finish()
        self._name, self._start = _label(name, target), time.monotonic()

    def note(self, text: str) -> None:
        say(text)

    def __call__(self, what: str, done: int, total: int) -> None: ...

    def finish(self) -> None:
        """The last stage is over too."""
        if self._name:
            say(f"{self._name:<32} {time.monotonic() - self._start:6.1f} s")
        self._name = ""


class BarProgress(LineProgress):
    """LineProgress with a bar for the present stage below: for terminals."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, name: str, target: str) -> None:
        super().stage(name, target)
        self._task = self._progress.add_task(_label(name, target), total=None)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=what, completed=done, total=total or None)

    def finish(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        if self._name:
            self._progress.console.print(
                f"{self._name:<32} {time.monotonic() - self._start:6.1f} s", markup=False, highlight=False
            )
        self._name = ""


def _label(name: str, target: str) -> str:
    return f"{target}: {name}" if target else name


@contextmanager
def show_progress(*, quiet: bool, notes: bool = False) -> Iterator[QuietProgress | LineProgress]:
    """What a build reports to: bars on a terminal, lines elsewhere; when quiet nothing, or `notes` only."""
    if quiet:
        yield QuietProgress(notes)
    elif sys.stderr is None or not sys.stderr.isatty():
        lines = LineProgress()
        yield lines
        lines.finish()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
            bars = BarProgress(progress)
            yield bars
            bars.finish()


def describe(path: str, manifest: Manifest, manifest_sha256: str) -> str:
    """A manifest in a dozen lines."""
    target, model, limits = manifest.target, manifest.model, manifest.limits
    size = sum(entry.bytes for entry in manifest.files.values())
    formats = ", ".join(f"{name} {readable_size(count)}" for name, count in sorted(manifest.bytes_per_format.items()))
    rows = {
        "bundle": path,
        "recipe": f"{manifest.name}, built {manifest.created} by plankiln {manifest.plankiln}",
        "source": manifest.source.uri,
        "model": f"{model.architecture}, {model.layers} layers, hidden {model.hidden}, vocabulary {model.vocab_size}",
        "target": f"{target.name} ({target.isa}, {target.machine}, glibc {target.glibc} or newer)",
        "CPU flags": " ".join(target.flags) or "none",
        "formats": f"weights {manifest.formats.weights}, activations {manifest.formats.activations}, "
        f"KV cache {manifest.formats.kv_cache}",
        "stored": formats,
        "gate": _gate_line(manifest),
        "KV cache": f"{manifest.kv_bytes_per_token} bytes per token, at most {readable_size(limits.kv_memory)}: "
        f"{limits.kv_memory // manifest.kv_bytes_per_token} tokens",
        "limits": f"{limits.max_sequences} sequences, {limits.max_tokens_per_step} tokens per step, "
        f"context {limits.max_context}, blocks of {limits.block_size}",
        "ends at": "token " + " or ".join(map(str, manifest.eos_token_ids)) if manifest.eos_token_ids else "no token",
        "files": f"{len(manifest.files)}, {readable_size(size)}",
        "digest": manifest.digest,
        "manifest": f"sha256 {manifest_sha256}",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def _gate_line(manifest: Manifest) -> str:
    gate = manifest.gate
    if gate is None:
        return "not measured"
    if gate.skipped or gate.perplexity is None:
        return "skipped (--no-gate)"
    state = "passed" if gate.passed else "not passed"
    if gate.provisional:
        state = f"provisional: {state} as predicted on a CPU"
    text = f"{state}; perplexity {gate.perplexity:.4g}"
    if gate.reference is not None:
        text += (
            f" against {gate.reference_perplexity:.4g} of {gate.reference}, KL {gate.kl_mean:.3g} nats "
            f"(p99 {gate.kl_p99:.3g}), top-1 agreement {gate.top1_agreement:.1%}"
        )
    return f"{text}, {gate.tokens} tokens"
