"""What is refused before any work is done: targets that cannot be built here, and models that no bundle could serve."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from plankiln.chat_template import ChatTemplate
from plankiln.checkpoint import Checkpoint
from plankiln.compiler.families import DecoderSpec
from plankiln.compiler.formats import KV_ONNX, KvFormat, kv_row_bytes
from plankiln.errors import BuildError, BundleError, Problem, RecipeError
from plankiln.recipe import ResolvedTarget, load_recipe
from plankiln.target import missing_flags

_ANY_CPU = "targets=[cpu-native]"
_BLOCK = 16


@dataclass(frozen=True)
class _Obstacle:
    """Why a target cannot be built here, and the `--set` values that would remove it."""

    reason: str
    way_out: tuple[str, ...]


def choose_targets(
    recipe: Path, overrides: Sequence[str], wanted: Sequence[str], *, refused: list[Problem] | None = None
) -> list[ResolvedTarget]:
    """The recipe's targets, or those `wanted` by name.

    Raises RecipeError, and BuildError when one of them cannot be built here, which says what can. With `refused`, they
    go there instead, as long as another can be built.
    """
    targets = load_recipe(recipe, overrides).resolve()
    names = [target.target.name for target in targets]
    listed = ", ".join(f"`{name}`" for name in names)
    if unknown := [name for name in wanted if name not in names]:
        raise BuildError([Problem(f"the recipe has no target `{name}`", hint=f"it has {listed}") for name in unknown])
    chosen = [target for target in targets if not wanted or target.target.name in wanted]
    obstacles = [(target.target.name, found) for target in chosen if (found := _obstacle(target))]
    if obstacles:
        buildable = [f"`--target {target.target.name}`" for target in targets if not _obstacle(target)]
        hint = f"of this recipe's targets, {' or '.join(buildable)} can be built here"
        hint = hint if buildable else _way_out(recipe, overrides, wanted)
        problems = [Problem(f"cannot build target `{name}`", found.reason, hint) for name, found in obstacles]
        if refused is None or len(obstacles) == len(chosen):
            raise BuildError(problems)
        refused += problems
    return [target for target in chosen if not _obstacle(target)]


def check_measurable(targets: Sequence[ResolvedTarget], refused: list[Problem] | None) -> list[ResolvedTarget]:
    """The targets whose plans this machine can run, and so measure.

    Raises BuildError about the others or, with `refused`, puts that there, as long as one is left.
    """
    problems = [
        Problem(
            f"target `{target.target.name}` cannot be measured here: this machine has no {', '.join(missing)}",
            hint="build it where it can run, or publish it unmeasured with `--no-gate`",
        )
        for target in targets
        if (missing := missing_flags(target.target))
    ]
    left = [target for target in targets if not missing_flags(target.target)]
    if problems and (refused is None or not left):
        raise BuildError(problems)
    if refused is not None:
        refused += problems
    return left


def check_model(checkpoint: Checkpoint, spec: DecoderSpec, targets: Sequence[ResolvedTarget]) -> None:
    """Raises BuildError with everything about the model that a bundle for one of the targets could not serve."""
    origin = str(checkpoint.origin)
    problems = [
        Problem(
            f"the end-of-sequence token {token} is not in the vocabulary of {spec.vocab_size}",
            origin,
            "correct `eos_token_id` in the model's config.json and generation_config.json",
        )
        for token in checkpoint.eos_token_ids
        if not 0 <= token < spec.vocab_size
    ]
    if checkpoint.chat_template is not None:
        try:
            ChatTemplate(checkpoint.chat_template, {}).compile()
        except BundleError as error:
            problems += [Problem(f"{found.what}: {found.where}", origin, found.hint) for found in error.problems]
    for target in targets:
        engine = target.engine
        row = kv_row_bytes(cast(KvFormat, target.quantize.kv_cache), spec.head_dim)
        block = 2 * spec.layers * spec.kv_heads * row * engine.block_size
        if block > engine.kv_memory:
            what = f"`engine.kv_memory` of {engine.kv_memory} bytes holds no block of the KV cache, which takes {block}"
            context = -(-engine.max_context // engine.block_size) * block
            hint = f"one context of {engine.max_context} tokens takes {context} bytes"
            problems.append(Problem(what, f"target `{target.target.name}`", hint))
    if problems:
        raise BuildError(problems)


def config_place(checkpoint: Checkpoint) -> str:
    """The file that a checkpoint's configuration is from."""
    return str(checkpoint.origin / "config.json" if checkpoint.origin.is_dir() else checkpoint.origin)


def _obstacle(resolved: ResolvedTarget) -> _Obstacle | None:
    target, quantize, engine = resolved.target, resolved.quantize, resolved.engine
    if target.kind != "cpu":
        return _Obstacle("GPU targets are not built yet", (_ANY_CPU,))
    if target.flags and platform.machine().lower() not in ("x86_64", "amd64"):
        return _Obstacle(f"it is for x86-64, and this machine is `{platform.machine()}`", (_ANY_CPU,))
    if quantize.weights == "nvfp4":
        reason = "no CPU kernel multiplies `nvfp4`: it is calibrated here, for GPUs that have it (SM100 and up)"
        return _Obstacle(reason, ("quantize.weights=int4_awq", "quantize.group_size=auto"))
    if quantize.kv_cache not in KV_ONNX:
        reason = f"`quantize.kv_cache: {quantize.kv_cache}` is not built yet, only {', '.join(KV_ONNX)} are"
        return _Obstacle(reason, ("quantize.kv_cache=bf16",))
    if engine.block_size % _BLOCK:
        reason = f"`engine.block_size: {engine.block_size}`: a CPU plan needs a multiple of {_BLOCK} tokens"
        short = (f"engine.max_context={_BLOCK}",) if engine.max_context < _BLOCK else ()
        return _Obstacle(reason, (f"engine.block_size={_BLOCK}", *short))
    if engine.tensor_parallel > 1:
        return _Obstacle("`engine.tensor_parallel` above 1 is not built yet", ("engine.tensor_parallel=1",))
    return None


def _way_out(recipe: Path, overrides: Sequence[str], wanted: Sequence[str]) -> str:
    """Settings with which the recipe, or what is wanted of it, can be built here: found by trying."""
    settings: list[str] = []
    found: _Obstacle | None = None
    while not found or not set(found.way_out) <= set(settings):
        settings += found.way_out if found else ()
        try:
            targets = load_recipe(recipe, [*overrides, *settings]).resolve()
        except RecipeError:
            break
        others = wanted and _ANY_CPU not in settings
        asked = [target for target in targets if not others or target.target.name in wanted]
        found = next((obstacle for target in asked if (obstacle := _obstacle(target))), None)
        if found is None:
            text = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
            return f"try `{text}`" + (" without `--target`" if wanted and not others else "")
    return "write a recipe with `targets: [cpu-native]`, and `weights` and `kv_cache` of `bf16`"
