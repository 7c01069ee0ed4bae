"""The command line as its user meets it: what goes where, exit codes, and never a traceback for a mistake."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest
from bundles import DESCRIPTION, make_bundle

import plankiln
from plankiln import cli
from plankiln.compiler import pipeline
from plankiln.errors import BuildError, Problem, RequestError

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "artifacts" / "tiny" / "cpu-generic").path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\nmodel: {source: model.gguf}\ntargets: [cpu-generic]\n")
    return path


class Outcome(SimpleNamespace):
    """Exit code, stdout and stderr of one call."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object, entry: Any = cli.main) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            entry([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(code=caught.value.code or 0, out=out, err=err)

    return run


class TestErrors:
    def test_usage(self, call: Any) -> None:
        done = call("build")
        assert done.code == 2
        assert done.err == "error: Missing argument `RECIPE`\nhint: see `plankiln build --help`\n"
        done = call("bild")
        assert done.code == 2
        assert done.err.startswith("error: No such command `bild`")
        done = call(entry=cli.build_main)
        assert done.err.endswith("hint: see `build --help`\n")

    def test_no_command_shows_help(self, call: Any) -> None:
        done = call()
        assert done.code == 2
        assert "Commands:" in done.err

    def test_users_mistake(self, call: Any, tmp_path: Path) -> None:
        done = call("inspect", tmp_path / "none")
        assert (done.code, done.out) == (1, "")
        first, second = done.err.splitlines()
        assert first.startswith("error: no such bundle: `")
        assert second.startswith("hint: ")

    def test_a_hint_that_problems_share_comes_once(self, call: Any, recipe: Path, monkeypatch: Any) -> None:
        def fail(*_: object, **__: object) -> None:
            raise BuildError([Problem("one", "here", "same"), Problem("two", hint="same"), Problem("three")])

        monkeypatch.setattr(pipeline, "build", fail)
        done = call("build", "-q", recipe)
        assert done.err == "error: one: here\nerror: two\nhint: same\nerror: three\n"

    def test_a_hundred_problems(self, call: Any, recipe: Path, monkeypatch: Any) -> None:
        def fail(*_: object, **__: object) -> None:
            raise BuildError([Problem(f"number {n}", hint="the same") for n in range(100)])

        monkeypatch.setattr(pipeline, "build", fail)
        lines = call("build", "-q", recipe).err.splitlines()
        assert lines[0] == "error: number 0"
        assert lines[19:] == ["error: number 19", "hint: the same", "… and 80 more"]

    def test_a_recipe_that_cannot_be_read(self, call: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        monkeypatch.setattr(Path, "open", refuse)
        for command in ("build", "validate"):
            done = call(command, recipe)
            assert done.code == 1
            assert done.err.startswith("error: cannot read `")
            assert done.err.endswith("` (Permission denied)\nhint: check its permissions\n")

    def test_our_mistake(self, call: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pipeline, "build", lambda *_, **__: 1 / 0)
        monkeypatch.delenv("PLANKILN_DEBUG", raising=False)
        done = call("build", recipe)
        assert done.code == 70
        assert "error: internal error: ZeroDivisionError: division by zero" in done.err
        assert "report" in done.err
        assert "Traceback" not in done.err
        monkeypatch.setenv("PLANKILN_DEBUG", "1")
        assert "Traceback" in call("build", recipe).err

    def test_interrupt(self, call: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pipeline, "build", interrupt)
        done = call("build", "-q", recipe)
        assert (done.code, done.err) == (130, "\ninterrupted\n")

    def test_missing_build_extra(self, call: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnx_ir", None)
        for name in [name for name in sys.modules if name.startswith("plankiln.compiler")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(plankiln, "compiler")
        done = call("build", recipe)
        assert done.code == 1
        assert "building needs the Python package `onnx_ir`" in done.err
        assert "hint: pip install 'plankiln[build]'" in done.err

    def test_color(self, recipe: Path) -> None:
        """Bold and red are for terminals, and not for those who said NO_COLOR."""
        script = f"import pty, sys; pty.spawn([{str(BIN / 'plankiln')!r}, 'inspect', 'none'])"
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
        for extra, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment | extra)
            assert (b"\x1b[31m" in done.stdout) is colored
            assert b"no such bundle" in done.stdout


class TestBuild:
    @pytest.fixture(autouse=True)
    def _fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def build(recipe: Path, *, overrides: Any, out: Path, progress: Any, only_targets: Any, **options: Any) -> Any:
            self.seen = (recipe, overrides, out, only_targets)
            self.options = options
            progress.stage("compile", "cpu-generic")
            progress("weights", 1, 2)
            progress.note("a note")
            done = [pipeline.BuildResult("tiny", "cpu-generic", out / "tiny", "ab", False, {"compile": 0.5})]
            if options["keep_going"]:
                raise pipeline.IncompleteBuildError([Problem("the other failed")], done)
            return done

        monkeypatch.setattr(pipeline, "build", build)

    @pytest.mark.parametrize(("entry", "prefix"), [(cli.main, ["build"]), (cli.build_main, [])])
    def test_path_on_stdout_log_on_stderr(self, call: Any, recipe: Path, entry: Any, prefix: list[str]) -> None:
        done = call(
            *prefix, recipe, "--set", "a=1", "--set", "b=2", "--target", "cpu-generic", "--out", "o", entry=entry
        )
        assert done.code == 0
        assert done.out == "o/tiny\n"
        assert "\ncpu-generic: compile" in done.err
        assert self.seen == (recipe, ("a=1", "b=2"), Path("o"), ("cpu-generic",))
        assert self.options == {"explain": False, "keep_going": False, "gate": True}
        assert "a note" in done.err

    def test_keep_going_prints_what_was_built_and_what_failed(self, call: Any, recipe: Path) -> None:
        done = call("build", recipe, "--keep-going", "-q", "--out", "o")
        assert (done.code, done.out, done.err) == (1, "o/tiny\n", "error: the other failed\n")

    def test_no_gate(self, call: Any, recipe: Path) -> None:
        call("build", recipe, "--no-gate", "-q")
        assert self.options["gate"] is False

    def test_explain_speaks_when_quiet(self, call: Any, recipe: Path) -> None:
        done = call("build", recipe, "--explain", "-q")
        assert (done.err, self.options["explain"]) == ("a note\n", True)

    def test_quiet_and_json(self, call: Any, recipe: Path) -> None:
        done = call("build", recipe, "--quiet", "--json")
        assert done.err == ""
        assert json.loads(done.out) == {
            "recipe": "tiny",
            "target": "cpu-generic",
            "path": "artifacts/tiny",
            "digest": "ab",
            "existed": False,
            "seconds": {"compile": 0.5},
            "reused": {},
        }


def test_validate(call: Any, recipe: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nmodel: {source: model.gguf}\ntargets: [cpu-generic]\nengin: {}\n")
    done = call("validate", recipe)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{recipe}: ok, tiny for cpu-generic\n"
    done = call("validate", bad, recipe, tmp_path / "none.yaml")
    assert done.code == 1
    assert "ok, tiny" in done.out
    assert "bad.yaml:4" in done.err
    assert "does not exist" in done.err
    done = call("validate", recipe, "--set", "engine.max_context=-1")
    assert "max_context" in done.err


def test_shipped_recipes_are_valid(call: Any) -> None:
    assert call("validate", *sorted((ROOT / "recipes").glob("*.yaml"))).code == 0


def test_inspect(call: Any, bundle: Path) -> None:
    done = call("inspect", bundle.parent.parent)
    assert done.code == 0
    for text in (str(bundle), "vocabulary 33", "weights fp32", bundle.name, "128 bytes per token"):
        assert text in done.out
    data = json.loads(call("inspect", bundle, "--json").out)
    assert data["path"] == str(bundle)
    assert data["manifest_sha256"] == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert data["manifest"]["limits"]["block_size"] == 4


def test_check(call: Any, bundle: Path, tmp_path: Path) -> None:
    assert "all but the content of the weights verified" in call("check", bundle).out
    assert "every byte verified" in call("check", bundle, "--full").out
    assert call("check", bundle, "--manifest-sha256", "0" * 64).code == 1
    with (bundle / "rank0" / "weights.bin").open("r+b") as file:
        file.write(b"?")
    assert call("check", bundle).code == 0
    done = call("check", bundle, "--full")
    assert done.code == 1
    assert "bytes 0 to 4194304 are not what was built" in done.err
    other = make_bundle(tmp_path, target=DESCRIPTION.target.model_copy(update={"machine": "vax"}))
    done = call("check", other.path, "--full")
    assert done.code == 0
    assert "this machine cannot run it: built for `vax`" in done.err


class FakeLlm:
    """LLM's surface as `run` uses it: says the prompt back, one word a delta."""

    last: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(encode_chat=lambda messages: [f"{m['role']}:{m['content']}" for m in messages])

    @classmethod
    def load(cls, path: Path, **options: Any) -> Self:
        cls.last = {"path": path, **options}
        return cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self, prompt: str | list[str], params: Any) -> Iterator[SimpleNamespace]:
        FakeLlm.last |= {"prompt": prompt, "params": params}
        if not prompt:
            raise RequestError("the prompt is empty")
        words = prompt if isinstance(prompt, list) else prompt.split(" ")
        for number, word in enumerate(words):
            error = "the engine failed" if word == "FAIL" else None
            last = number == len(words) - 1
            yield SimpleNamespace(
                text=word + " ", token_ids=(number,), output=SimpleNamespace(error=error) if last else None
            )


class TestRun:
    @pytest.fixture(autouse=True)
    def _fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("plankiln.runtime.llm")
        module.LLM = FakeLlm  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "plankiln.runtime.llm", module)

    def test_text_on_stdout_speed_on_stderr(self, call: Any) -> None:
        done = call("run", "b", "one two three", "--threads", "2", "--top-k", "5", "--stop", "x", "--stop", "y")
        assert (done.code, done.out) == (0, "one two three \n")
        assert "3 tokens, " in done.err
        assert "tokens/s" in done.err
        assert FakeLlm.last["path"] == Path("b")
        assert FakeLlm.last["threads"] == 2
        params = FakeLlm.last["params"]
        assert (params.top_k, params.stop, params.temperature, params.max_tokens) == (5, ("x", "y"), 0.0, 256)

    def test_chat(self, call: Any) -> None:
        assert call("run", "b", "hello", "--chat").out == "user:hello \n"
        assert call("run", "b", "hello", "--system", "be brief").out == "system:be brief user:hello \n"

    def test_stdin(self, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "prompt"
        path.write_bytes("grüße\n".encode())
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert call("run", "b", "-").out == "grüße\n \n"
        path.write_bytes(b"\xff")
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            done = call("run", "b", "-")
        assert done.code == 2
        assert "not UTF-8" in done.err

    def test_bad_values_before_loading(self, call: Any) -> None:
        FakeLlm.last = {}
        done = call("run", "b", "x", "--top-p", "2", "--temperature", "-1")
        assert done.code == 1
        assert "`top_p`" in done.err
        assert "`temperature`" in done.err
        assert done.err.endswith("hint: see `plankiln run --help`\n")
        done = call("run", "b", "x", "--max-tokens", "0", "--top-k", str(2**40))
        assert "`max_tokens` must be None or a whole number from 1 to 2147483647, not `0`" in done.err
        assert "`top_k` must be 0 (off) or a whole number up to 2147483647, not `1099511627776`" in done.err
        assert FakeLlm.last == {}

    def test_refused_and_failed_requests(self, call: Any) -> None:
        done = call("run", "b", "")
        assert (done.code, done.out) == (1, "")
        assert done.err == "error: the prompt is empty\n"
        done = call("run", "b", "well FAIL")
        assert done.code == 1
        assert done.err == "error: the engine failed\n"


def test_reader_that_left(bundle: Path) -> None:
    """`plankiln … | head -1` ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([BIN / "plankiln", "inspect", bundle], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_doctor(call: Any) -> None:
    done = call("doctor")
    assert done.code == 0
    assert "python" in done.out
    assert json.loads(call("doctor", "--json").out)["python"]


@pytest.mark.parametrize("arguments", [["plankiln", "--help"], ["build", "--help"], ["plankiln", "--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys, plankiln.cli as cli\n"
        f"try: (cli.build_main if {arguments[0]!r} == 'build' else cli.main)({arguments[1:]!r})\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'numpy', 'pydantic', 'onnx_ir', 'rich', 'yaml', 'tokenizers'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("name", ["plankiln", "build"])
def test_console_scripts(name: str) -> None:
    done = subprocess.run([BIN / name, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {name} ")
