"""The house: who may import whom, what a serving image needs, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"plankiln": "plankiln"} | {
    name: f"plankiln.{name}" for name in ("compiler", "quantize", "runtime", "plugins")
}
SHARED = {
    *("errors", "recipe", "recipe_yaml", "target", "checkpoint", "bundle", "manifest", "trust", "host"),
    "chat_template",
}
COMMANDS = {"__main__", "cli", "entry", "console", "doctor", "quality_commands", "store_commands"}
MAY_IMPORT = {
    "shared": {"shared"},
    "plugins": {"shared", "plugins"},
    "quantize": {"shared", "plugins", "quantize"},
    "runtime": {"shared", "plugins", "runtime"},
    "compiler": {"shared", "plugins", "quantize", "compiler"},
    "commands": {"shared", "plugins", "quantize", "runtime", "compiler", "commands"},
}
BASE = {"numpy", "tokenizers", "jinja2", "pydantic", "pydantic_core", "yaml", "click", "rich"}
BUILD = {"onnx", "onnx_ir", "safetensors", "huggingface_hub", "gguf", "ml_dtypes"}
QUANTIZE = {"torch", "modelopt", "transformers", "accelerate"}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def group(module: str) -> str:
    """The part of the house a module of ours belongs to."""
    first = [*module.split("."), ""][1]
    if first in SHARED or not first or first == "__version__":
        return "shared"
    if first in COMMANDS:
        return "commands"
    assert first in MAY_IMPORT, f"{module} has no place in the house: give it one in this test"
    return first


def imports(tree: ast.AST, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that is imported, with its line; `top_level`: only what runs when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        yield from imports(node, top_level=top_level)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_import_rule(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = group(module)
    faults = []
    for name, line in imports(tree):
        root = name.split(".")[0]
        if root in FOLDERS and root != "plankiln":
            faults.append(f"line {line}: `{name}` is imported as plankiln.{root}")
        elif root == "plankiln":
            gate = module == "plankiln.compiler.gate" and group(name) == "runtime"
            if group(name) not in MAY_IMPORT[own] and not gate:
                faults.append(f"line {line}: {own} must not import {group(name)} (`{name}`)")
        elif root in QUANTIZE and own != "quantize":
            faults.append(f"line {line}: only quantize may import {root}")
        elif own == "runtime" and root not in BASE | sys.stdlib_module_names:
            faults.append(f"line {line}: runtime must not import {root}")
        elif root not in BASE | BUILD | QUANTIZE | sys.stdlib_module_names:
            faults.append(f"line {line}: {root} is no dependency of ours")
    if own in ("shared", "commands"):
        for name, line in imports(tree, top_level=True):
            if name.split(".")[0] in BUILD:
                faults.append(f"line {line}: {name} is imported before it is needed")
    assert not faults, "\n".join(faults)


def test_the_rule_sees_what_it_forbids() -> None:
    tree = ast.parse(
        "import numpy\ndef f():\n    from plankiln.compiler import x\nif TYPE_CHECKING:\n    import torch\n"
    )
    assert list(imports(tree)) == [("numpy", 1), ("plankiln.compiler.x", 3), ("torch", 5)]
    assert list(imports(tree, top_level=True)) == [("numpy", 1)]


def test_serving_needs_only_the_base_dependencies() -> None:
    """Everything a serving process imports, in a process where nothing else can be imported."""
    serving = [name for name, _ in modules() if group(name) in ("shared", "commands", "runtime")]
    script = f"""
import importlib, importlib.abc, sys
class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(BUILD | QUANTIZE | {"onnxruntime", "tensorrt"})!r}:
            raise ModuleNotFoundError(name + " is not a base dependency", name=name)
sys.meta_path.insert(0, Wall())
for name in {serving!r}:
    importlib.import_module(name)
assert not any(name.startswith("plankiln.compiler") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_type_checker_sees_every_module() -> None:
    """typings/plankiln is the installed shape of the package, as links."""
    for name, path in modules():
        link = ROOT.joinpath("typings", *name.split("."))
        assert link.with_suffix(".py").exists() or (link / "__init__.py").exists(), f"{path} has no link in typings/"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and, from it, wheel of the tree as it stands."""
    source = tmp_path_factory.mktemp("source") / "plankiln"
    source.mkdir()
    for name in [*FOLDERS, "pyproject.toml", "README.md", "LICENSE"]:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_wheel_holds_every_module(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for folder, package in FOLDERS.items():
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.h"), *(ROOT / folder).rglob("text/*")]:
            expected.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}")
    assert names == expected


def test_nothing_generic_is_importable(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "build = plankiln.cli:build_main" in archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"plankiln"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_what_the_wheel_needs(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "plugins/__init__.py", "compiler/pipeline.py"} <= names
