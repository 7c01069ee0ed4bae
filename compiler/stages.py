"""The stages that the store keeps, what each depends on, and why one has to be done again.

Every stage's key holds the digests of our own files that may have a part in its work, and the versions of the tools
that they use. A list of the modules that do have one would go stale, so weights and bundles depend on every module.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from plankiln import __version__
from plankiln.compiler.cpu.compile import CpuSource
from plankiln.compiler.cpu.pack import weight_offsets
from plankiln.compiler.cpu.toolchain import Compiler
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.store import Parts, Stage, Store
from plankiln.recipe import Quantize, ResolvedTarget

_PACKING = ("checkpoint/**/*.py", "quantize/**/*.py", "compiler/**/*.py", "plugins/**/*.py")
_COMPILING = ("plugins/**/*.h", "compiler/cpu/compile.py", "compiler/cpu/toolchain.py")
_CALIBRATING = ("checkpoint/**/*.py", "quantize/**/*.py", "chat_template.py", "recipe.py")
_BUILDING = (*_PACKING, "plugins/**/*.h", "manifest.py", "recipe.py", "target.py", "chat_template.py")
_PACKING_TOOLS = ("numpy", "ml_dtypes", "gguf", "safetensors", "onnx", "onnx-ir")
_BUILDING_TOOLS = (*_PACKING_TOOLS, "tokenizers", "jinja2")


def code_stage(source: CpuSource, compiler: Compiler) -> Stage:
    """plan.cc and plan.so: the text, the headers it includes, the compiler and its options."""
    parts: dict[str, str | int] = {"text": _sha256(source.text.encode()), "march": shlex.join(source.target.march)}
    parts |= {"isa": source.target.isa, "machine": platform.machine(), **_compiler(compiler), **_own(_COMPILING)}
    return Stage("code", parts, ("plan.cc", "plan.so"))


def weights_stage(source: CpuSource, checkpoint_digest: str, spec: DecoderSpec, max_context: int) -> Stage:
    """weights.bin: the checkpoint, which of its rows lie where in what format, and the model that tables are made for.

    max_context: tokens, the length of the RoPE tables.
    """
    offsets, total = weight_offsets(source.program)
    layout = "\n".join(f"{offset} {weight!r}" for weight, offset in offsets.items())
    formats = " + ".join(sorted({str(weight.format) for weight in offsets}))
    parts: dict[str, str | int] = {"source": checkpoint_digest, "layout": _sha256(layout.encode()), "bytes": total}
    parts |= {"formats": formats, "max_context": max_context, **_flat("model", asdict(spec))}
    parts |= {**_tools(_PACKING_TOOLS), **_own(_PACKING)}
    return Stage("weights", parts, ("weights.bin",))


def quantize_stage(checkpoint_digest: str, quantize: Quantize, inputs: Mapping[str, str]) -> Stage:
    """A calibrated checkpoint. inputs: what calibration says it depends on: its texts, the packages that compute."""
    return Stage("quantize", _calibrated(checkpoint_digest, quantize, inputs), None)


def formats_stage(checkpoint_digest: str, quantize: Quantize, inputs: Mapping[str, str]) -> Stage:
    """The choice of a format for each matrix. inputs: as for `quantize_stage`."""
    return Stage("formats", _calibrated(checkpoint_digest, quantize, inputs))


def _calibrated(checkpoint_digest: str, quantize: Quantize, inputs: Mapping[str, str]) -> dict[str, str | int]:
    settings = quantize.model_dump(mode="json", exclude={"activations": True, "calibration": {"path"}})
    if quantize.kv_cache != "fp8":
        del settings["kv_cache"]
    parts: dict[str, str | int] = {"source": checkpoint_digest, **_flat("quantize", settings), **inputs}
    return {**parts, **_own(_CALIBRATING)}


def bundle_stage(
    resolved: ResolvedTarget, checkpoint_digest: str, compiler: Compiler, inputs: Mapping[str, str]
) -> Stage:
    """A whole bundle: the recipe as resolved for its target, the checkpoint, and everything that works on them.

    inputs: digests of the texts that are not in the recipe.
    """
    recipe = _flat("recipe", resolved.model_dump(mode="json", exclude={"model"}))
    parts: dict[str, str | int] = {"source": checkpoint_digest, "plankiln": __version__, "machine": platform.machine()}
    parts |= {"python": platform.python_version(), **recipe, **_compiler(compiler), **inputs}
    return Stage("bundle", {**parts, **_tools(_BUILDING_TOOLS), **_own(_BUILDING)})


def why(store: Store, stage: Stage) -> str:
    """Why the stage is not in the store: which parts of its key differ from the most similar entry's."""
    parts = [entry.record.parts for entry in store.all() if entry.record.stage == stage.name]
    if not parts:
        return "nothing like it in the store yet"
    changed = min((_changes(old, stage.parts) for old in parts), key=len)
    return "; ".join(changed) or "its entry is damaged or gone"


def _changes(old: Parts, new: Parts) -> list[str]:
    names = sorted(old.keys() | new.keys())
    return [f"{name} {_show(old, name)} → {_show(new, name)}" for name in names if old.get(name) != new.get(name)]


def _show(parts: Parts, name: str) -> str:
    value = str(parts.get(name, "nothing"))
    return value[:10] if len(value) == 64 else f"`{value}`"


def _flat(name: str, value: object) -> dict[str, str | int]:
    """A part for every leaf, under its path: a string or an integer, which is all that the store keeps."""
    if isinstance(value, dict):
        return {key: leaf for item in value.items() for key, leaf in _flat(f"{name}.{item[0]}", item[1]).items()}
    if isinstance(value, list | tuple):
        return {name: " ".join(map(str, value))}
    return {name: value if isinstance(value, str | int) and not isinstance(value, bool) else str(value)}


def _compiler(compiler: Compiler) -> dict[str, str | int]:
    driver = shutil.which(compiler.command[0])
    digest = _sha256(Path(driver).read_bytes()) if driver else "none"
    return {"compiler": compiler.version, "compiler.command": shlex.join(compiler.command), "compiler.driver": digest}


def _tools(names: tuple[str, ...]) -> dict[str, str | int]:
    return {f"tool.{name}": version(name) for name in names}


def _own(patterns: tuple[str, ...]) -> dict[str, str | int]:
    """Digests of our own files."""
    found: dict[str, str | int] = {}
    for pattern in patterns:
        folder, _, rest = pattern.partition("/")
        root = Path(str(files(f"plankiln.{folder}"))) if rest else Path(str(files("plankiln")))
        paths = sorted(root.glob(rest or folder))
        assert paths, f"no file of ours is {pattern}"
        for path in paths:
            prefix = f"{folder}/" if rest else ""
            digest = _loaded_digest(path) if path.suffix == ".py" else _sha256(path.read_bytes())
            found[f"our.{prefix}{path.relative_to(root).as_posix()}"] = digest
    return found


@cache
def _loaded_digest(path: Path) -> str:
    """Digest of a module's file as it was when first asked for: what runs is what was loaded, not a later edit."""
    return _sha256(path.read_bytes())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
