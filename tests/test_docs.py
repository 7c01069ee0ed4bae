"""The documents tell the truth: the generated code they show, the paths they name, the recipe they give."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from plans import fused_graph

from plankiln.checkpoint import open_checkpoint
from plankiln.compiler.cpu.emit import emit
from plankiln.compiler.cpu.lower import lower
from plankiln.compiler.cpu.memory import plan_memory
from plankiln.compiler.cpu.pack import weight_offsets
from plankiln.compiler.precision import Precision
from plankiln.recipe import load_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = ("plankiln", "compiler", "quantize", "runtime", "plugins")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"(?:\.ci|bench|compiler|docs|plankiln|plugins|quantize|recipes|runtime|tests|typings)/[\w./*-]*")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return [text for name, text in _FENCE.findall(page.read_text()) if name == language]


def named_paths(page: Path) -> Iterator[str]:
    """Paths of the repository in backticks, outside code blocks. What `build` leaves in artifacts/ is none of them."""
    for quoted in re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text())):
        if _PATH.fullmatch(quoted):
            yield quoted


def test_the_generated_code_in_the_docs_is_what_is_generated() -> None:
    resolved = load_recipe(ROOT / "recipes/smollm2-135m.yaml").resolve()[0]
    with open_checkpoint(resolved.model.source, base=ROOT, sha256=resolved.model.sha256) as checkpoint:
        origin = checkpoint.origin
    assert (resolved.quantize.weights, resolved.quantize.kv_cache) == ("keep", "bf16")
    graph = fused_graph(origin, Precision("keep"), "bf16", resolved.engine.max_context, resolved.engine.block_size)
    program = lower(graph, resolved.recipe)
    source = emit(program, plan_memory(program), *weight_offsets(program), "cpu-native")
    page = ROOT / "docs/generated.md"
    if os.environ.get("PLANKILN_UPDATE_DOCS") == "1":
        page.write_text(page.read_text().replace(blocks(page, "cpp")[0], source))
    assert blocks(page, "cpp") == [source], "PLANKILN_UPDATE_DOCS=1 writes it anew"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_a_page_names_exists(page: Path) -> None:
    missing = [path for path in named_paths(page) if not any(ROOT.glob(path.rstrip("/")))]
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing += [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_architecture_names_every_file() -> None:
    files = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h") and path.stat().st_size
    ]
    named = set(named_paths(ROOT / "docs/architecture.md"))
    assert len(files) > 50
    assert not [file for file in files if file not in named]


def test_the_readme_s_recipes_are_valid(tmp_path: Path) -> None:
    whole, quantized = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(whole)
    assert [target.target.name for target in load_recipe(tmp_path / "recipe.yaml").resolve()] == [
        "cpu-native",
        "cpu-x86-64-v3",
    ]
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for name in ("quantized.yaml", "chats.jsonl", "held-out.txt"):
        (tmp_path / "recipes" / name).write_text(quantized)
    (target,) = load_recipe(tmp_path / "recipes" / "quantized.yaml").resolve()
    assert target.quantize.is_calibrated
    assert target.gate.text.file == tmp_path / "recipes" / "held-out.txt"
