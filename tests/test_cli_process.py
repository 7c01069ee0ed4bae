"""The command as a process: signals, closed and full streams, encodings, and what none of them leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bundles import make_bundle
from checkpoints import write_tiny_hf
from plans import write_recipe

BIN = Path(sys.executable).parent
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("artifacts") / "tiny" / "cpu-generic").path


def shell(line: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `plankiln` as `p` in a line of shell, where $1 … are the arguments."""
    text = f'p() {{ "{BIN / "plankiln"}" "$@"; }}; {line}'
    command = ["sh", "-c", text, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.parametrize("command", ["p inspect $1", "p --help", "p --version", "p doctor", "p doctor --json"])
class TestStdout:
    def test_closed(self, bundle: Path, command: str) -> None:
        done = shell(f"{command} >&-", bundle)
        assert done.returncode == 1
        assert done.stderr.splitlines()[0] == "error: cannot write to stdout (it is closed)"

    @pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_full(self, bundle: Path, command: str, unbuffered: str) -> None:
        done = shell(f"{command} >{FULL}", bundle, PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == 1
        assert done.stderr == "error: cannot write to stdout (No space left on device)\n"


def test_closed_stderr_is_no_trouble(bundle: Path) -> None:
    done = shell("p inspect $1 2>&-", bundle)
    assert done.returncode == 0
    assert str(bundle) in done.stdout
    assert shell("p inspect none 2>&-").returncode == 1
    assert shell("p build none.yaml 2>&-").returncode == 1


class TestPrompt:
    def test_no_stdin(self, bundle: Path) -> None:
        done = shell("p run $1 - <&-", bundle)
        assert (done.returncode, done.stderr) == (1, "error: cannot read the prompt (stdin is closed)\n")
        done = shell("p run $1 - </proc/self/mem", bundle)
        assert (done.returncode, done.stderr) == (1, "error: cannot read the prompt (Input/output error): stdin\n")

    def test_endless_stdin(self, bundle: Path) -> None:
        done = shell("p run $1 - </dev/zero", bundle)
        assert (done.returncode, done.stderr) == (2, "error: the prompt on stdin is longer than 16 MiB\n")

    @pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}])
    def test_in_any_locale(self, tmp_path: Path, locale: dict[str, str]) -> None:
        """Bytes of UTF-8 are the prompt, whatever Python makes of them, and the answer is written as far as can be."""
        script = tmp_path / "echo.py"
        script.write_text(
            "from types import SimpleNamespace as N\n"
            "from plankiln import cli\n"
            "from plankiln.runtime.llm import LLM\n"
            "class Echo:\n"
            "    def __enter__(self): return self\n"
            "    def __exit__(self, *_): pass\n"
            "    def stream(self, prompt, params):\n"
            "        yield N(text=ascii([prompt, params.stop]) + prompt, token_ids=(1,), output=N(error=None))\n"
            "LLM.load = lambda *_, **__: Echo()\n"
            "cli.main(['run', 'bundle', *__import__('sys').argv[1:]])\n"
        )
        command = [sys.executable, str(script), "grün".encode(), "--stop", "ß".encode()]
        done = subprocess.run(command, capture_output=True, env=os.environ | locale)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(rb"['gr\xfcn', ('\xdf',)]gr")
        done = subprocess.run([*command[:2], b"gr\xfcn"], capture_output=True, env=os.environ | locale)
        assert (done.returncode, done.stderr) == (2, b"error: the prompt is not UTF-8 text\n")


@pytest.mark.parametrize("threads", ["0", "-1", "257", "many"])
def test_threads_out_of_range(bundle: Path, threads: str) -> None:
    done = shell("p run $1 hello --threads $2", bundle, threads)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Invalid value for `--threads`")


def test_python_m(bundle: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "plankiln", "inspect", bundle], capture_output=True, text=True)
    assert done.returncode == 0
    assert str(bundle) in done.stdout
    assert "Usage: plankiln " in subprocess.check_output([sys.executable, "-m", "plankiln", "-h"], text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("signals") / "model", "llama", num_hidden_layers=1)


class TestSignals:
    @pytest.mark.parametrize(
        ("number", "code", "said"),
        [
            (signal.SIGINT, 130, "interrupted"),
            (signal.SIGTERM, 143, "stopped by SIGTERM"),
            (signal.SIGHUP, 129, "stopped by SIGHUP"),
        ],
    )
    def test_a_stopped_build_leaves_nothing(
        self, model: Path, tmp_path: Path, number: signal.Signals, code: int, said: str
    ) -> None:
        """It is stopped while a child of the compiler works."""
        pids = tmp_path / "pids"
        compiler = tmp_path / "slow-g++"
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nsleep 600 & echo $! $$ > {pids}; wait\n'
        )
        compiler.chmod(0o755)
        recipe, out = write_recipe(tmp_path / "tiny.yaml", model), tmp_path / "out"
        own = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "c"), "PLANKILN_STORE": str(tmp_path / "s")}
        command = [BIN / "plankiln", "build", "-q", recipe, "--out", out]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ | own) as process:
            while not pids.exists() or len(pids.read_text().split()) < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            process.send_signal(number)
            output, error = process.communicate(timeout=60)
        assert (process.returncode, output, error.strip()) == (code, "", said)
        left = [path for folder in (out, tmp_path / "s") for path in folder.rglob("*") if ".tmp-" in path.name]
        assert left == []
        assert not list(out.rglob("manifest.json"))
        for pid in map(int, pids.read_text().split()):
            assert _is_gone(pid)

    def test_an_ignored_hangup_stays_ignored(self) -> None:
        """As `nohup` has it."""
        script = (
            "import signal\nfrom plankiln.entry import _stoppable\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
            "with _stoppable(): signal.raise_signal(signal.SIGHUP)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


def _is_gone(pid: int) -> bool:
    for _ in range(500):  # an orphan is buried by init, which takes its time
        try:
            if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
