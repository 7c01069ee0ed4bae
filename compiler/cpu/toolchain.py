"""Find a C++ compiler, compile a plan, and say plainly what went wrong."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from plankiln.errors import ToolchainError
from plankiln.target import Target

KERNELS = Path(str(files("plankiln.plugins.cpu")))
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-Wno-psabi", "-pthread"),
    *("-static-libgcc", "-static-libstdc++"),
)
_INSTALL = "install g++ 11 or newer, or clang++ 12 or newer (Debian: `apt-get install g++`), or set CXX"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command and the first line of `--version`."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """$CXX if set, else g++, else clang++. Raises ToolchainError when there is none that answers."""
    named = os.environ.get("CXX")
    try:
        candidates = [shlex.split(named)] if named else [["g++"], ["clang++"], ["c++"]]
    except ValueError as error:
        raise ToolchainError(f"not a command ({error})", f"CXX=`{named}`", _INSTALL) from None
    for command in candidates:
        if not command or not shutil.which(command[0]):
            continue
        try:
            answer = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(tuple(command), answer.stdout.splitlines()[0] if answer.stdout else "unknown")
    if named:
        raise ToolchainError("the C++ compiler does not run", f"CXX=`{named}`", _INSTALL)
    raise ToolchainError("no C++ compiler found", "looked for `g++`, `clang++`, `c++` on PATH", _INSTALL)


def compile_plan(compiler: Compiler, source: Path, output: Path, target: Target, extra: tuple[str, ...] = ()) -> None:
    """Compile plan.cc to a shared object for the target. Raises ToolchainError with the compiler's first complaint.

    However this ends, no process of the compiler is left.
    """
    level = "-O2" if target.isa == "generic" else "-O3"  # -O3 on the portable variant: six times the compile time
    options = [level, *FLAGS, *target.march, *extra, "-I", str(KERNELS)]
    command = [*compiler.command, *options, str(source), "-o", str(output)]
    try:
        status, said = _run(command, timeout=600)
    except subprocess.TimeoutExpired:
        raise ToolchainError("the compiler did not finish within 600 s", f"`{compiler.command[0]}`") from None
    except OSError as error:
        raise ToolchainError(f"the compiler could not be started: {error}", f"`{compiler.command[0]}`") from None
    if status == 0 and output.is_file():
        return
    complaints = [line for line in said.splitlines() if re.search(r"error|unrecognized|unknown|fatal", line)]
    first = (complaints or said.splitlines() or [f"exit status {status}"])[0].strip()
    if status == 0:
        first = f"the compiler wrote no {output.name}"
    if any(flag in first for flag in ("-march", "-mavx")):
        raise ToolchainError(
            f"the compiler does not know target `{target.name}`: {first}",
            f"`{' '.join(compiler.command)}` ({compiler.version})",
            "use a newer compiler through CXX, or target `cpu-generic`",
        )
    raise ToolchainError(
        f"compiling the plan failed: {first}",
        f"`{' '.join(compiler.command)}` ({compiler.version})",
        f"the whole command was `{shlex.join(command)}`",
    )


def _run(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit status and stderr. The compiler's own children are killed with it when the wait for it ends early."""
    pipe, environment = subprocess.PIPE, {**os.environ, "LC_ALL": "C"}
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def needed_glibc(plan: Path) -> str:
    """The newest glibc symbol version the shared object asks for, as `major.minor`."""
    versions = re.findall(rb"\bGLIBC_(\d+)\.(\d+)", plan.read_bytes())
    major, minor = max(((int(a), int(b)) for a, b in versions), default=(2, 2))
    return f"{major}.{minor}"
