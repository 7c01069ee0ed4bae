"""The command line: `plankiln …`, and `build RECIPE` for short. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plankiln import __version__, quality_commands, store_commands
from plankiln.console import describe, needs_build_extra, say, show_progress
from plankiln.entry import run_command
from plankiln.errors import BuildError, EngineError, PlankilnError, Problem, RequestError, UsageError

if TYPE_CHECKING:
    from plankiln.runtime.sampling import SamplingParams

_HELP = {"help_option_names": ["-h", "--help"]}
_PATH = click.Path(path_type=Path, readable=False)  # whoever opens it says why it cannot be read
_MAX_PROMPT = 16 << 20  # bytes on stdin
_SET = click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a recipe key; repeatable.")
_PIN = click.option("--manifest-sha256", metavar="HEX", help="Refuse any manifest.json but the one with this SHA-256.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings=_HELP)
@click.version_option(__version__, "-V", "--version", message="%(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Log what is loaded and verified.")
def cli(verbose: bool) -> None:
    """One recipe, one verified artifact per processor."""
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger = logging.getLogger("plankiln")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


@cli.command(context_settings=_HELP, short_help="Build a recipe's bundles.")
@click.argument("recipe", type=_PATH)
@_SET
@click.option("--target", "targets", metavar="NAME", multiple=True, help="Build only this target; repeatable.")
@click.option("--out", type=_PATH, default=Path("artifacts"), show_default=True, help="Where bundles go.")
@click.option("--explain", is_flag=True, help="Say of each stage whether the store has it, and why not.")
@click.option("-k", "--keep-going", is_flag=True, help="When a target fails, build the others first.")
@click.option("--no-gate", is_flag=True, help="Publish without measuring quality; the manifest says so.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@_JSON
def build(
    recipe: Path,
    overrides: tuple[str, ...],
    targets: tuple[str, ...],
    out: Path,
    explain: bool,
    keep_going: bool,
    no_gate: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build RECIPE and print the path of each bundle: OUT/RECIPE/TARGET/DIGEST."""
    with needs_build_extra():
        from plankiln.compiler import pipeline
    failed: BuildError | None = None
    with show_progress(quiet=quiet, notes=explain) as progress:
        try:
            results = pipeline.build(
                recipe,
                overrides=overrides,
                out=out,
                progress=progress,
                only_targets=targets,
                explain=explain,
                keep_going=keep_going,
                gate=not no_gate,
            )
        except pipeline.IncompleteBuildError as e:
            failed, results = e, list(e.results)
    for result in results:
        if as_json:
            row: dict[str, Any] = {
                "recipe": result.recipe,
                "target": result.target,
                "path": str(result.path),
                "digest": result.digest,
            }
            row |= {"existed": result.existed, "seconds": result.seconds, "reused": result.reused}
            click.echo(json.dumps(row))
        else:
            click.echo(str(result.path))
    if failed:
        raise failed


@cli.command(short_help="Check recipes without building.")
@click.argument("recipes", metavar="RECIPE...", type=_PATH, nargs=-1, required=True)
@_SET
def validate(recipes: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Check recipes and print every error with its file and line; nothing is downloaded."""
    from plankiln.recipe import load_recipe

    problems: list[Problem] = []
    for path in recipes:
        try:
            recipe = load_recipe(path, overrides)
        except PlankilnError as e:
            problems += e.problems
        else:
            click.echo(f"{path}: ok, {recipe.name} for {', '.join(target.sku for target in recipe.targets)}")
    if problems:
        raise PlankilnError(list(dict.fromkeys(problems)))


@cli.command(short_help="Print what a bundle is.")
@click.argument("bundle", type=_PATH)
@_JSON
def inspect(bundle: Path, as_json: bool) -> None:
    """Print what BUNDLE's manifest says, whatever machine it is for. Verifies no other file: see `check`."""
    from plankiln.bundle import find_bundle, read_manifest

    path = find_bundle(bundle)
    manifest, digest = read_manifest(path)
    if as_json:
        data = {"path": str(path), "manifest_sha256": digest, "manifest": manifest.model_dump(mode="json")}
        click.echo(json.dumps(data))
    else:
        click.echo(describe(str(path), manifest, digest))


@cli.command(short_help="Verify a bundle.")
@click.argument("bundle", type=_PATH)
@click.option("--full", is_flag=True, help="Hash the weights too, not only compare their size.")
@_PIN
def check(bundle: Path, full: bool, manifest_sha256: str | None) -> None:
    """Verify BUNDLE: its manifest, code, tokenizer, the modes of its files and, with --full, every byte."""
    from plankiln.bundle import obstacle, open_bundle

    opened = open_bundle(bundle, verify="full" if full else "code", manifest_sha256=manifest_sha256, any_machine=True)
    depth = "every byte" if full else "all but the content of the weights"
    click.echo(f"{opened.path}: ok, {depth} verified")
    if problem := obstacle(opened.manifest.target):
        say(f"note: this machine cannot run it: {problem}")


@cli.command(short_help="Generate text.")
@click.argument("bundle", type=_PATH)
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message: put it into the chat template.")
@click.option("--system", metavar="TEXT", help="The system message before it; implies --chat.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; repeatable.")
@click.option("--threads", type=click.IntRange(1, 256), help="Default: the cores this process may use.")
@_PIN
def run(
    bundle: Path,
    prompt: str,
    chat: bool,
    system: str | None,
    threads: int | None,
    manifest_sha256: str | None,
    **sampling: Any,
) -> None:
    """Generate text after PROMPT (`-` reads it from stdin) and print it as it comes; speed goes to stderr."""
    from plankiln.runtime.sampling import SamplingParams

    sampling["stop"] = [_typed(text) for text in sampling["stop"]]
    try:
        params = SamplingParams(**sampling)
    except RequestError as e:
        raise PlankilnError([replace(p, hint="see `plankiln run --help`") for p in e.problems]) from None
    prompt = _read_stdin() if prompt == "-" else _typed(prompt)
    system = None if system is None else _typed(system)
    _generate(bundle, prompt, chat or system is not None, system, params, threads, manifest_sha256)


@cli.command(short_help="Measure a bundle.")
@click.argument("bundle", type=_PATH)
@click.option("-w", "--workload", "workloads", metavar="NAME", multiple=True, help="Only this one; repeatable.")
@click.option("--threads", type=click.IntRange(min=1), multiple=True, help="Repeatable.  [default: 1 and 2]")
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def bench(bundle: Path, workloads: tuple[str, ...], threads: tuple[int, ...], repetitions: int, quiet: bool) -> None:
    """Measure BUNDLE and print a line of JSON for each workload and number of threads.

    Compare `…_per_cpu_s` (tokens per second of CPU time) on one thread: it hardly depends on what else the machine
    does, which `others` tells. All of it takes some 15 minutes, `-w decode-1 -w prefill-512 --threads 1` half of one.
    """
    from plankiln.runtime.bench.bundle_worker import measured
    from plankiln.runtime.bench.driver import Bench
    from plankiln.runtime.bench.workload import select

    chosen = select(workloads)
    subject = measured(bundle)
    progress = (lambda text: None) if quiet else say
    run = Bench(vocab=subject.vocab, text=subject.text, repetitions=repetitions, say=progress, strict=True)
    for row in run.run([subject.contender], chosen, threads or (1, 2)):
        click.echo(json.dumps(row, ensure_ascii=False))


@cli.command(short_help="Say what this machine has.")
@_JSON
def doctor(as_json: bool) -> None:
    """Say what this machine has: Python, compilers, CPU flags, memory, GPUs, other runtimes."""
    from plankiln import doctor as facts

    report = facts.collect()
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        from rich.console import Console

        facts.render(report, Console())


cli.add_command(quality_commands.gate)
cli.add_command(quality_commands.quantize_report)
cli.add_command(store_commands.store)


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PlankilnError("cannot read the prompt (stdin is closed)")
    try:
        data = sys.stdin.buffer.read(_MAX_PROMPT + 1)
        if len(data) > _MAX_PROMPT:
            raise UsageError(f"the prompt on stdin is longer than {_MAX_PROMPT >> 20} MiB")
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not UTF-8 text") from None
    except OSError as e:
        raise PlankilnError(f"cannot read the prompt ({e.strerror})", "stdin") from None


def _typed(argument: str) -> str:
    """The text of an argument, of which Python keeps what is not in the locale's encoding as surrogates."""
    with suppress(UnicodeError):
        argument.encode()
        return argument
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise UsageError("the prompt is not UTF-8 text") from None


def _generate(
    bundle: Path,
    prompt: str,
    chat: bool,
    system: str | None,
    params: SamplingParams,
    threads: int | None,
    manifest_sha256: str | None,
) -> None:
    from plankiln.runtime.llm import LLM

    begun = time.perf_counter()
    with LLM.load(bundle, threads=threads, manifest_sha256=manifest_sha256) as llm:
        loaded = first = time.perf_counter()
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        tokens = 0
        for delta in llm.stream(llm.tokenizer.encode_chat(messages) if chat else prompt, params):
            if not tokens:
                first = time.perf_counter()
            tokens += len(delta.token_ids)
            click.echo(delta.text, nl=False)
            if delta.output and delta.output.error:
                raise EngineError(delta.output.error)
        ended = time.perf_counter()
    click.echo()
    speed = f"{(tokens - 1) / (ended - first):.1f} tokens/s, " if tokens > 1 else ""
    say(f"{tokens} tokens, {speed}first after {first - loaded:.2f} s, loaded in {loaded - begun:.2f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """The `plankiln` command. Exits 0, 1 (the user's mistake), 2 (usage), 70 (our mistake), or 128 and the number of
    the signal that stopped it (130 for Ctrl-C)."""
    sys.exit(run_command(cli, "plankiln", arguments))


def build_main(arguments: Sequence[str] | None = None) -> None:
    """The `build` command: `build RECIPE` is `plankiln build RECIPE`."""
    sys.exit(run_command(build, "build", arguments))
