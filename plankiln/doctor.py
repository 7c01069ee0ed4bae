"""What this machine can build and run: `plankiln doctor`. Looks only; imports no GPU package and writes nothing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plankiln import __version__
from plankiln.errors import PlankilnError, Problem
from plankiln.host import Host, Memory, memory, store_directory, this_host, usable_cores
from plankiln.target import Target, resolve_native

_TIMEOUT_S = 10
_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")
_FLAGS_THAT_MATTER = (*_FLAGS, "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_BUILD_PACKAGES = ("onnx", "onnx-ir", "safetensors", "huggingface_hub", "gguf", "ml_dtypes")
_PACKAGES = re.compile(r"tensorrt.*|onnxruntime.*|torch|triton|polygraphy|nvidia-modelopt|transformers")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. `builds_native`: it accepts the options of the best target."""

    command: str
    path: str
    version: str
    builds_native: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi names it; memory in bytes, `sm` as in SM90, 0 when the driver does not tell."""

    name: str
    sm: int
    memory: int
    driver: str


@dataclass(frozen=True)
class Report:
    """Everything `plankiln doctor` knows. `packages` maps distribution names to versions."""

    plankiln: str
    python: str
    system: str
    cpu: str
    cpu_flags: tuple[str, ...]
    best_target: Target
    cores: int
    memory: Memory
    compilers: tuple[Compiler, ...]
    gpus: tuple[Gpu, ...]
    packages: dict[str, str]
    store: str
    store_free: int | None
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json`."""
        return dataclasses.asdict(self)


def collect() -> Report:
    """Look at this machine. Takes well under a second without a GPU; no step can take longer than ten."""
    target = resolve_native()
    host = this_host()
    compilers = _compilers(target)
    gpus, gpu_problems = _gpus()
    packages = _packages()
    store, store_free, store_problems = _store()
    return Report(
        plankiln=__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=_system(host),
        cpu=host.cpu,
        cpu_flags=tuple(flag for flag in _FLAGS_THAT_MATTER if flag in host.flags),
        best_target=target,
        cores=usable_cores(),
        memory=memory(),
        compilers=compilers,
        gpus=gpus,
        packages=packages,
        store=store,
        store_free=store_free,
        problems=(*_compiler_problems(compilers, target), *gpu_problems, *_package_problems(packages), *store_problems),
    )


def _run(command: list[str]) -> str:
    """Standard output of a child process. Raises OSError or subprocess.SubprocessError."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True, errors="replace"
    )
    return done.stdout


def _system(host: Host) -> str:
    libc = f"glibc {host.glibc}" if host.glibc else "no glibc"
    return f"{platform.system()} {platform.release()} {host.machine} {libc}"


def _compilers(target: Target) -> tuple[Compiler, ...]:
    """$CXX first, then g++ and clang++; each executable once."""
    found: dict[str, Compiler] = {}
    for command in (os.environ.get("CXX", "").strip(), "g++", "clang++"):
        path = shutil.which(command) if command else None
        if path is None or os.path.realpath(path) in found:
            continue
        try:
            version = next(iter(_run([path, "--version"]).splitlines()), "")
        except (OSError, subprocess.SubprocessError):
            continue
        try:
            _run([path, *target.march, "-std=c++17", "-fsyntax-only", "-x", "c++", os.devnull])
            accepts = True
        except (OSError, subprocess.SubprocessError):
            accepts = False
        found[os.path.realpath(path)] = Compiler(command, path, version, accepts)
    return tuple(found.values())


def _compiler_problems(compilers: tuple[Compiler, ...], target: Target) -> list[Problem]:
    problems = []
    wanted = os.environ.get("CXX", "").strip()
    if wanted and wanted not in [compiler.command for compiler in compilers]:
        problems.append(
            Problem(f"`$CXX` names `{wanted}`, which does not run", hint="set it to one executable, or unset it")
        )
    if not compilers:
        hint = "install one, such as `apt-get install g++`, or name yours in `$CXX`; serving a built bundle needs none"
        problems.append(Problem("no C++ compiler found, so CPU targets cannot be built", hint=hint))
    elif not any(compiler.builds_native for compiler in compilers):
        options = " ".join(target.march)
        hint = "install g++ 12 or clang 15, or newer; or build for `cpu-generic`"
        problems.append(Problem(f"no compiler here accepts `{options}`, which `cpu-native` needs", hint=hint))
    return problems


def _gpus() -> tuple[tuple[Gpu, ...], list[Problem]]:
    if not shutil.which("nvidia-smi"):
        return (), []
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    try:
        output = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    except (OSError, subprocess.SubprocessError):
        hint = "run it by hand: a driver that does not match its kernel module is the usual cause"
        return (), [Problem("`nvidia-smi` is installed but reports no GPU", hint=hint)]
    gpus = []
    for line in output.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 4:
            name, capability, mib, driver = fields
            sm = re.fullmatch(r"(\d+)\.(\d+)", capability)
            gpus.append(Gpu(name, int(sm[1] + sm[2]) if sm else 0, int(mib) << 20 if mib.isdecimal() else 0, driver))
    return tuple(gpus), []


def _packages() -> dict[str, str]:
    """Installed distributions that build or run plans, from their metadata."""
    found: dict[str, str] = {}
    known = {_canonical(name) for name in _BUILD_PACKAGES}
    for distribution in importlib.metadata.distributions():
        name = _canonical(distribution.metadata["Name"] or "")
        if name in known or _PACKAGES.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _package_problems(packages: dict[str, str]) -> list[Problem]:
    missing = [name for name in _BUILD_PACKAGES if _canonical(name) not in packages]
    if not missing:
        return []
    hint = "`pip install 'plankiln[build]'`; serving a built bundle needs none of them"
    return [Problem(f"cannot build here, missing: {', '.join(missing)}", hint=hint)]


def _store() -> tuple[str, int | None, list[Problem]]:
    """The stage store, the free bytes where it is or would be made, and what keeps us from writing there."""
    try:
        directory = store_directory()
    except PlankilnError as e:
        return "nowhere", None, list(e.problems)
    place = directory.absolute()
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
        hint = "set `PLANKILN_STORE` to a directory you can write"
        return str(directory), None, [Problem(f"the store `{directory}` cannot be written", hint=hint)]
    return str(directory), shutil.disk_usage(place).free, []


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"


def render(report: Report, console: Console) -> None:
    """Print the report as a table, then each problem with its hint."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, text: str) -> None:
        table.add_row(name, escape(text))

    target, sizes = report.best_target, report.memory
    row("plankiln", report.plankiln)
    row("python", report.python)
    row("system", report.system)
    row("cpu", f"{report.cpu}, {report.cores} {'core' if report.cores == 1 else 'cores'} to use")
    row("cpu flags", " ".join(report.cpu_flags) or "none that matter")
    row("cpu-native", f"{target.isa}, {' '.join(target.march) or 'no special options'}")
    limit = "" if sizes.limit is None else f", limited to {_size(sizes.limit)}"
    row("memory", f"{_size(sizes.available)} available of {_size(sizes.total)}{limit}")
    for index, compiler in enumerate(report.compilers):
        suffix = "" if compiler.builds_native else " (does not know cpu-native's options)"
        row("" if index else "compilers", f"{compiler.path}: {compiler.version}{suffix}")
    for index, gpu in enumerate(report.gpus):
        row("" if index else "gpus", f"{gpu.name}, SM{gpu.sm}, {_size(gpu.memory)}, driver {gpu.driver}")
    if not report.gpus:
        row("gpus", "none")
    row("packages", ", ".join(f"{name} {version}" for name, version in report.packages.items()) or "none")
    row("store", f"{report.store}, {_size(report.store_free)} free")
    console.print(table)
    for problem in report.problems:
        console.print(f"\n[yellow]problem[/]: {escape(problem.what)}\n[cyan]hint[/]: {escape(problem.hint)}")
